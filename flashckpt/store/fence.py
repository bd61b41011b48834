"""The fence of one job on this node: a small checksummed record that only ever gets newer.

Each record is a file of its own, `fence-<epoch>-<nonce>-<step>`, written aside and renamed, and the greatest
one is in force; smaller ones are removed after it exists. One file that everybody replaces would not do: a
process that was paused between reading the old record and renaming its own would put an older fence over a
newer one when it wakes up.

Which of two is newer is a total order, so that all nodes end up with the same one in whatever order they hear
of them: the higher epoch; within an epoch the higher nonce (two launches in one millisecond: arbitrary, but
alike everywhere); within a launch the *lower* step. A launch that had to step back further kills more;
raising the step again would bring generations back that were declared dead.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.names import Draft, fence_name, parse_fence_name
from flashckpt.store.small_files import DIGEST_BYTES, digest, read_small, write_aside
from flashckpt.types import Fence

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_MAGIC = b"FCFENCE1"
_FIELDS = struct.Struct("<8sqQQ")
RECORD_BYTES = _FIELDS.size + DIGEST_BYTES


def newer(a: Fence | None, b: Fence | None) -> Fence | None:
    """The one that is in force when both are known."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b, key=lambda fence: fence.order)


def encode_fence(fence: Fence, job: str) -> bytes:
    fields = _FIELDS.pack(_MAGIC, fence.step, fence.epoch, fence.nonce)
    return fields + digest(fields, job)


def decode_fence(record: bytes, job: str) -> Fence | None:
    """None where the record is torn, altered or another job's."""
    fields, checksum = record[: _FIELDS.size], record[_FIELDS.size :]
    if len(record) != RECORD_BYTES or checksum != digest(fields, job):
        return None
    magic, step, epoch, nonce = _FIELDS.unpack(fields)
    return Fence(step=step, epoch=epoch, nonce=nonce) if magic == _MAGIC else None


def read_fence(directory: Directory) -> Fence | None:
    while True:
        in_force: Fence | None = None
        vanished = False
        for name, named in _records(directory):
            try:
                record = read_small(directory, name, RECORD_BYTES)
            except FileNotFoundError:
                vanished = True
                break
            except UnsafeDirectoryError as error:
                _log.warning("fence record ignored: %s", error)
                continue
            fence = decode_fence(record, directory.job)
            if fence != named:
                _log.warning("fence record %s/%s is torn or foreign; ignored", directory.path, name)
                continue
            in_force = newer(in_force, fence)
        if not vanished:
            return in_force
        # A record goes only after a newer one has come: look again.


def write_fence(directory: Directory, fence: Fence, writer: Owner) -> Fence:
    """Returns the fence that is in force now: this one, or a newer one that was there."""
    current = read_fence(directory)
    if current is not None and newer(current, fence) == current:
        return current
    failpoint("before_fence")
    content = encode_fence(fence, directory.job)
    write_aside(directory, fence_name(fence), content, Draft.FENCE, writer, pass_failpoint="mid_fence")
    failpoint("after_fence")
    in_force = read_fence(directory)
    for name, named in _records(directory):
        if in_force is not None and named != in_force and newer(named, in_force) == in_force:
            directory.remove(None, name)
    return fence if in_force is None else in_force


def _records(directory: Directory) -> list[tuple[str, Fence]]:
    parsed = ((name, parse_fence_name(name)) for name in directory.names(None))
    return [(name, fence) for name, fence in parsed if fence is not None]
