"""Moves and checksums bytes: the compiled core, or its plain twin where that is missing.

Every call that takes a `Buffer` takes anything C-contiguous with the buffer protocol (bytes, memoryview,
mmap, array, NumPy array) and holds it until it returns. Raw addresses in `pieces` are the caller's promise:
that memory must stay valid until the call returns. Nothing is kept afterwards.

All calls release the GIL while they work (a checksum of a few bytes excepted). Threads live only as long as
the call that started them, so forking between calls is safe. Bad arguments raise ValueError before anything
is written, refusals of the system raise OSError.
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
    """The CRC32C of the bytes whose CRC is `seed` (0: none), followed by `data`."""
    result: int = _backend.crc32c(data, seed)
    return result


def crc32c_combine(first: int, second: int, second_length: int) -> int:
    """The CRC32C of A followed by B, from that of A, that of B and the length of B. Reads no data."""
    result: int = _backend.crc32c_combine(first, second, second_length)
    return result


def scatter_copy(destination: Buffer, pieces: Buffer, chunk_bytes: int, threads: int) -> bytes:
    """Writes all of `destination` and returns its checksums: a little-endian uint32 CRC32C per `chunk_bytes`.

    `pieces` are int64 triples (source address, destination offset, length), sorted by destination offset,
    not overlapping, within the destination. Source address 0 means that the bytes are in place already and
    are only checksummed. What no piece covers is filled with zeros. Sources must not overlap the destination.

    Once this returns the sources may be changed and freed. With a bad piece nothing is written.
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

    With `verify=False` the checksums are not looked at, and only chunks whose wanted bytes the file ends
    before are reported; some of their bytes may have been written.
    """
    result: list[int] = _backend.gather_read(
        fd, data_offset, data_length, chunk_bytes, chunk_crcs, pieces, threads, verify
    )
    return result


def gather_copy(
    data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, threads: int, verify: bool = True
) -> list[int]:
    """As `gather_read`, out of memory: `data` is the data area.

    The caller knows that it neither shrinks nor changes meanwhile: each chunk is checked where it lies, and only
    then copied from there. If it maps a file that somebody else may write or cut short, use `gather_read`.
    """
    result: list[int] = _backend.gather_copy(data, chunk_bytes, chunk_crcs, pieces, threads, verify)
    return result


def receive_chunks(
    fd: int, offset: int, length: int, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, scratch: Buffer
) -> list[int]:
    """Receives `length` bytes of a data area out of a socket, those from `offset` on; returns the bad chunks.

    They are chunks of `chunk_bytes`, with a checksum each, and perhaps a shorter last one; bad ones are counted from
    the first one here, and their destinations are untouched. `pieces` are as those of `gather_read`, but sorted by
    their offset and without shared source bytes; those outside are passed over, and bytes that no piece asks for are
    dropped.
    `scratch` has room for two chunks; used again for the next call it is still in the cache.

    The socket has to be a blocking one. OSError: EAGAIN where it has a timeout and nothing came for so long, ECONNRESET
    where the other end closed it early; chunks that came before may be in place by then.
    """
    result: list[int] = _backend.receive_chunks(fd, offset, length, chunk_bytes, chunk_crcs, pieces, scratch)
    return result


def layout_entries(
    data: Buffer, item_bytes: dict[str, int], caps: Sequence[int], entry_type: type[Entry], box_type: type[Any]
) -> list[Entry] | None:
    """The entries of an encoded layout, where it is plain that it keeps the format's rules; else None.

    None says nothing: `flashckpt.format.layout` decodes it then, and says what is wrong, if anything is. Whether
    entries of one key agree is not looked at. `caps`: entries, bytes of an entry, bytes of a name, path parts,
    dimensions, alignment. Keeps the GIL.
    """
    result: list[Entry] | None = _backend.layout_entries(data, item_bytes, caps, entry_type, box_type)
    return result


def verify_chunks(data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, threads: int) -> list[int]:
    """The indices of the chunks of `data` whose CRC32C is not the given one, sorted.

    If `data` maps a file, the caller must know that the file does not shrink; otherwise use `verify_file`.
    """
    result: list[int] = _backend.verify_chunks(data, chunk_bytes, chunk_crcs, threads)
    return result


def verify_file(
    fd: int, data_offset: int, data_length: int, chunk_bytes: int, chunk_crcs: Buffer, threads: int
) -> list[int]:
    """As `verify_chunks`, for a data area in a file. Chunks that the file ends before or within are bad."""
    result: list[int] = _backend.verify_file(fd, data_offset, data_length, chunk_bytes, chunk_crcs, threads)
    return result


def checksum_ranges(ranges: Buffer, threads: int) -> bytes:
    """Return a little-endian uint32 CRC32C per range: int64 pairs (address, length) in this process's memory."""
    result: bytes = _backend.checksum_ranges(ranges, threads)
    return result


def prefault(data: Buffer, threads: int) -> None:
    """Makes every page of `data` present and writable, without changing a byte, even while others write.

    A page that can't be had (the mapped file is too short, memory is full) raises OSError, never a signal.
    """
    _backend.prefault(data, threads)


def kernel() -> str:
    """The name of the checksum kernel in use."""
    result: str = _backend.kernel()
    return result


def kernels() -> list[str]:
    """The kernels that run on this machine, best first."""
    result: list[str] = _backend.kernels()
    return result


def set_kernel(name: str) -> None:
    """Uses another kernel from now on, for tests and measurements. Results are the same with all of them."""
    _backend.set_kernel(name)
