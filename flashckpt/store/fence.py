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

import hashlib
import logging
import mmap
import os
import secrets
import struct
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.names import fence_draft_name, fence_name, parse_fence_name
from flashckpt.types import Fence

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_MAGIC = b"FCFENCE1"
_FIELDS = struct.Struct("<8sqQQ")
_DIGEST_BYTES = 16
RECORD_BYTES = _FIELDS.size + _DIGEST_BYTES


def newer(a: Fence | None, b: Fence | None) -> Fence | None:
    """The one that is in force when both are known."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b, key=_order)


def encode_fence(fence: Fence, job: str) -> bytes:
    fields = _FIELDS.pack(_MAGIC, fence.step, fence.epoch, fence.nonce)
    return fields + _digest(fields, job)


def decode_fence(record: bytes, job: str) -> Fence | None:
    """None where the record is torn, altered or another job's."""
    fields, digest = record[: _FIELDS.size], record[_FIELDS.size :]
    if len(record) != RECORD_BYTES or digest != _digest(fields, job):
        return None
    magic, step, epoch, nonce = _FIELDS.unpack(fields)
    return Fence(step=step, epoch=epoch, nonce=nonce) if magic == _MAGIC else None


def read_fence(directory: Directory) -> Fence | None:
    while True:
        in_force: Fence | None = None
        vanished = False
        for name, named in _records(directory):
            try:
                fd = directory.open_file(None, name)
            except FileNotFoundError:
                vanished = True
                break
            except UnsafeDirectoryError as error:
                _log.warning("fence record ignored: %s", error)
                continue
            with open(fd, "rb") as file:
                record = file.read(RECORD_BYTES + (not _is_paged(directory)))
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
    draft = fence_draft_name(writer, secrets.randbits(64))
    fd = directory.create_file(None, draft)
    try:
        _write_record(directory, fd, encode_fence(fence, directory.job))
        failpoint("mid_fence")
        directory.replace(draft, fence_name(fence))
    except BaseException:
        directory.remove(None, draft)
        raise
    failpoint("after_fence")
    in_force = read_fence(directory)
    for name, named in _records(directory):
        if in_force is not None and named != in_force and newer(named, in_force) == in_force:
            directory.remove(None, name)
    return fence if in_force is None else in_force


def _is_paged(directory: Directory) -> bool:
    """hugetlbfs knows no write(), and its files are whole pages."""
    return directory.mount.fs_type == "hugetlbfs"


def _write_record(directory: Directory, fd: int, record: bytes) -> None:
    with open(fd, "wb") as file:
        if not _is_paged(directory):
            file.write(record)
            return
        page_bytes = os.fstatvfs(fd).f_bsize
        os.posix_fallocate(fd, 0, page_bytes)  # ENOSPC here, not a SIGBUS below
        with mmap.mmap(fd, page_bytes) as page:
            page[: len(record)] = record


def _records(directory: Directory) -> list[tuple[str, Fence]]:
    parsed = ((name, parse_fence_name(name)) for name in directory.names(None))
    return [(name, fence) for name, fence in parsed if fence is not None]


def _order(fence: Fence) -> tuple[int, int, int]:
    return fence.epoch, fence.nonce, -fence.step


def _digest(fields: bytes, job: str) -> bytes:
    # The job is part of it: a record that was copied from another job's directory does not fit.
    name = job.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(fields + name, digest_size=_DIGEST_BYTES).digest()
