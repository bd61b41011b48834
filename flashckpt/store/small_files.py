"""Writes small checksummed files beside the slots: written aside, then renamed, so that a reader finds one complete or
not at all.

Their digest covers the job's name: a file that was copied from another job's directory does not fit.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import secrets
import struct
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError
from flashckpt.failpoints import failpoint
from flashckpt.store.names import draft_name
from flashckpt.store.reserve import replace_with_spare, take_spare

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory, Place
    from flashckpt.store.names import Draft
    from flashckpt.store.owner import Owner

DIGEST_BYTES = 16
MAX_PAYLOAD_BYTES = 16 << 20
_FRAME = struct.Struct("<8sQ")  # magic, length of the payload


def write_aside(
    directory: Directory,
    name: str,
    content: bytes,
    kind: Draft,
    writer: Owner,
    *,
    place: Place = None,
    pass_failpoint: str | None = None,
) -> None:
    """Write `content` under `name`, in place of what was there. `pass_failpoint` lies between the two halves.

    If there is no room, a file of the reserve is used, if there is one.
    """
    draft = draft_name(kind, writer, secrets.randbits(64))
    is_spare = _write_draft(directory, place, draft, content)
    try:
        if pass_failpoint is not None:
            failpoint(pass_failpoint)
        if is_spare:
            replace_with_spare(directory, place, draft, name)
        else:
            directory.replace(place, draft, name)
    except BaseException:
        directory.remove(place, draft)
        raise


def _write_draft(directory: Directory, place: Place, draft: str, content: bytes) -> bool:
    """Write a draft. Return True if a file of the reserve was needed."""
    try:
        fd = directory.create_file(place, draft)
        try:
            _fill(directory, fd, content)
        except BaseException:
            directory.remove(place, draft)
            raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        spare = take_spare(directory, place, draft, len(content))
        if spare is None:
            raise
        _overwrite(spare, content)
        return True
    return False


def _overwrite(fd: int, content: bytes) -> None:
    """Overwrite the file, and close it."""
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def read_small(directory: Directory, name: str, max_bytes: int, *, place: Place = None) -> bytes:
    """Return the file's bytes: at most one more than `max_bytes`, which tells the caller that it is too long.

    Raise FileNotFoundError if the file is gone, UnsafeDirectoryError if it is not a plain file of ours.
    """
    fd = directory.open_file(place, name)
    with open(fd, "rb") as file:
        return file.read(max_bytes + (not is_paged(directory)))


def is_paged(directory: Directory) -> bool:
    """Return True for hugetlbfs, which has no write(), and whose files are multiples of a page."""
    return directory.mount.fs_type == "hugetlbfs"


def digest(content: bytes, job: str) -> bytes:
    name = job.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content + name, digest_size=DIGEST_BYTES).digest()


def frame(magic: bytes, payload: bytes, job: str) -> bytes:
    """Frame a payload of any length, so that it can be found again in a file of complete pages."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ConfigError(f"{magic.decode()}: expected at most {MAX_PAYLOAD_BYTES} bytes, found {len(payload)}")
    content = _FRAME.pack(magic, len(payload)) + payload
    return content + digest(content, job)


def unframe(magic: bytes, content: bytes, job: str, *, paged: bool) -> bytes | None:
    """Return the payload; None if the bytes are torn, altered or another job's."""
    if len(content) < _FRAME.size + DIGEST_BYTES:
        return None
    found, length = _FRAME.unpack_from(content)
    end = _FRAME.size + length
    exact = len(content) >= end + DIGEST_BYTES if paged else len(content) == end + DIGEST_BYTES
    if found != magic or not exact or content[end : end + DIGEST_BYTES] != digest(content[:end], job):
        return None
    return content[_FRAME.size : end]


def read_framed(directory: Directory, name: str, magic: bytes, *, place: Place = None) -> bytes | None:
    """Read a file like read_small(), and return its payload like unframe()."""
    content = read_small(directory, name, _FRAME.size + MAX_PAYLOAD_BYTES + DIGEST_BYTES, place=place)
    return unframe(magic, content, directory.job, paged=is_paged(directory))


def _fill(directory: Directory, fd: int, content: bytes) -> None:
    with open(fd, "wb") as file:
        if not is_paged(directory):
            file.write(content)
            return
        page_bytes = os.fstatvfs(fd).f_bsize
        size_bytes = -(-len(content) // page_bytes) * page_bytes
        os.posix_fallocate(fd, 0, size_bytes)  # ENOSPC here, not a SIGBUS below
        with mmap.mmap(fd, size_bytes) as pages:
            pages[: len(content)] = content
