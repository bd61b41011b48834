"""Implements the native core in Python and NumPy: the same results and errors, but far slower.

Used if the native core is missing, and in tests to compare it with. `threads` is checked, then ignored.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import platform
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_POLYNOMIAL = 0x82F63B78
_MASK = 0xFFFFFFFF
_INT64_MAX = (1 << 63) - 1
_MAX_THREADS = 1024


def crc32c(data: Buffer, seed: int = 0) -> int:
    _check_uint(seed, 32)
    return _update(seed ^ _MASK, _bytes_of("data", data)) ^ _MASK


def crc32c_combine(first: int, second: int, second_length: int) -> int:
    _check_uint(first, 32)
    _check_uint(second, 32)
    _check_uint(second_length, 64)
    return _multiply(_zero_bytes_factor(second_length), first) ^ second


def scatter_copy(destination: Buffer, pieces: Buffer, chunk_bytes: int, threads: int) -> bytes:
    to = _bytes_of("destination", destination, writable=True)
    triples = _triples("pieces", pieces)
    length = len(to)
    _check_chunking(length, chunk_bytes, None, threads)
    _check_scatter_pieces(triples, length)
    start = to.ctypes.data
    covered = 0
    for source, offset, count in triples:
        to[covered:offset] = 0
        if source != 0:
            ctypes.memmove(start + offset, source, count)
        covered = offset + count
    to[covered:] = 0
    return _chunk_crcs(to, chunk_bytes).astype("<u4").tobytes()


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
    crcs, triples = _crcs("chunk_crcs", chunk_crcs), _triples("pieces", pieces)
    _check_area(data_offset, data_length)
    return _gather(
        lambda begin, count: _read_fully(fd, count, data_offset + begin),
        data_length,
        chunk_bytes,
        crcs,
        triples,
        threads,
        verify,
    )


def gather_copy(
    data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, threads: int, verify: bool = True
) -> list[int]:
    view = _bytes_of("data", data)
    crcs, triples = _crcs("chunk_crcs", chunk_crcs), _triples("pieces", pieces)
    return _gather(
        lambda begin, count: view[begin : begin + count].tobytes(),
        len(view),
        chunk_bytes,
        crcs,
        triples,
        threads,
        verify,
    )


def receive_chunks(
    fd: int, offset: int, length: int, chunk_bytes: int, chunk_crcs: Buffer, pieces: Buffer, scratch: Buffer
) -> list[int]:
    crcs, triples = _crcs("chunk_crcs", chunk_crcs), _triples("pieces", pieces)
    _check_area(offset, length)
    _check_chunking(length, chunk_bytes, len(crcs), 1)
    _check_gather_pieces(triples, _INT64_MAX)
    for i, (one, other) in enumerate(itertools.pairwise(triples), 1):
        if other[0] < one[0] + one[2]:
            raise ValueError(f"piece {i}: expected it behind the one before, found offset {other[0]}")
    most, room = min(chunk_bytes, length), len(_bytes_of("scratch", scratch, writable=True))
    if room // 2 < most:
        raise ValueError(f"scratch: expected room for two chunks of {most} bytes, found {room}")
    bad = []
    for index, (begin, end) in enumerate(_chunks(length, chunk_bytes)):
        data = bytearray(end - begin)
        with memoryview(data) as left:
            while left:
                count = os.readv(fd, [left])
                if not count:
                    raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                left = left[count:]
        if crc32c(data) != crcs[index]:
            bad.append(index)
            continue
        for source, address, count in triples:
            first, last = max(source, offset + begin), min(source + count, offset + end)
            if first < last:
                part = bytes(data[first - offset - begin : last - offset - begin])
                ctypes.memmove(address + first - source, part, last - first)
    return bad


def layout_entries(
    data: Buffer, item_bytes: dict[str, int], caps: Sequence[int], entry_type: type[Any], box_type: type[Any]
) -> None:
    """Returns None for every layout: the decoder in flashckpt.format.layout is the plain twin of this call."""
    _bytes_of("data", data)


def _gather(
    read: Callable[[int, int], bytes],
    data_length: int,
    chunk_bytes: int,
    crcs: list[int],
    triples: list[tuple[int, int, int]],
    threads: int,
    verify: bool,
) -> list[int]:
    _check_chunking(data_length, chunk_bytes, len(crcs) if verify else None, threads)
    _check_gather_pieces(triples, data_length)
    by_chunk: dict[int, list[tuple[int, int, int]]] = {}
    for piece in triples:
        source, _, count = piece
        if count > 0:
            for index in range(source // chunk_bytes, (source + count - 1) // chunk_bytes + 1):
                by_chunk.setdefault(index, []).append(piece)
    bad = []
    for index in sorted(by_chunk):
        begin = index * chunk_bytes
        end = min(begin + chunk_bytes, data_length)
        if not verify:  # then only the wanted bytes have to be in the file
            begin = max(begin, min(source for source, _, _ in by_chunk[index]))
            end = min(end, max(source + count for source, _, count in by_chunk[index]))
        data = read(begin, end - begin)
        if len(data) < end - begin:
            bad.append(index)
            continue
        if verify and crc32c(data) != crcs[index]:
            bad.append(index)
            continue
        for source, address, count in by_chunk[index]:
            first, last = max(source, begin), min(source + count, end)
            ctypes.memmove(address + first - source, data[first - begin : last - begin], last - first)
    return bad


def verify_chunks(data: Buffer, chunk_bytes: int, chunk_crcs: Buffer, threads: int) -> list[int]:
    view = _bytes_of("data", data)
    crcs = _crcs("chunk_crcs", chunk_crcs)
    _check_chunking(len(view), chunk_bytes, len(crcs), threads)
    return [index for index, crc in enumerate(_chunk_crcs(view, chunk_bytes).tolist()) if crc != crcs[index]]


def verify_file(
    fd: int, data_offset: int, data_length: int, chunk_bytes: int, chunk_crcs: Buffer, threads: int
) -> list[int]:
    crcs = _crcs("chunk_crcs", chunk_crcs)
    _check_area(data_offset, data_length)
    _check_chunking(data_length, chunk_bytes, len(crcs), threads)
    bad = []
    for index, (begin, end) in enumerate(_chunks(data_length, chunk_bytes)):
        data = _read_fully(fd, end - begin, data_offset + begin)
        if len(data) < end - begin or crc32c(data) != crcs[index]:
            bad.append(index)
    return bad


def checksum_ranges(ranges: Buffer, threads: int) -> bytes:
    _check_threads(threads)
    pairs = _items("ranges", ranges, "<i8,<i8", 16).tolist()
    for i, (address, length) in enumerate(pairs):
        if length < 0 or (address == 0 and length > 0):
            raise ValueError(
                f"range {i}: expected an address and a length from 0 on, found address {address}, length {length}"
            )
    crcs = [crc32c(ctypes.string_at(address, length)) if length else 0 for address, length in pairs]
    return np.array(crcs, dtype="<u4").tobytes()


def prefault(data: Buffer, threads: int) -> None:
    view = _bytes_of("data", data, writable=True)
    _check_threads(threads)
    if len(view) == 0:
        return
    first = view.ctypes.data & ~(mmap.PAGESIZE - 1)
    pages = (view.ctypes.data + len(view) - first + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    number = _populate_write(first, pages * mmap.PAGESIZE)
    if number == errno.EINVAL:  # a kernel before 5.14
        number = _touch_pages(first, pages)
    if number != 0:
        raise OSError(number, os.strerror(number))


def kernel() -> str:
    return "numpy"


def kernels() -> list[str]:
    return ["numpy"]


def set_kernel(name: str) -> None:
    if name != "numpy":
        raise ValueError(f"kernel '{name}': expected one of numpy")


# --- checksums: arithmetic modulo the polynomial, bit 31 being the coefficient of x^0 -----------------------


def _times_x(a: int) -> int:
    return (a >> 1) ^ (_POLYNOMIAL if a & 1 else 0)


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = _times_x(b)
    return product


@lru_cache(maxsize=256)
def _zero_bytes_factor(count: int) -> int:
    """Returns x^(8 * count), the factor of a state that `count` zero bytes follow."""
    power, square, exponent = 1 << 31, 1 << 30, 8 * count
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = _times_x(state)
        table.append(state)
    return table


_TABLE = _make_table()
_TABLE_ARRAY = np.array(_TABLE, dtype=np.uint32)


@lru_cache(maxsize=64)
def _shift_tables(count: int) -> NDArray[np.uint32]:
    """Returns tables of what each of a state's four bytes becomes if `count` zero bytes follow."""
    powers = [_zero_bytes_factor(count)]  # the factor times x^0 … x^31: the results of bits 31 … 0
    for _ in range(31):
        powers.append(_times_x(powers[-1]))
    tables = np.zeros((4, 256), dtype=np.uint32)
    for bit in range(32):
        chosen = (np.arange(256) >> bit % 8 & 1).astype(bool)
        tables[bit // 8, chosen] ^= np.uint32(powers[31 - bit])
    return tables


def _shift(states: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    tables = _shift_tables(count)
    shifted: NDArray[np.uint32] = tables[0, states & 0xFF] ^ tables[1, states >> 8 & 0xFF]
    shifted ^= tables[2, states >> 16 & 0xFF] ^ tables[3, states >> 24]
    return shifted


def _advance(states: NDArray[np.uint32], rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns each state after its own row of bytes. All rows advance by one byte per step."""
    for column in np.ascontiguousarray(rows.T):
        states = (states >> 8) ^ _TABLE_ARRAY[(states ^ column) & 0xFF]
    return states


def _update(state: int, data: NDArray[np.uint8]) -> int:
    if len(data) >= 1024:
        # About as many rows as columns; their states are joined in pairs.
        lanes = 1 << len(data).bit_length() // 2
        width = len(data) // lanes
        states = np.zeros(lanes, dtype=np.uint32)
        states[0] = state
        states = _advance(states, data[: lanes * width].reshape(lanes, width))
        data = data[lanes * width :]
        while len(states) > 1:
            states = _shift(states[::2], width) ^ states[1::2]
            width *= 2
        state = int(states[0])
    for byte in data.tolist():
        state = (state >> 8) ^ _TABLE[(state ^ byte) & 0xFF]
    return state


def _chunk_crcs(data: NDArray[np.uint8], chunk_bytes: int) -> NDArray[np.uint32]:
    whole = len(data) // chunk_bytes
    if whole > chunk_bytes // 64:  # many small chunks: side by side instead of one after another
        rows = data[: whole * chunk_bytes].reshape(whole, chunk_bytes)
        states = _advance(np.full(whole, _MASK, dtype=np.uint32), rows).tolist()
    else:
        states = [_update(_MASK, data[i * chunk_bytes : (i + 1) * chunk_bytes]) for i in range(whole)]
    if whole * chunk_bytes < len(data):
        states.append(_update(_MASK, data[whole * chunk_bytes :]))
    return np.array(states, dtype=np.uint32) ^ np.uint32(_MASK)


# --- buffers, files, pages ----------------------------------------------------------------------------------


def _bytes_of(name: str, data: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous buffer")
    if writable and view.readonly:
        raise ValueError(f"{name}: expected a writable buffer, found a read-only one")
    if view.nbytes == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.frombuffer(view, dtype=np.uint8)


def _items(name: str, data: Buffer, dtype: str, size_bytes: int) -> NDArray[np.generic]:
    raw = _bytes_of(name, data)
    if len(raw) % size_bytes != 0:
        raise ValueError(f"{name}: expected a multiple of {size_bytes} bytes, found {len(raw)}")
    return np.frombuffer(raw.tobytes(), dtype=dtype)


def _triples(name: str, data: Buffer) -> list[tuple[int, int, int]]:
    flat = _items(name, data, "<i8", 24).tolist()
    return list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))


def _crcs(name: str, data: Buffer) -> list[int]:
    crcs: list[int] = _items(name, data, "<u4", 4).tolist()
    return crcs


def _chunks(length: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, chunk_bytes):
        yield begin, min(begin + chunk_bytes, length)


def _read_fully(fd: int, length: int, offset: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(fd, length, offset)
        if not part:
            break
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


_MADV_POPULATE_WRITE = 23
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE_OP_PRIVATE = 5 | 128
_FUTEX_OR_ZERO = 2 << 28


def _populate_write(address: int, length: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    while libc.madvise(address, length, _MADV_POPULATE_WRITE) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def _touch_pages(first: int, pages: int) -> int:
    """Makes the kernel OR 0 into every page, so that a page that can't be made present is an error and no signal."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_SYS_FUTEX[platform.machine()])
    unused = ctypes.c_uint32(0)
    for page in range(pages):
        address = ctypes.c_void_p(first + page * mmap.PAGESIZE)
        result = libc.syscall(
            number,
            ctypes.byref(unused),
            ctypes.c_int(_FUTEX_WAKE_OP_PRIVATE),
            ctypes.c_int(0),
            ctypes.c_void_p(None),
            address,
            ctypes.c_int(_FUTEX_OR_ZERO),
        )
        if result < 0:
            return ctypes.get_errno()
    return 0


# --- arguments: the same checks in the same order and words as csrc/core ------------------------------------


def _check_uint(value: int, bits: int) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise TypeError(f"expected an unsigned {bits}-bit integer, found {value!r}")


def _check_threads(threads: int) -> None:
    if not 1 <= threads <= _MAX_THREADS:
        raise ValueError(f"expected threads from 1 to {_MAX_THREADS}, found {threads}")


def _check_chunking(length: int, chunk_bytes: int, crc_count: int | None, threads: int) -> None:
    if length < 0:
        raise ValueError(f"expected data length >= 0, found {length}")
    if chunk_bytes <= 0:
        raise ValueError(f"expected chunk_bytes > 0, found {chunk_bytes}")
    _check_threads(threads)
    chunks = -(-length // chunk_bytes)
    if crc_count is not None and crc_count != chunks:
        raise ValueError(
            f"expected {chunks} chunk checksums for {length} bytes in chunks of {chunk_bytes}, found {crc_count}"
        )


def _check_area(data_offset: int, data_length: int) -> None:
    if data_offset < 0:
        raise ValueError(f"expected data offset >= 0, found {data_offset}")
    if data_length < 0:
        raise ValueError(f"expected data length >= 0, found {data_length}")
    if data_offset + data_length > _INT64_MAX:
        raise ValueError(
            f"expected a data area within 2**63 bytes, found offset {data_offset} and length {data_length}"
        )


def _check_scatter_pieces(triples: list[tuple[int, int, int]], destination_length: int) -> None:
    previous_end = 0
    for i, (source, offset, length) in enumerate(triples):
        if length < 0:
            raise ValueError(f"piece {i}: expected length >= 0, found {length}")
        if source < 0:
            raise ValueError(f"piece {i}: expected source address >= 0, found {source}")
        if offset < 0:
            raise ValueError(f"piece {i}: expected destination offset >= 0, found {offset}")
        if offset + length > destination_length:
            raise ValueError(
                f"piece {i}: expected destination within {destination_length} bytes, "
                f"found offset {offset} and length {length}"
            )
        if source + length > _INT64_MAX:
            raise ValueError(
                f"piece {i}: expected source within the address space, found address {source} and length {length}"
            )
        if offset < previous_end:
            raise ValueError(
                f"piece {i}: expected destination offset >= {previous_end} (sorted, not overlapping), found {offset}"
            )
        previous_end = offset + length


def _check_gather_pieces(triples: list[tuple[int, int, int]], data_length: int) -> None:
    for i, (source, address, length) in enumerate(triples):
        if length < 0:
            raise ValueError(f"piece {i}: expected length >= 0, found {length}")
        if source < 0:
            raise ValueError(f"piece {i}: expected source offset >= 0, found {source}")
        if address < 0 or (address == 0 and length > 0):
            raise ValueError(f"piece {i}: expected destination address > 0, found {address}")
        if source + length > data_length:
            raise ValueError(
                f"piece {i}: expected source within {data_length} bytes, found offset {source} and length {length}"
            )
        if address + length > _INT64_MAX:
            raise ValueError(
                f"piece {i}: expected destination within the address space, found address {address} and length {length}"
            )
