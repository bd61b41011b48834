"""A retrieval without a wire: chunks in any order, from anybody, and only the right ones count."""

from __future__ import annotations

import contextlib
import os
import random
import threading

import pytest

from flashckpt.agent.retrieve import split
from flashckpt.errors import ClosedError, ConfigError, ConflictError, CorruptShardError, NoSpaceError, NotFoundError
from flashckpt.format.shard import read_header
from flashckpt.move.fetch import Sources
from flashckpt.move.gathering import Gathering, GatheringState
from flashckpt.move.sealing import find_held
from flashckpt.store import room as room_module
from flashckpt.types import ChunkRange, Portion, Retrieval
from tests.unit.test_transport_incoming import CHUNK, Sender, sealed_content, shard_bytes, shard_id, store

__all__ = ["store"]  # the fixture

PAGES = 21
CONTENT = shard_bytes(pages=PAGES)
SENDER = Sender(CONTENT)
CHUNKS = len(SENDER.chunks)


def retrieval(whole, sender=SENDER, **changes):
    portions = (Portion((ChunkRange(0, CHUNKS),), ("a",)),)
    values = {"digest": sender.digest, "tag": 9, "size_bytes": sender.size_bytes, **changes}
    return Retrieval(shard_id(), whole=whole, portions=portions, **values)


@contextlib.contextmanager
def gathering(store, whole, **changes):
    one = Gathering(store, "job", retrieval(whole, **changes))
    try:
        yield one
    finally:
        one.abandon()


def put_head(one, head=SENDER.head, *, head_bytes=None, size_bytes=SENDER.size_bytes, tag=9):
    with contextlib.closing(one.read_head()) as reader:
        reader.expect(size_bytes, len(head) if head_bytes is None else head_bytes, tag)
        for at in range(0, len(head), 1000):
            reader.put(at, head[at : at + 1000])


def everything(one):
    return one.want([ChunkRange(0, CHUNKS)])


def fetched_content(store, name):
    fd = store.open_fetched(name)
    try:
        assert read_header(fd, expect=shard_id(), job="job").shard == shard_id()
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        return os.pread(fd, len(CONTENT) + 1, 0), os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


@pytest.mark.parametrize("seed", range(4))
def test_a_whole_shard_in_any_order(store, seed):
    order = list(range(CHUNKS))
    random.Random(seed).shuffle(order)
    with gathering(store, whole=True) as one:
        put_head(one)
        assert everything(one) == SENDER.size_bytes - SENDER.head_bytes
        for index in [*order, *order[:3]]:  # some of them twice
            assert find_held(store, "job", shard_id()) is None
            one.put_chunks(index, SENDER.chunks[index])
        assert one.finish() == ""
    assert sealed_content(store, shard_id()) == CONTENT
    assert find_held(store, "job", shard_id()).tag == 9


def test_a_part_has_memory_for_nothing_else(store):
    with gathering(store, whole=False) as one:
        put_head(one)
        assert one.want([ChunkRange(2, 2), ChunkRange(CHUNKS - 1, 1)]) == 2 * CHUNK + len(SENDER.chunks[-1])
        for index in (3, CHUNKS - 1, 2):
            one.put_chunks(index, SENDER.chunks[index])
        name = one.finish()
        found, taken = fetched_content(store, name)
        head, size = SENDER.head_bytes, len(CONTENT)
        expected = bytearray(size)
        for start, end in ((0, head), (head + 2 * CHUNK, head + 4 * CHUNK), (head + (CHUNKS - 1) * CHUNK, size)):
            expected[start:end] = CONTENT[start:end]
        assert found == bytes(expected)
        assert taken == head + 2 * CHUNK + len(SENDER.chunks[-1])
        assert store.scan() == ()
        status = store.status()
        assert (status.fetched.files, status.fetched.size_bytes, status.foreign_names) == (1, taken, 0)
        assert status.total_bytes == taken
        assert store.check() == []
    with pytest.raises(NotFoundError, match="the load that asked for it ends"):
        store.open_fetched(name)
    assert store.status().fetched.files == 0


def test_what_is_missing_after_a_source_failed(store):
    with gathering(store, whole=False) as one:
        put_head(one)
        asked = [ChunkRange(0, 4), ChunkRange(6, 3)]
        one.want(asked)
        assert one.missing(asked) == tuple(asked)
        for index in (0, 1, 3, 7):
            one.put_chunks(index, SENDER.chunks[index])
        assert one.missing(asked) == (ChunkRange(2, 1), ChunkRange(6, 1), ChunkRange(8, 1))
        for index in (2, 6, 8):
            one.put_chunks(index, SENDER.chunks[index])
        assert one.missing(asked) == ()


@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_chunk_changes_nothing(store, whole):
    with gathering(store, whole=whole) as one:
        put_head(one)
        everything(one)
        good = SENDER.chunks[2]
        flipped = bytes([good[0] ^ 1]) + good[1:]
        for wrong in (flipped, SENDER.chunks[3]):
            with pytest.raises(CorruptShardError, match="chunk 2"):
                one.put_chunks(2, wrong)
        for wrong in (good[:-1], good + b"x", b""):
            with pytest.raises(ConfigError, match=r"bytes of (chunk|chunks from) 2"):
                one.put_chunks(2, wrong)
        for index in (-1, CHUNKS, 1 << 40):
            with pytest.raises(ConfigError, match="that is wanted"):
                one.put_chunks(index, good)
        assert one.missing([ChunkRange(2, 1)])
        with pytest.raises(ConfigError, match=f"{CHUNKS} missing"):
            one.finish()


def test_a_chunk_that_is_not_wanted_has_no_memory(store):
    with gathering(store, whole=False) as one:
        put_head(one)
        one.want([ChunkRange(0, 1)])
        with pytest.raises(ConfigError, match="that is wanted"):
            one.put_chunks(1, SENDER.chunks[1])


@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_head_is_not_taken_and_the_next_one_is(store, whole):
    other = Sender(shard_bytes(pages=PAGES, seed=1))
    foreign = Sender(shard_bytes(pages=PAGES, job="another"), job="another")
    with gathering(store, whole=whole) as one:
        flipped = bytearray(SENDER.head)
        flipped[200] ^= 1
        for wrong in (other.head, bytes(flipped), foreign.head, SENDER.head[:-4096]):
            with pytest.raises(CorruptShardError):
                put_head(one, wrong)
            assert one.state is GatheringState.HEAD
        for wrong in (
            {"size_bytes": 4096},
            {"tag": 8},
            {"head_bytes": 100},
            {"head_bytes": 1 << 40},
            {"head_bytes": 0},
        ):
            with pytest.raises(CorruptShardError):
                put_head(one, **wrong)
        with contextlib.closing(one.read_head()) as reader:
            reader.expect(SENDER.size_bytes, 4096, 9)
            with pytest.raises(CorruptShardError, match="a piece up to"):
                reader.put(0, bytes(4097))
        with pytest.raises(ConfigError, match="the head first"):
            everything(one)
        put_head(one)
        put_head(one)  # two sources at once
        assert one.chunks == CHUNKS
    with gathering(store, whole=whole, digest=foreign.digest) as one, pytest.raises(Exception, match="job") as raised:
        put_head(one, foreign.head)
    assert raised.type.__name__ == "IncompatibleError"


def test_half_a_head_is_none(store):
    with gathering(store, whole=False) as one, contextlib.closing(one.read_head()) as reader:
        reader.expect(SENDER.size_bytes, SENDER.head_bytes, 9)
        reader.put(0, SENDER.head[:1000])
        assert one.state is GatheringState.HEAD
        with pytest.raises(ConfigError, match="the head first"):
            one.finish()


def test_a_plan_that_does_not_fit(store):
    for ranges in ([(0, CHUNKS + 1)], [(CHUNKS, 1)], [(0, 2), (1, 1)], [(0, 0)], [(-1, 1)]):
        with gathering(store, whole=False) as one:
            put_head(one)
            with pytest.raises(ConfigError):
                one.want([ChunkRange(*pair) for pair in ranges])


@pytest.mark.parametrize("whole", [True, False])
def test_after_the_end_nothing_is_written(store, whole):
    one = Gathering(store, "job", retrieval(whole))
    put_head(one)
    everything(one)
    one.put_chunks(0, SENDER.chunks[0])
    one.abandon()
    one.abandon()
    for late in (lambda: one.put_chunks(1, SENDER.chunks[1]), one.finish, lambda: put_head(one)):
        with pytest.raises(ClosedError):
            late()
    assert store.scan() == ()
    assert store.status().fetched.files == 0


def test_threads_share_one(store):
    with gathering(store, whole=True) as one:
        put_head(one)
        everything(one)
        problems = []

        def send(start):
            try:
                for index in [*range(start, CHUNKS, 2), *range(CHUNKS)]:
                    one.put_chunks(index, SENDER.chunks[index])
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=send, args=(start,)) for start in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert one.finish() == ""
    assert sealed_content(store, shard_id()) == CONTENT


def test_the_shard_came_in_another_way_meanwhile(store):
    with gathering(store, whole=True) as one:
        put_head(one)
        everything(one)
        for index, chunk in enumerate(SENDER.chunks):
            one.put_chunks(index, chunk)
        SENDER.send_and_finish(SENDER.open(store))
        assert one.finish() == ""
    assert len(store.scan()) == 1
    other = Sender(shard_bytes(pages=PAGES, seed=1))
    with gathering(store, whole=True, digest=other.digest) as one:
        put_head(one, other.head)
        everything(one)
        for index, chunk in enumerate(other.chunks):
            one.put_chunks(index, chunk)
        with pytest.raises(ConflictError):
            one.finish()
    assert sealed_content(store, shard_id()) == CONTENT


@pytest.mark.parametrize("whole", [True, False])
def test_no_room_is_an_error_and_leaves_nothing(store, whole, monkeypatch):
    """After free slots were given up for it."""
    if not whole:
        store.prepare(1 << 20, 1)
        monkeypatch.setattr("flashckpt.store.fetched.check_room", lambda need, room: "full" if need > CHUNK else None)
    else:
        monkeypatch.setattr(room_module, "check_room", lambda need, room: "full")

    def gather():
        with gathering(store, whole=whole) as one:
            put_head(one)
            everything(one)

    with pytest.raises(NoSpaceError, match="full"):
        gather()
    assert store.status().total_bytes == 0
    assert store.scan() == ()


def test_a_shard_that_is_larger_than_the_budget(store):
    with pytest.raises(ConfigError, match="at most 4096"):
        Gathering(store, "job", retrieval(whole=False), max_shard_bytes=4096)


def test_an_agent_that_starts_empties_the_folder(store):
    with gathering(store, whole=False) as one:
        put_head(one)
        assert store.empty_fetched() == 1
        assert store.empty_fetched() == 0


@pytest.mark.parametrize("name", ["", "session", "../sealed/x", "f0.w1-1-00000000-1", "s" + "0" * 16])
def test_only_names_of_fetched_files_are_opened(store, name):
    with pytest.raises(ConfigError, match="a name that the agent gave"):
        store.open_fetched(name)


# --- whom to ask


def test_sources_in_their_order_and_for_good():
    sources = Sources(["a", "b", "c"])
    assert sources.next() == ("a", 0.0)
    sources.refused("a", "not here", retry=False)
    assert sources.next() == ("b", 0.0)
    sources.failed("b", "wrong bytes", passing=False)
    assert sources.next() == ("c", 0.0)
    sources.refused("c", "no", retry=False)
    assert sources.next() == (None, 0.0)
    assert sources.reasons == (("a", "not here"), ("b", "wrong bytes"), ("c", "no"))


def test_a_source_that_broke_is_asked_once_more_after_all_others():
    sources = Sources(["a", "b"])
    sources.failed("a", "reset", passing=True)
    assert sources.next() == ("b", 0.0)
    sources.refused("b", "no", retry=False)
    node, pause = sources.next()
    assert (node, pause > 0) == ("a", True)
    sources.failed("a", "reset again", passing=True)
    assert sources.next() == (None, 0.0)
    assert dict(sources.reasons)["a"] == "reset again"


def test_a_busy_source_is_asked_again_less_and_less_often():
    sources, pauses = Sources(["a"]), []
    while (found := sources.next())[0] is not None:
        pauses.append(found[1])
        sources.refused("a", "busy", retry=True)
    assert len(pauses) == 6
    assert pauses == sorted(pauses)
    assert 4 < sum(pauses) < 12


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([[(0, 10)]], [[(0, 10)]]),
        ([[(0, 1 << 40)]], [[(0, 10)]]),
        ([[]], [[(0, 10)]]),
        ([[(0, 4)], [(6, 9)]], [[(0, 4)], [(4, 2), (6, 4)]]),
        ([[(12, 3)], [(3, 1)]], [[], [(0, 3), (3, 1), (4, 6)]]),
    ],
)
def test_a_whole_shard_is_all_of_its_chunks_whatever_the_plan_says(ranges, expected):
    portions = tuple(Portion(tuple(ChunkRange(*one) for one in some), ("a",)) for some in ranges)
    one = Retrieval(shard_id(), bytes(16), 0, 1, True, portions)
    found = [[(r.first, r.count) for r in portion.ranges] for portion in split(one, 10)]
    assert found == expected
