"""Pushes of a member that are not what they should be: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import grpc
import pytest

from flashckpt.v1 import peer_pb2
from tests.fault.agents import MIB, wait_until
from tests.security.arena import FINISH, Arena, Push

Code = grpc.StatusCode


@pytest.fixture
def channel(arena):
    with arena.channel(arena.traitor()) as channel:
        yield channel


@pytest.fixture
def push(channel):
    streams = []

    def make(*messages):
        streams.append(Push(channel, *messages))
        return streams[-1]

    yield make
    for one in streams:
        one.close()


SIZES = {
    "0": {"size_bytes": 0},
    "-1": {"size_bytes": (1 << 64) - 1},
    "2^63": {"size_bytes": 1 << 63},
    "2^63-1": {"size_bytes": (1 << 63) - 1},
    "a tebibyte": {"size_bytes": 1 << 40},
    "head 0": {"head_bytes": 0},
    "head -1": {"head_bytes": (1 << 64) - 1},
    "head 2^31": {"head_bytes": 1 << 31, "size_bytes": 1 << 32},
    "head 2^63-1": {"head_bytes": (1 << 63) - 1, "size_bytes": (1 << 63) - 1},
    "head of half a page": {"head_bytes": 2048},
    "head longer than all": {"head_bytes": 1 << 20, "size_bytes": 1 << 19},
    "no digest": {"digest": b""},
    "digest of 15": {"digest": bytes(15)},
    "digest of a mebibyte": {"digest": bytes(1 << 20)},
}


def test_sizes_that_can_not_be(arena, push):
    for what, change in SIZES.items():
        part, code = push(arena.opening(**change)).end()
        assert part == "refused" or code in (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT), what
        assert arena.leftovers() == [], what


def wrong_streams(shard):
    head, *chunks, finish = shard.messages()
    first, second, third = chunks[:3]  # any order would do
    flipped = bytearray(second)
    flipped[-1] ^= 1
    lying_head = bytearray(shard.head)
    lying_head[100] ^= 1
    other_head = peer_pb2.PutRequest(head=peer_pb2.PutHead(data=bytes(lying_head))).SerializeToString()
    return {
        "chunk before the head": [first],
        "finish before the head": [finish],
        "chunk in the middle of the head": [shard.head_message(0, 100), first],
        "head twice": [head, head],
        "head that overlaps": [shard.head_message(0, 200), shard.head_message(100, 200)],
        "head with a gap": [shard.head_message(0, 100), shard.head_message(200)],
        "empty piece of the head": [shard.head_message(0, 0)],
        "head with a flipped bit": [other_head],
        "a gap at the finish": [head, first, third, finish],
        "one chunk twice instead of two": [head, first, first, finish],
        "chunk far away": [head, first, shard_chunk(shard, 1 << 62)],
        "chunk after the last": [head, *chunks, shard_chunk(shard, len(chunks))],
        "chunk that is too short": [head, shard_chunk(shard, 0, shard.chunks[0][:-1])],
        "chunk that is too long": [head, shard_chunk(shard, 0, shard.chunks[0] + b"x")],
        "chunk with a flipped bit": [head, first, bytes(flipped)],
        "finish too early": [head, first, finish],
        "opened twice": [head, first, None],
        "nothing in a message": [head, b""],
        "bytes that are no message": [head, b"\xff\xff\xff"],
        "half a message": [head, first[: len(first) // 2]],
    }


def shard_chunk(shard, index, data=None):
    chunks = peer_pb2.PutChunks(first_index=index, data=[shard.chunks[0] if data is None else data])
    return peer_pb2.PutRequest(chunks=chunks).SerializeToString()


def test_streams_that_break_the_rules(arena, push):
    shard = arena.forged()
    opening = arena.opening(shard)
    for what, messages in wrong_streams(shard).items():
        part, code = push(opening, *(opening if one is None else one for one in messages)).end()
        assert part in ("ready", "progress"), what
        assert code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.DATA_LOSS), what
        wait_until(lambda: not arena.leftovers(), f"{what}: the slot is given back")


def test_after_the_seal(arena, push):
    """Whole and valid: taken, as its owner's word. What follows is not."""
    shard = arena.forged()
    stream = push(arena.opening(shard), *shard.messages(), shard.chunk_message(0), FINISH)
    assert stream.end() == ("sealed", Code.OK)
    again = push(arena.opening(shard), *shard.messages())
    assert again.end()[0] == "have"
    other = arena.forged(seed="other bytes")
    refused = push(arena.opening(other)).answer()
    assert "another content" in refused.refused.reason


def test_a_head_that_is_another_shards(arena, push):
    """Right in itself, but not the shard that the opening names."""
    announced = arena.forged()
    for other in (arena.forged(rank=0), arena.forged(step=arena.step + 2), arena.forged(world=4)):
        names = arena.opening(other, shard=announced.message)
        part, code = push(names, *other.messages()).end()
        assert (part, code) in (("ready", Code.DATA_LOSS), ("ready", Code.FAILED_PRECONDITION))


def test_two_pushes_of_one_shard(arena, push):
    shard, other = arena.forged(), arena.forged(seed="other bytes")
    head, first, *rest = shard.messages()
    one = push(arena.opening(shard), head)
    assert one.answer().WhichOneof("part") == "ready"
    for rival in (shard, other):
        two = push(arena.opening(rival), *rival.messages())
        assert "is being received" in two.answer().refused.reason
    one.send(first, *rest)
    assert one.end() == ("sealed", Code.OK)


@pytest.mark.parametrize("how", ["half_close", "close"])
def test_streams_that_end_anywhere(arena, push, how):
    """What was verified waits for its sender; a commit of a later step sends it away."""
    shard = arena.forged(step=arena.step + 1, seq=0)
    messages = [arena.opening(shard), *shard.messages()]
    for state in range(len(messages)):

        def opened(state=state):
            """A stream in that state, once the end of the one before was noticed."""
            stream = push(*messages[:state])
            return stream if not state or stream.answer().WhichOneof("part") == "ready" else None

        stream = wait_until(opened, "a stream to be taken")
        getattr(stream, how)()
        if how == "half_close":
            stream.end()
        wait_until(lambda: len(arena.leftovers()) <= 1, "one slot for one shard")

    # As one that comes back: it resumes, wherever it was.
    def sealed():
        stream = push(*messages)
        answer = stream.answer()
        return answer.WhichOneof("part") in ("have", "ready")

    wait_until(sealed, "the last stream's end to be noticed")


def test_what_one_node_leaves_half_done_is_bounded(arena, push):
    """Each opening announces 64 MiB, which the agent has to have before the first byte comes."""
    steps = iter(range(arena.step + 1, arena.step + 41))
    for _ in range(10):
        for _ in range(3):
            push(arena.opening(arena.forged(step=next(steps), seq=0), size_bytes=64 * MIB)).answer()
        left = push(arena.opening(arena.forged(step=next(steps), seq=0), size_bytes=64 * MIB))
        left.answer()
        left.half_close()
        assert len(arena.leftovers()) <= 5
    wait_until(lambda: len(arena.leftovers()) <= 4, "four at most")
    arena.step = next(steps, arena.step + 40)  # what is behind a commit goes


def test_half_a_replica_never_costs_a_save():
    """All that the budget allows is announced and left; ranks of the same node go on."""
    with Arena(budget_bytes=48 * MIB) as arena, arena.channel(arena.traitor()) as channel:
        # Both fit, but what is free then is less than the two take.
        for number in range(2):
            shard = arena.forged(step=arena.step + 1000 + number)
            stream = Push(channel, arena.opening(shard, size_bytes=18 * MIB))
            assert stream.answer().WhichOneof("part") == "ready"
            stream.half_close()
            stream.end()
        wait_until(lambda: not arena.leftovers(), "what leaves too little room to be given up")
        for _ in range(3):
            arena.save()
        # And a push that finds no room takes it from those that wait.
        # The first leaves enough room to stay; the second fits only without it.
        for size in (14 * MIB, 34 * MIB):
            shard = arena.forged(step=arena.step + 2000 + size)
            stream = Push(channel, arena.opening(shard, size_bytes=size))
            assert stream.answer().WhichOneof("part") == "ready"
            stream.half_close()
            stream.end()
