"""What the native core promises at its edges: errors, truncated files, flipped bits, buffers, the GIL."""

from __future__ import annotations

import array
import errno
import mmap
import os
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest

from flashckpt import native
from flashckpt.native import twin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

CHUNK = 4096


@pytest.fixture(params=[native, twin], ids=["native", "twin"])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture
def memory_file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def crcs_of(data: bytes, chunk_bytes: int = CHUNK) -> bytes:
    return b"".join(
        google_crc32c.value(data[i : i + chunk_bytes]).to_bytes(4, "little") for i in range(0, len(data), chunk_bytes)
    )


def triples(*pieces: tuple[int, int, int]) -> array.array[int]:
    return array.array("q", [number for piece in pieces for number in piece])


def address_of(buffer: bytearray | mmap.mmap) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data


def test_the_compiled_core_is_in_use() -> None:
    assert native.IS_NATIVE
    assert native.kernel() == native.kernels()[0]
    assert native.kernels()[-1] == "portable"


def test_every_kind_of_buffer_is_taken(core: ModuleType) -> None:
    data = bytes(range(256)) * 8
    with mmap.mmap(-1, len(data)) as mapped:
        mapped[:] = data
        buffers = [
            data,
            bytearray(data),
            memoryview(data),
            memoryview(b"x" + data)[1:],
            array.array("q", data),
            np.frombuffer(data, dtype=np.float64).reshape(16, 16),
            mapped,
        ]
        assert {core.crc32c(buffer) for buffer in buffers} == {google_crc32c.value(data)}
    assert core.crc32c(np.zeros((0, 3))) == 0


def test_pieces_may_be_bytes_or_numbers(core: ModuleType) -> None:
    source = bytearray(b"abcdef")
    plan = triples((address_of(source), 1, 3))
    results = set()
    for pieces in (plan, plan.tobytes(), b"?" + plan.tobytes(), np.frombuffer(plan, dtype=np.int64)):
        target = bytearray(5)
        view = memoryview(pieces)[1:] if isinstance(pieces, bytes) and pieces[:1] == b"?" else pieces
        core.scatter_copy(target, view, CHUNK, 1)
        results.add(bytes(target))
    assert results == {b"\0abc\0"}


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (b"read-only", "destination: expected a writable buffer, found a read-only one"),
        (memoryview(bytearray(10))[::2], "destination: expected a C-contiguous buffer"),
        (np.zeros((4, 4)).T[:2], "destination: expected a C-contiguous buffer"),
    ],
)
def test_unfit_destinations_are_refused(core: ModuleType, buffer: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        core.scatter_copy(buffer, b"", CHUNK, 1)


def test_what_is_no_buffer_is_a_type_error(core: ModuleType) -> None:
    for wrong in (None, 5, "text", [1, 2, 3]):
        with pytest.raises(TypeError):
            core.crc32c(wrong)


@pytest.mark.parametrize(("first", "length"), [(-1, 1), (1 << 32, 1), (0, -1), (0, 1 << 64)])
def test_numbers_that_do_not_fit_are_type_errors(core: ModuleType, first: int, length: int) -> None:
    with pytest.raises(TypeError):
        core.crc32c_combine(first, 0, length)


def test_pieces_must_be_whole_triples(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="pieces: expected a multiple of 24 bytes, found 25"):
        core.scatter_copy(bytearray(5), bytes(25), CHUNK, 1)


def test_the_bad_piece_is_named_and_nothing_is_written(core: ModuleType) -> None:
    source = bytearray(b"x" * 100)
    at = address_of(source)
    target = bytearray(b"-" * 100)
    for pieces, says in [
        (triples((at, 0, 10), (at, 9, 10)), r"piece 1: expected destination offset >= 10 .*found 9"),
        (triples((at, 0, 10), (at, 95, 6)), r"piece 1: .*within 100 bytes, found offset 95 and length 6"),
        (triples((at, 0, 2**63 - 1)), r"piece 0: .*within 100 bytes"),
        (triples((at, 2**63 - 1, 2**63 - 1)), r"piece 0: .*within 100 bytes"),
        (triples((at, 0, 10), (at, 20, -1)), r"piece 1: expected length >= 0, found -1"),
    ]:
        with pytest.raises(ValueError, match=says):
            core.scatter_copy(target, pieces, CHUNK, 2)
    assert target == b"-" * 100


def test_a_wrong_number_of_checksums_is_refused(core: ModuleType, memory_file: int) -> None:
    says = "expected 3 chunk checksums for 9000 bytes in chunks of 4096, found 2"
    with pytest.raises(ValueError, match=says):
        core.verify_chunks(bytes(9000), CHUNK, bytes(8), 1)
    with pytest.raises(ValueError, match=says):
        core.verify_file(memory_file, 0, 9000, CHUNK, bytes(8), 1)
    with pytest.raises(ValueError, match=says):
        core.gather_read(memory_file, 0, 9000, CHUNK, bytes(8), b"", 1)
    with pytest.raises(ValueError, match="chunk_crcs: expected a multiple of 4 bytes, found 9"):
        core.verify_chunks(bytes(9000), CHUNK, bytes(9), 1)


def test_a_flipped_bit_reaches_no_destination(core: ModuleType, memory_file: int) -> None:
    data = os.urandom(40 * CHUNK + 77)
    crcs = crcs_of(data)
    for position in (0, CHUNK - 1, 7 * CHUNK, 20 * CHUNK + 5, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        os.pwrite(memory_file, damaged, 1000)
        target = bytearray(b"\x55" * len(data))
        # Two pieces meet in the middle of a chunk: neither may get its part of a bad one.
        cut = 20 * CHUNK + 100
        at = address_of(target)
        pieces = triples((cut, at + cut, len(data) - cut), (0, at, cut))
        bad = position // CHUNK
        assert core.gather_read(memory_file, 1000, len(data), CHUNK, crcs, pieces, 2) == [bad]
        expected = bytearray(data)
        expected[bad * CHUNK : (bad + 1) * CHUNK] = b"\x55" * len(data[bad * CHUNK : (bad + 1) * CHUNK])
        assert target == expected
        assert core.verify_file(memory_file, 1000, len(data), CHUNK, crcs, 2) == [bad]
        assert core.verify_chunks(damaged, CHUNK, crcs, 2) == [bad]


def test_chunks_that_no_piece_touches_are_not_read(core: ModuleType, memory_file: int) -> None:
    data = os.urandom(10 * CHUNK)
    os.pwrite(memory_file, data[: 6 * CHUNK], 0)  # the rest is missing
    target = bytearray(CHUNK)
    pieces = triples((5 * CHUNK - 10, address_of(target), 20))
    assert core.gather_read(memory_file, 0, len(data), CHUNK, crcs_of(data), pieces, 1) == []
    assert target[:20] == data[5 * CHUNK - 10 : 5 * CHUNK + 10]


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file_is_bad_chunks(core: ModuleType, memory_file: int, verify: bool) -> None:
    data = os.urandom(5 << 20)  # large enough for real threads
    os.pwrite(memory_file, data, 0)
    os.ftruncate(memory_file, (3 << 20) + 5)
    target = bytearray(len(data))
    pieces = triples((0, address_of(target), len(data)))
    expected = list(range((3 << 20) // (256 << 10), len(data) // (256 << 10)))
    crcs = crcs_of(data, 256 << 10)
    assert core.gather_read(memory_file, 0, len(data), 256 << 10, crcs, pieces, 4, verify) == expected
    assert target[: 3 << 20] == data[: 3 << 20]
    if verify:
        assert not any(target[3 << 20 :])
    assert core.verify_file(memory_file, 0, len(data), 256 << 10, crcs, 4) == expected


def test_refusals_of_the_system_are_os_errors(core: ModuleType) -> None:
    target = bytearray(8)
    pieces = triples((0, address_of(target), 8))
    with tempfile.TemporaryFile() as file:
        closed = os.dup(file.fileno())
        os.close(closed)
    for call in (
        lambda: core.gather_read(closed, 0, 8, 8, crcs_of(bytes(8)), pieces, 1),
        lambda: core.verify_file(closed, 0, 8, 8, crcs_of(bytes(8)), 1),
    ):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            call()
        assert caught.value.errno == errno.EBADF
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Illegal seek"):
        core.verify_file(reader, 0, 8, 8, crcs_of(bytes(8)), 1)
    os.close(reader)
    os.close(writer)


def test_prefault_keeps_the_bytes(core: ModuleType, memory_file: int) -> None:
    os.ftruncate(memory_file, 1 << 20)
    os.pwrite(memory_file, b"kept", 5000)
    with mmap.mmap(memory_file, 1 << 20) as mapped:
        before = os.fstat(memory_file).st_blocks
        core.prefault(mapped, 2)
        assert mapped[5000:5004] == b"kept"
    assert before < os.fstat(memory_file).st_blocks == (1 << 20) // 512


def test_prefault_beyond_the_file_is_an_error_and_no_signal(core: ModuleType, memory_file: int) -> None:
    os.ftruncate(memory_file, 1 << 20)
    with mmap.mmap(memory_file, 1 << 20) as mapped:
        os.ftruncate(memory_file, 1 << 16)
        with pytest.raises(OSError, match="Bad address"):
            core.prefault(mapped, 1)


def test_prefault_without_the_kernel_call(monkeypatch: pytest.MonkeyPatch, memory_file: int) -> None:
    monkeypatch.setattr(twin, "_MADV_POPULATE_WRITE", 9999)  # what a kernel before 5.14 makes of it: EINVAL
    os.ftruncate(memory_file, 1 << 20)
    with mmap.mmap(memory_file, 1 << 20) as mapped:
        twin.prefault(mapped, 1)
        assert os.fstat(memory_file).st_blocks == (1 << 20) // 512
        os.ftruncate(memory_file, 1 << 16)
        with pytest.raises(OSError, match="Bad address"):
            twin.prefault(mapped, 1)


def test_unknown_kernels_are_refused(core: ModuleType) -> None:
    before = core.kernel()
    with pytest.raises(ValueError, match="kernel 'abacus': expected one of"):
        core.set_kernel("abacus")
    assert core.kernel() == before


def test_another_thread_runs_meanwhile(memory_file: int) -> None:
    """With a switch interval that never ends, Python code of another thread runs only if the GIL is given away."""
    data = np.zeros(64 << 20, dtype=np.uint8)
    target = bytearray(len(data))
    crcs = native.scatter_copy(target, b"", 1 << 18, 1)
    os.ftruncate(memory_file, len(data))
    at = address_of(target)
    calls = {
        "scatter_copy": lambda: native.scatter_copy(target, triples((data.ctypes.data, 0, len(data))), 1 << 18, 1),
        "gather_read": lambda: native.gather_read(
            memory_file, 0, len(data), 1 << 18, crcs, triples((0, at, len(data))), 1
        ),
        "verify_chunks": lambda: native.verify_chunks(data, 1 << 18, crcs, 1),
        "checksum_ranges": lambda: native.checksum_ranges(np.array([data.ctypes.data, len(data)], dtype=np.int64), 1),
        "verify_file": lambda: native.verify_file(memory_file, 0, len(data), 1 << 18, crcs, 1),
        "prefault": lambda: native.prefault(target, 1),
        "crc32c": lambda: native.crc32c(data),
    }
    ticks = 0
    stop = False

    def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0)  # gives the GIL back by itself

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    stuck = []
    sys.setswitchinterval(1000)
    try:
        thread.start()
        for name, call in calls.items():
            deadline = time.monotonic() + 20
            while True:
                before = ticks
                call()
                if ticks > before:
                    break
                if time.monotonic() > deadline:
                    stuck.append(name)
                    break
    finally:
        stop = True
        sys.setswitchinterval(interval)
        thread.join()
    assert stuck == []
