"""Reads that are not what they should be: nothing is given to whom it does not belong, and nobody else notices."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from flashckpt.v1 import common_pb2, peer_pb2
from tests.fault.agents import JOB
from tests.security.arena import ATTEMPT, VICTIM, code_of

DENIED = grpc.StatusCode.PERMISSION_DENIED
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
GET = "/flashckpt.v1.Peer/Get"


@pytest.fixture
def channel(arena):
    with arena.channel(arena.traitor()) as channel:
        yield channel


def request(arena, **changes):
    """For a shard of the victim's own rank, as its buddy would ask."""
    (held,) = [one for one in arena.launch.ranks[VICTIM].ask("inventory")["holdings"] if one["shard"].split()[4] == "0"]
    *generation, rank, world = map(int, held["shard"].split())
    epoch, nonce, step, seq = generation
    launch = arena.launch.launch
    values = {
        "sender": arena.node(arena.rank),
        "receiver": arena.node(VICTIM),
        "launch": common_pb2.Launch(epoch=launch.epoch, nonce=launch.nonce),
        "shard": common_pb2.ShardId(
            generation=common_pb2.Generation(epoch=epoch, nonce=nonce, step=step, seq=seq), rank=rank, world=world
        ),
        "digest": bytes.fromhex(held["digest"]),
        "with_head": True,
        "ranges": [common_pb2.ChunkRange(first=0, count=2)],
        **changes,
    }
    return peer_pb2.GetRequest(**values)


def parts(channel, message):
    call = channel.unary_stream(GET)(message.SerializeToString(), timeout=ATTEMPT)
    return [peer_pb2.GetResponse.FromString(data) for data in call]


def refusal(channel, message):
    (answer,) = parts(channel, message)
    return answer.refused.reason


def test_a_member_may_read_what_is_held(arena, channel):
    kinds = [one.WhichOneof("part") for one in parts(channel, request(arena))]
    assert (kinds[0], kinds[-1]) == ("opened", "chunks")
    assert "head" in kinds


def test_reads_without_a_place_in_the_launch(arena):
    message = request(arena)
    for bundle in (None, arena.expired(arena.node(1)), arena.self_signed(arena.node(1))):
        with arena.channel(bundle) as channel:
            assert code_of(lambda channel=channel: parts(channel, message)) is grpc.StatusCode.UNAVAILABLE
    with arena.channel(arena.certified(arena.node(1), job=JOB + "2")) as channel:
        assert code_of(lambda: parts(channel, message)) in (DENIED, grpc.StatusCode.UNAVAILABLE)
    with arena.channel(arena.guest()) as channel:
        assert code_of(lambda: parts(channel, message)) is DENIED  # in another's name
        assert "no member" in refusal(channel, request(arena, sender="guest"))


def test_reads_in_the_name_of_or_for_another_node(arena, channel):
    other = arena.node(3 - arena.rank)
    assert code_of(lambda: parts(channel, request(arena, sender=other))) is DENIED
    assert code_of(lambda: parts(channel, request(arena, receiver=other))) is DENIED


def test_reads_of_an_older_launch(arena, channel):
    ours = arena.launch.launch
    older = common_pb2.Launch(epoch=ours.epoch - 1, nonce=ours.nonce)
    assert "has taken over" in refusal(channel, request(arena, launch=older))


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, 1 << 53])
def test_reads_of_the_last_launch_of_all(arena, channel, epoch):
    """Whoever reads brings a launch and a line, too."""
    launch = common_pb2.Launch(epoch=epoch, nonce=1)
    line = common_pb2.Line(head=launch)
    assert code_of(lambda: parts(channel, request(arena, launch=launch))) is REFUSED
    assert code_of(lambda: parts(channel, request(arena, line=line))) is REFUSED
    assert arena.status()["launch"]["epoch"] == arena.launch.launch.epoch
    assert not arena.status()["fenced"]


def test_reads_of_what_is_not_held(arena, channel):
    assert "another content" in refusal(channel, request(arena, digest=bytes(16)))
    shard = request(arena).shard
    shard.generation.step += 1000
    assert "does not hold" in refusal(channel, request(arena, shard=shard))


RANGES = {
    "no chunks": [(0, 0)],
    "negative": [((1 << 64) - 1, 1)],
    "negative count": [(0, (1 << 64) - 1)],
    "beyond 2^63": [((1 << 63) - 1, 1)],
    "twice": [(0, 1), (0, 1)],
    "overlapping": [(0, 2), (1, 2)],
    "descending": [(2, 1), (0, 1)],
    "too many": [(2 * number, 1) for number in range(5000)],
}


@pytest.mark.parametrize("what", RANGES)
def test_ranges_that_can_not_be(arena, channel, what):
    ranges = [common_pb2.ChunkRange(first=first, count=count) for first, count in RANGES[what]]
    assert code_of(lambda: parts(channel, request(arena, ranges=ranges))) is REFUSED


@pytest.mark.parametrize("one", [(0, 1 << 40), (1 << 40, 1), (3, 99)])
def test_chunks_that_do_not_exist(arena, channel, one):
    ranges = [common_pb2.ChunkRange(first=one[0], count=one[1])]
    assert "expected chunks up to" in refusal(channel, request(arena, ranges=ranges))


def test_reads_that_nobody_takes(arena):
    """Many at once, of a node that never reads what it asked for: counted, and the others go on."""
    data = request(arena).SerializeToString()
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(4):
            channel = stack.enter_context(arena.channel(arena.traitor()))
            calls += [channel.unary_stream(GET)(data, timeout=60) for _ in range(24)]
        for _ in range(3):
            arena.save()
        for call in calls:
            call.cancel()
