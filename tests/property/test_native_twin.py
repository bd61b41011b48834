"""The native core and its plain twin give the same bytes, checksums, bad chunks and errors."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.native import _core, twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = _core.kernels()
# Around the sizes where kernels change gear: words, vectors, rounds of 256 bytes, three streams, mixed blocks.
BORDERS = [0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 767, 768, 769, 6143, 6144, 6145, 31743, 31744, 31745]
LENGTHS = st.one_of(st.sampled_from(BORDERS), st.integers(0, 3000), st.integers(0, 70_000))
CHUNKS = st.one_of(st.integers(1, 300), st.sampled_from([512, 4096, 65_536, 262_144]), st.integers(1, 1 << 40))
THREADS = st.integers(1, 4)
# Below some megabytes a call stays in its own thread, so a share of the examples is larger than that.
LARGE = 5 << 20


@contextmanager
def kernel(name: str) -> Iterator[None]:
    before = _core.kernel()
    _core.set_kernel(name)
    try:
        yield
    finally:
        _core.set_kernel(before)


def noise(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the kind and text of what it raises."""
    try:
        return call()
    except (ValueError, OSError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=60)
@given(length=LENGTHS, start=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_crc32c_agrees_with_google_and_the_twin(name: str, length: int, start: int, seed: int) -> None:
    data = memoryview(noise(start + length, length))[start:]
    with kernel(name):
        assert _core.crc32c(data) == google_crc32c.value(bytes(data)) == twin.crc32c(data)
        assert _core.crc32c(data, seed) == google_crc32c.extend(seed, bytes(data)) == twin.crc32c(data, seed)


@settings(deadline=None, max_examples=60)
@given(first=LENGTHS, second=LENGTHS)
def test_combined_checksums_are_those_of_the_whole(first: int, second: int) -> None:
    a, b = noise(first, 1).tobytes(), noise(second, 2).tobytes()
    parts = google_crc32c.value(a), google_crc32c.value(b), second
    assert _core.crc32c_combine(*parts) == twin.crc32c_combine(*parts) == google_crc32c.value(a + b)


@settings(max_examples=200)
@given(
    first=st.integers(0, 2**32 - 1),
    second=st.integers(0, 2**32 - 1),
    length=st.integers(0, 2**64 - 1),
)
def test_combining_over_any_length_agrees(first: int, second: int, length: int) -> None:
    assert _core.crc32c_combine(first, second, length) == twin.crc32c_combine(first, second, length)


@st.composite
def scatter_plans(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """A destination length, a source length, and pieces (source offset or -1 for in place, offset, length)."""
    scale = draw(st.sampled_from([50, 3000, 100_000]))
    pieces, at = [], 0
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.one_of(st.just(0), st.integers(0, scale // 4)))
        length = draw(st.one_of(st.just(0), st.integers(0, scale)))
        pieces.append((draw(st.integers(-1, 100)), at, length))
        at += length
    length = at + draw(st.integers(0, scale))
    source = 101 + max((count for _, _, count in pieces), default=0)
    if draw(st.integers(0, 5)) == 0:
        length += LARGE
        source = max(source, LARGE // 2)
        pieces.append((draw(st.integers(-1, 100)), at, LARGE // 2 - 101))
    return length, source, pieces


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=30)
@given(plan=scatter_plans(), chunk_bytes=CHUNKS, threads=THREADS, shift=st.integers(0, 65))
def test_scatter_agrees(
    name: str,
    plan: tuple[int, int, list[tuple[int, int, int]]],
    chunk_bytes: int,
    threads: int,
    shift: int,
) -> None:
    length, source_length, plan_pieces = plan
    chunk_bytes = max(chunk_bytes, length // 2000)  # the oracle takes a Python step a chunk
    source = noise(source_length, 3)
    pieces = np.array([(0 if at < 0 else source.ctypes.data + at, to, n) for at, to, n in plan_pieces], dtype=np.int64)
    # A recycled slot: what was there before must show only where a piece says "in place".
    before = noise(length + shift, 4)[shift:]
    native, plain = (noise(length + shift, 4)[shift:] for _ in range(2))
    with kernel(name):
        crcs = _core.scatter_copy(native, pieces, chunk_bytes, threads)
    assert crcs == twin.scatter_copy(plain, pieces, chunk_bytes, 1)
    assert np.array_equal(native, plain)
    expected = np.zeros(length, dtype=np.uint8)
    for at, to, n in plan_pieces:
        expected[to : to + n] = before[to : to + n] if at < 0 else source[at : at + n]
    assert np.array_equal(native, expected)
    step = min(chunk_bytes, max(length, 1))
    assert crcs == b"".join(
        google_crc32c.value(expected[i : i + step].tobytes()).to_bytes(4, "little") for i in range(0, length, step)
    )


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), chunk_bytes=CHUNKS, threads=THREADS, verify=st.booleans())
def test_gather_and_verify_agree(name: str, data: st.DataObject, chunk_bytes: int, threads: int, verify: bool) -> None:
    length = data.draw(LENGTHS, label="length")
    if data.draw(st.integers(0, 5)) == 0:
        length += LARGE
    chunk_bytes = max(chunk_bytes, length // 2000)
    offset = data.draw(st.integers(0, 5000), label="offset")
    content = noise(length, 5)
    step = min(chunk_bytes, max(length, 1))
    crcs = b"".join(
        google_crc32c.value(content[i : i + step].tobytes()).to_bytes(4, "little") for i in range(0, length, step)
    )
    spans = []
    for _ in range(data.draw(st.integers(0, 8))):
        begin = data.draw(st.integers(0, length))
        spans.append((begin, data.draw(st.integers(0, length - begin))))
    for position in data.draw(st.lists(st.integers(0, max(length - 1, 0)), max_size=3)) if length else []:
        content[position] ^= 1 << position % 8
    kept = data.draw(st.one_of(st.just(length), st.integers(0, length)), label="kept")

    with tempfile.TemporaryFile() as file:
        file.write(b"\xee" * offset + content[:kept].tobytes())
        file.flush()
        area = (file.fileno(), offset, length, chunk_bytes, crcs)
        with kernel(name):
            bad = _core.verify_file(*area, threads)
            if kept == length:
                assert bad == _core.verify_chunks(content, chunk_bytes, crcs, threads)
        assert bad == twin.verify_file(*area, 1)

        total = sum(count for _, count in spans)
        results = []
        for gather in (_core.gather_read, twin.gather_read):
            target = np.full(total + len(spans), 0xA5, dtype=np.uint8)
            with kernel(name):
                bad_read = gather(*area, np.array(addressed(spans, target), dtype=np.int64), threads, verify)
            results.append((bad_read, target))
        (native_bad, native), (plain_bad, plain) = results
        assert native_bad == plain_bad
        if verify:
            touched = {c for b, n in spans if n for c in range(b // chunk_bytes, (b + n - 1) // chunk_bytes + 1)}
            assert native_bad == sorted(touched & set(bad))
            assert np.array_equal(native, plain)
        elif not native_bad:
            assert np.array_equal(native, plain)

        if kept < length:
            return
        for core in (_core, twin):  # and the same out of memory
            target = np.full(total + len(spans), 0xA5, dtype=np.uint8)
            pieces = np.array(addressed(spans, target), dtype=np.int64)
            with kernel(name):
                bad_copy = core.gather_copy(content, chunk_bytes, crcs, pieces, threads, verify)
            assert bad_copy == native_bad
            assert np.array_equal(target, native)


def addressed(spans: list[tuple[int, int]], target: np.ndarray) -> list[tuple[int, int, int]]:
    pieces, to = [], 0
    for begin, count in spans:
        pieces.append((begin, target.ctypes.data + to, count))
        to += count + 1
    return pieces


INT64 = st.one_of(st.integers(-2, 200), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63 - 1, -(2**63), 2**62]))


@settings(max_examples=300)
@given(
    pieces=st.lists(st.tuples(st.integers(-1, 0), INT64, INT64), max_size=4),
    chunk_bytes=st.integers(-1, 200),
    threads=st.integers(-1, 2000),
)
def test_scatter_refuses_the_same_plans(pieces: list[tuple[int, int, int]], chunk_bytes: int, threads: int) -> None:
    results = []
    for scatter in (_core.scatter_copy, twin.scatter_copy):
        target = bytearray(b"\x5a" * 100)
        plan = np.array(pieces, dtype=np.int64)
        result = outcome(lambda s=scatter, t=target, p=plan: s(t, p, chunk_bytes, threads))
        if isinstance(result, tuple):
            assert target == b"\x5a" * 100
        results.append((result, bytes(target)))
    assert results[0] == results[1]


@settings(max_examples=300)
@given(
    pieces=st.lists(st.tuples(INT64, INT64.filter(lambda a: a <= 0), INT64), max_size=4),
    area=st.tuples(INT64, INT64, st.integers(-1, 200)),
    crc_count=st.integers(0, 4),
    odd=st.sampled_from([0, 0, 0, 1]),
    threads=st.integers(-1, 3),
    verify=st.booleans(),
)
def test_gather_refuses_the_same_plans(
    pieces: list[tuple[int, int, int]],
    area: tuple[int, int, int],
    crc_count: int,
    odd: int,
    threads: int,
    verify: bool,
) -> None:
    # Destinations that are not an address: whatever passes the checks has no byte to copy.
    plan = np.array([p for p in pieces if p[1] < 0 or p[2] <= 0], dtype=np.int64)
    crcs = b"\0" * (4 * crc_count + odd)
    fd = os.open(os.devnull, os.O_RDONLY)
    try:
        native, plain = (
            outcome(lambda g=gather: g(fd, *area, crcs, plan, threads, verify))
            for gather in (_core.gather_read, twin.gather_read)
        )
        assert native == plain
        native, plain = (
            outcome(lambda v=check: v(fd, *area, crcs, threads)) for check in (_core.verify_file, twin.verify_file)
        )
        assert native == plain
    finally:
        os.close(fd)


@st.composite
def receive_plans(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Where what is received begins in its area, its length, and pieces (offset, length) that touch it or do not."""
    scale = draw(st.sampled_from([3, 300, 40_000]))
    pieces, at = [], 0
    for _ in range(draw(st.integers(0, 40))):
        at += draw(st.one_of(st.just(0), st.integers(0, scale)))
        count = draw(st.integers(0, scale))
        pieces.append((at, count))
        at += count
    length = draw(st.integers(0, at + 10))
    return draw(st.integers(0, max(0, at - length) + 5)), length, pieces


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=40)
@given(plan=receive_plans(), chunk_bytes=CHUNKS, flipped=st.integers(-1, 100_000))
def test_receive_agrees(
    name: str, plan: tuple[int, int, list[tuple[int, int]]], chunk_bytes: int, flipped: int
) -> None:
    offset, length, plan_pieces = plan
    chunk_bytes = max(chunk_bytes, length // 500)
    sent = noise(length, 9)
    crcs = twin.scatter_copy(sent.copy(), np.array([(0, 0, length)], dtype=np.int64), chunk_bytes, 1)
    bad = 0 <= flipped < length
    if bad:
        sent[flipped] ^= 1
    results = []
    for core in (_core, twin):
        end = max((at + count for at, count in plan_pieces), default=0)
        found = noise(end, 10)
        pieces = np.array([(at, found.ctypes.data + at, count) for at, count in plan_pieces], dtype=np.int64)
        scratch = bytearray(2 * min(chunk_bytes, length))
        with kernel(name), sending(sent.tobytes()) as fd:
            bad_ones = core.receive_chunks(fd, offset, length, chunk_bytes, crcs, pieces, scratch)
        results.append((bad_ones, found.tobytes()))
    assert results[0] == results[1]
    assert results[0][0] == ([flipped // chunk_bytes] if bad else [])


@contextmanager
def sending(data: bytes) -> Iterator[int]:
    """A connection that a thread sends these bytes to."""
    here, there = socket.socketpair()
    sender = threading.Thread(target=there.sendall, args=(data,))
    sender.start()
    try:
        yield here.fileno()
        sender.join()  # even of no bytes it may come late, and must find the other end open
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(-1, 70_000)), max_size=6), st.integers(0, 3), st.data())
def test_checksums_of_ranges(name: str, spans: list[tuple[int, int]], threads: int, drawn: st.DataObject) -> None:
    data = noise(72_000, len(spans))
    nowhere = drawn.draw(st.booleans())
    ranges = np.array([(0 if nowhere else data.ctypes.data + start, length) for start, length in spans], dtype=np.int64)
    with kernel(name):
        found = outcome(lambda: _core.checksum_ranges(ranges, threads))
    expected = outcome(lambda: twin.checksum_ranges(ranges, threads))
    if isinstance(expected, bytes):
        assert found == expected
        spans = [(start, 0) if length < 0 else (start, length) for start, length in spans]
        crcs = [google_crc32c.value(data[start : start + length].tobytes()) for start, length in spans]
        assert np.frombuffer(found, dtype=np.uint32).tolist() == crcs
    else:
        assert isinstance(found, tuple)
        assert found[0] is expected[0]
