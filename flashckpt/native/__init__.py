"""Moves and checksums bytes: by the compiled core, or by its plain twin if the core is missing.

Every call that takes a `Buffer` takes anything C-contiguous with the buffer protocol (bytes, memoryview,
mmap, array, NumPy array) and holds it until it returns. The caller promises that the memory at raw addresses in
`pieces` stays valid until the call returns. Nothing is kept afterwards.

All calls release the GIL while they work (except for a checksum of a few bytes). Threads live only as long as the call
that started them, so that forking between calls is safe. Bad arguments raise ValueError before anything is written;
errors of the system raise OSError.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from typing_extensions import Buffer

__all__ = [
    "IS_NATIVE",
    "checksum_ranges",
    "crc32c",
    "crc32c_combine",
    "gather_copy",
    "gather_read",
    "kernel",
    "kernels",
    "layout_entries",
    "prefault",
    "receive_chunks",
    "scatter_copy",
    "set_kernel",
    "verify_chunks",
    "verify_file",
]

_log = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound="tuple[Any, ...]")


def _choose() -> tuple[ModuleType, bool]:
    if os.environ.get("FLASHCKPT_NATIVE") == "0":
        reason = "FLASHCKPT_NATIVE=0"
    else:
        try:
            from flashckpt.native import _core
        except ImportError as error:
            reason = str(error)
        else:
            return _core, True
    from flashckpt.native import twin

    _log.warning("using the Python implementation of the native core, which is hundreds of times slower: %s", reason)
    return twin, False


_backend, IS_NATIVE = _choose()


def crc32c(data: Buffer, seed: int = 0) -> int:
    """Returns the CRC32C of the bytes whose CRC is `seed` (0: none), followed by `data`."""
    result: int = _backend.crc32c(data, seed)
    return result


def crc32c_combine(first: int, second: int, second_length: int) -> int:
    """Returns the CRC32C of A followed by B, from that of A, that of B and the length of B. Reads no data."""
    result: int = _backend.crc32c_combine(first, second, second_length)
    return result


def scatter_copy(destination: Buffer, pieces: Buffer, chunk_bytes: int, threads: int) -> bytes:
    """Writes all of `destination` and returns its checksums: a little-endian uint32 CRC32C per `chunk_bytes`.

    `pieces` are int64 triples (source address, destination offset, length), sorted by destination offset,
    not overlapping, within the destination. Source address 0 means that the bytes are in place already and are only
    checksummed. Bytes that no piece covers are filled with zeros. Sources must not overlap the destination.

    Once this returns, the sources may be changed and freed. If a piece is bad, nothing is written.
    """
    result: bytes = _backend.scatter_copy(destination, pieces, chunk_bytes, threads)
    return result


def gather_read(
    fd: int,
    data_offset: int,
    data_length: int,
    chunk_bytes: int,
    chunk_crcs: Buffer,
    pieces: Buffer,
    threads: int,
    verify: bool = True,
) -> list[int]:
    """Reads parts of a file's data area to raw addresses; returns the bad chunks, sorted.

    `pieces` are int64 triples (offset within the data area, destination address, length) in any order; they
    may share source bytes, but their destinations must not overlap. Only chunks that a piece touches are
    read.

    No byte of a chunk reaches a destination before all of the chunk was read and its CRC32C found right: the
    destinations of a bad or cut short chunk (its index is in the result) are untouched. A file that shrinks
    meanwhile means bad chunks, not a signal. After an OSError any part of the destinations may be written.

    With `verify=False` the checksums are ignored. Then only chunks whose wanted bytes lie behind the file's end are
    reported; some of their bytes may have been written.
    """
    result: list[int] = _backend.gather_read(
        fd, data_offset, data_length, chunk_bytes, chunk_crcs, pieces, threads, verify
    )
    return result


def gather_copy(
    data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, threads: int, verify: bool = True
) -> list[int]:
    """Does what `gather_read` does, from memory: `data` is the data area.

    The caller guarantees that it neither shrinks nor changes meanwhile: each chunk is checked in place, and then copied
    from there. If it maps a file that another process may write or cut short, use `gather_read`.
    """
    result: list[int] = _backend.gather_copy(data, chunk_bytes, chunk_crcs, pieces, threads, verify)
    return result


def receive_chunks(
    fd: int, offset: int, length: int, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, scratch: Buffer
) -> list[int]:
    """Receives `length` bytes of a data area, from `offset` on, from a socket; returns the bad chunks.

    They are chunks of `chunk_bytes` (the last one may be shorter), each with a checksum. Indices of bad chunks count
    from the first one here; the destinations of bad chunks are untouched. `pieces` are like those of `gather_read`, but
    sorted by offset and without shared source bytes. Pieces outside the received range are ignored, and bytes that no
    piece covers are dropped. `scratch` has room for two chunks. Use the same one for the next call: then it is still in
    the cache.

    The socket has to be a blocking one. Raises OSError: EAGAIN if nothing was received within its timeout, ECONNRESET
    if the other end closed it early. Earlier chunks may be in place by then.
    """
    result: list[int] = _backend.receive_chunks(fd, offset, length, chunk_bytes, chunk_crcs, pieces, scratch)
    return result


def layout_entries(
    data: Buffer, item_bytes: dict[str, int], caps: Sequence[int], entry_type: type[Entry], box_type: type[Any]
) -> list[Entry] | None:
    """Decodes an encoded layout if it obviously keeps the format's rules; returns None otherwise.

    After None, `flashckpt.format.layout` decodes it and says what is wrong, if anything is. Does not check that entries
    of one key agree. `caps`: entries, bytes per entry, bytes per name, path parts, dimensions, alignment. Keeps the
    GIL.
    """
    result: list[Entry] | None = _backend.layout_entries(data, item_bytes, caps, entry_type, box_type)
    return result


def verify_chunks(data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, threads: int) -> list[int]:
    """Returns the indices of the chunks of `data` whose CRC32C differs from the given one, sorted.

    If `data` maps a file, the caller must know that the file does not shrink; otherwise use `verify_file`.
    """
    result: list[int] = _backend.verify_chunks(data, chunk_bytes, chunk_crcs, threads)
    return result


def verify_file(
    fd: int, data_offset: int, data_length: int, chunk_bytes: int, chunk_crcs: Buffer, threads: int
) -> list[int]:
    """Does what `verify_chunks` does, for a data area in a file. Chunks that reach beyond the file's end are bad."""
    result: list[int] = _backend.verify_file(fd, data_offset, data_length, chunk_bytes, chunk_crcs, threads)
    return result


def checksum_ranges(ranges: Buffer, threads: int) -> bytes:
    """Return a little-endian uint32 CRC32C per range: int64 pairs (address, length) in this process's memory."""
    result: bytes = _backend.checksum_ranges(ranges, threads)
    return result


def prefault(data: Buffer, threads: int) -> None:
    """Makes every page of `data` present and writable. Changes no byte, even while other threads write.

    Raises OSError, never a signal, for a page that can't be made present (the mapped file is too short, memory is
    full).
    """
    _backend.prefault(data, threads)


def kernel() -> str:
    """Returns the name of the checksum kernel in use."""
    result: str = _backend.kernel()
    return result


def kernels() -> list[str]:
    """Returns the names of the kernels that run on this machine, best first."""
    result: list[str] = _backend.kernels()
    return result


def set_kernel(name: str) -> None:
    """Selects the kernel for later calls, for tests and measurements. All kernels give the same results."""
    _backend.set_kernel(name)
