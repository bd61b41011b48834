"""Chunks of a shard on their way into tensors, in any order and by either way, against plain slices."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashckpt import native
from flashckpt.errors import CorruptShardError
from flashckpt.load.fetch_into_tensors import TensorSink
from flashckpt.move.stage import Table
from flashckpt.types import ChunkRange, Generation, Retrieval, ShardId

HEAD, CHUNK = 4096, 1024


class Area:
    """A data area, where parts of it belong, and a sink that knows its checksums."""

    def __init__(self, length, pieces):
        self.data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
        self.crcs = native.scatter_copy(self.data.copy(), np.array([(0, 0, length)], dtype=np.int64), CHUNK, 1)
        self.chunks = len(self.crcs) // 4
        self.found = np.zeros(length, dtype=np.uint8)
        self.pieces = pieces
        rows = [(at, self.found.ctypes.data + at, count) for at, count in pieces]
        shard = ShardId(Generation(1, 2, 3, 1), 0, 1)
        retrieval = Retrieval(shard, b"d" * 16, 7, HEAD + length, False, ())
        self.sink = TensorSink("job", retrieval, np.array(rows, dtype=np.int64).reshape(-1, 3))
        self.sink.take_head(Table(HEAD, CHUNK, self.crcs), None)

    def frame(self, first, count):
        return bytes(self.data[first * CHUNK : (first + count) * CHUNK])

    def expected(self, chunks):
        """What lies where, once these have come."""
        result = np.zeros_like(self.data)
        for at, count in self.pieces:
            for index in chunks:
                low, high = max(at, index * CHUNK), min(at + count, (index + 1) * CHUNK)
                if low < high:
                    result[low:high] = self.data[low:high]
        return result

    def bring(self, first, data, by_socket):
        if not by_socket:
            self.sink.put_chunks(first, data)
            return
        here, there = socket.socketpair()
        with here, there:
            sender = threading.Thread(target=there.sendall, args=(data,))
            sender.start()
            try:
                assert self.sink.receive(first, len(data), here.fileno(), memoryview(bytearray(2 * CHUNK)))
            finally:
                sender.join()


@st.composite
def areas(draw):
    pieces, at = [], 0
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.integers(0, 1500))
        count = draw(st.integers(0, 3000))
        pieces.append((at, count))
        at += count
    return Area(at + draw(st.integers(1, 2000)), pieces)


@st.composite
def frames(draw, chunks):
    """All chunks, cut into frames, in any order."""
    cuts, at = [], 0
    while at < chunks:
        count = draw(st.integers(1, chunks - at))
        cuts.append((at, count))
        at += count
    return draw(st.permutations(cuts))


@settings(deadline=None)
@given(st.data())
def test_whatever_comes_lands_where_it_belongs(data):
    area = data.draw(areas())
    here = set()
    for first, count in data.draw(frames(area.chunks)):
        area.bring(first, area.frame(first, count), data.draw(st.booleans()))
        here |= set(range(first, first + count))
        missing = area.sink.missing([ChunkRange(0, area.chunks)])
        assert {i for one in missing for i in range(one.first, one.first + one.count)} == set(range(area.chunks)) - here
        assert np.array_equal(area.found, area.expected(here))


@settings(deadline=None)
@given(st.data())
def test_a_bad_chunk_is_missing_still_and_touches_nothing(data):
    area = data.draw(areas())
    at = data.draw(st.integers(0, len(area.data) - 1))
    assume(area.expected({at // CHUNK}).any())  # nobody looks at a chunk that nobody needs, when it is put
    spoiled = bytearray(area.frame(0, area.chunks))
    spoiled[at] ^= 0x10
    with pytest.raises(CorruptShardError, match=f"chunk {at // CHUNK}"):
        area.bring(0, bytes(spoiled), data.draw(st.booleans()))
    bad = at // CHUNK
    assert area.sink.missing([ChunkRange(0, area.chunks)]) == (ChunkRange(bad, 1),)
    assert np.array_equal(area.found, area.expected(set(range(area.chunks)) - {bad}))


@pytest.mark.parametrize(
    ("first", "size"), [(-1, CHUNK), (3, CHUNK), (0, CHUNK - 1), (0, CHUNK + 1), (2, CHUNK), (0, 3 * CHUNK), (0, 0)]
)
def test_frames_that_are_no_chunks_are_refused(first, size):
    area = Area(2 * CHUNK + 100, [(0, 2 * CHUNK + 100)])
    for by_socket in (False, True):
        with pytest.raises(CorruptShardError, match="bytes"):
            area.bring(first, bytes(size), by_socket)
    assert not area.found.any()


def test_a_lane_with_little_scratch_lets_them_be_put():
    area = Area(CHUNK, [(0, CHUNK)])
    assert not area.sink.receive(0, CHUNK, -1, memoryview(bytearray(2 * CHUNK - 1)))
