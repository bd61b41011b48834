"""What a member with its own certificate says of others, of other times, and in sizes that nobody meant."""

from __future__ import annotations

import grpc
import pytest

from flashckpt.agent.peers import own_ranks
from flashckpt.rpc import convert
from flashckpt.rpc.api import VERSION
from flashckpt.store.owner import Owner
from flashckpt.v1 import common_pb2, peer_pb2
from tests.fault.agents import JOB
from tests.security.arena import ATTEMPT, GROWTH_BYTES, Arena, Push, code_of, tell

DENIED = grpc.StatusCode.PERMISSION_DENIED
REFUSED = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
def channel(arena):
    with arena.channel(arena.traitor()) as channel:
        yield channel


def hello(arena, channel, **changes):
    values = {"version": VERSION, "job": JOB, "node_id": arena.node(arena.rank), "receiver": arena.node(0), **changes}
    data = peer_pb2.PeerHello(**values).SerializeToString()
    return channel.unary_unary("/flashckpt.v1.Peer/Hello")(data, timeout=ATTEMPT)


def put_code(channel, opening):
    push = Push(channel, opening)
    try:
        return push.end()[1]
    finally:
        push.close()


def refusal(channel, opening):
    push = Push(channel, opening)
    try:
        return push.answer().refused.reason
    finally:
        push.close()


def test_in_the_name_of_another_node(arena, channel):
    other = arena.node(3 - arena.rank)
    assert code_of(lambda: hello(arena, channel, node_id=other)) is DENIED
    assert code_of(lambda: tell(channel, arena.tell_request(sender=other))) is DENIED
    assert put_code(channel, arena.opening(sender=other)) is DENIED


def test_for_another_node(arena, channel):
    other = arena.node(3 - arena.rank)
    assert code_of(lambda: hello(arena, channel, receiver=other)) is DENIED
    assert code_of(lambda: tell(channel, arena.tell_request(receiver=other))) is DENIED
    assert put_code(channel, arena.opening(receiver=other)) is DENIED


def test_another_job_or_version_in_hello(arena, channel):
    assert code_of(lambda: hello(arena, channel, job="another")) is DENIED
    assert code_of(lambda: hello(arena, channel, job="")) is REFUSED
    assert code_of(lambda: hello(arena, channel, version=VERSION + 1)) is REFUSED


def test_a_node_speaks_for_its_own_ranks_only(arena, channel):
    """A rank that is called dead is not waited for: neither a hello nor the answer to one may say so of others'."""
    claim = [common_pb2.Trainer(rank=rank, how="ended") for rank in range(3)]
    hello(arena, channel, trainers=claim)
    with arena.client() as client:
        ticket = client.hello(Owner.current(), 0, VERSION, JOB).ticket
        told = {one.rank: one.lives for one in client.trainers(ticket)}
        client.bye(ticket)
    assert told.pop(0)
    assert False not in told.values()
    told = convert.from_trainers(claim)
    assert [one.rank for one in own_ranks(told, (2,))] == [2]
    assert own_ranks(told, ()) == ()


@pytest.mark.parametrize("change", [{"epoch": -1, "nonce": 0}, {"epoch": 0, "nonce": -1}], ids=["epoch", "nonce"])
def test_an_older_launch(arena, channel, change):
    ours = arena.launch.launch
    older = common_pb2.Launch(epoch=ours.epoch + change["epoch"], nonce=ours.nonce + change["nonce"])
    answer = tell(channel, arena.tell_request(launch=older, announce=peer_pb2.Announce(record=record(arena, 1000))))
    assert "has taken over" in answer.refused
    assert not answer.HasField("record")
    assert "has taken over" in refusal(channel, arena.opening(launch=older))


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, 1 << 53])
def test_the_last_launch_of_all(arena, channel, epoch):
    """An epoch that no later launch could be above, kept for good by whoever hears of it."""
    launch, line = (
        common_pb2.Launch(epoch=epoch, nonce=1),
        common_pb2.Line(head=common_pb2.Launch(epoch=epoch, nonce=1)),
    )
    request = arena.tell_request()
    request.line.CopyFrom(line)
    assert code_of(lambda: tell(channel, arena.tell_request(launch=launch))) is REFUSED
    assert code_of(lambda: tell(channel, request)) is REFUSED
    assert code_of(lambda: hello(arena, channel, launch=launch)) is REFUSED
    assert code_of(lambda: hello(arena, channel, line=line)) is REFUSED
    assert put_code(channel, arena.opening(launch=launch)) is REFUSED
    assert put_code(channel, arena.opening(line=line)) is REFUSED
    assert arena.status()["launch"]["epoch"] == arena.launch.launch.epoch
    assert not arena.status()["fenced"]


def test_a_rank_that_is_another_nodes(arena, channel):
    for rank in {0, 1, 2} - {arena.rank}:
        shard = arena.forged(rank=rank)
        assert f"is not {arena.node(arena.rank)}'s to give away" in refusal(channel, arena.opening(shard))
    assert put_code(channel, arena.opening(shard=arena.shard_id(rank=3))) is REFUSED


def test_a_node_that_is_no_buddy(arena):
    other = 3 - arena.rank  # keeps replicas of rank 0, not of the traitor's
    with arena.channel(arena.traitor(), index=other) as channel:
        opening = arena.opening(receiver=arena.node(other))
        assert f"keeps no replicas of rank {arena.rank}" in refusal(channel, opening)
    assert not arena.world.paths(other, "writing")


def test_a_generation_of_another_launch(arena, channel):
    shard = arena.forged(epoch=arena.launch.launch.epoch - 5)
    assert "to give away" in refusal(channel, arena.opening(shard))


def test_what_is_kept_and_was_not_announced(arena, channel):
    """Who heals may give away what others wrote; a member that nobody asked may not."""
    for rank in {0, 1, 2} - {arena.rank}:
        shard = arena.forged(rank=rank, step=arena.step, seq=1)
        assert "to give away" in refusal(channel, arena.opening(shard))
    answer = tell(
        channel, arena.tell_request(holds=peer_pb2.Holds(generation=arena.generation(1 << 40), committed=True))
    )
    assert answer.refused == ""
    assert arena.status()["kept"]["step"] == arena.step
    other = 3 - arena.rank
    with arena.channel(arena.traitor(), index=other) as to_other:
        holds = peer_pb2.Holds(generation=arena.generation(1 << 40), committed=True)
        assert tell(to_other, arena.tell_request(receiver=arena.node(other), holds=holds)).refused == ""
    assert arena.world.status(other)["kept"]["step"] == arena.step


def record(arena, step):
    return common_pb2.Record(generation=arena.generation(step), world=3, replicas=1, committed_at=1.0)


def test_decisions_that_are_the_coordinators(arena, channel):
    """A record or a void of somebody else would free what the job stands on."""
    other = 3 - arena.rank
    before = {index: len(arena.world.paths(index, "sealed")) for index in (0, other)}
    news = peer_pb2.Announce(record=record(arena, 1_000_000), voids=[arena.generation(arena.step, seq=1)])
    with arena.channel(arena.traitor(), index=other) as to_other:
        for reached, receiver in ((channel, 0), (to_other, other)):
            answer = tell(reached, arena.tell_request(receiver=arena.node(receiver), announce=news))
            assert answer.refused == ""
            assert answer.record.generation.step == arena.step
            assert len(arena.world.paths(receiver, "sealed")) == before[receiver]
    report = peer_pb2.Report(shard=arena.shard_id(rank=0), digest=bytes(16), holders=["node1", "node2"])
    assert tell(channel, arena.tell_request(report=report)).refused == ""
    assert arena.step + 1 not in [one["step"] for one in arena.status()["generations"]]


def test_a_report_with_holders_that_do_not_exist(arena, channel):
    """As the only rank's that is left: counted, they would commit what lies on one node."""
    shard = arena.shard_id(step=arena.step + 1, seq=1)
    for holders in (["ghost"], [arena.node(arena.rank)], ["ghost"] * 1000):
        tell(channel, arena.tell_request(report=peer_pb2.Report(shard=shard, digest=bytes(16), holders=holders)))
    assert max(one["step"] for one in arena.status()["generations"]) == arena.step


BAD_NAMES = {
    "none": "",
    "slash": "a/b",
    "dots": "../../../../etc/passwd",
    "nul": "node0\0",
    "escape": "\x1b]0;owned\x07\x1b[2J",
    "long": "x" * 257,
    "a mebibyte": "x" * (1 << 20),
}


def test_names_that_are_none(arena, channel):
    refused = (DENIED, REFUSED)
    for what, name in BAD_NAMES.items():
        for field in ("sender", "receiver"):
            request = arena.tell_request(**{field: name})
            assert code_of(lambda request=request: tell(channel, request)) in refused, what
            assert put_code(channel, arena.opening(**{field: name})) in refused, what
        assert code_of(lambda name=name: hello(arena, channel, job=name)) in refused, what
        if name:
            assert code_of(lambda name=name: hello(arena, channel, address=name)) is REFUSED, what
    assert "\x1b" not in arena.log()


def test_an_address_is_a_number_and_a_port(arena, channel):
    """It is what the agent connects to next, and gRPC takes far more than addresses for a target."""
    before = [(one["node"], one["address"]) for one in arena.status()["peers"]]
    for address in ("unix:/run/x.sock", "dns:///localhost:1", "xds:///x", "localhost:80", "1.2.3.4", "1.2.3.4:99999"):
        assert code_of(lambda address=address: hello(arena, channel, address=address)) is REFUSED, address
    assert [(one["node"], one["address"]) for one in arena.status()["peers"]] == before


def test_lists_without_an_end(arena, channel):
    many = 10_000
    shard = arena.shard_id()
    report = peer_pb2.Report(shard=shard, digest=bytes(16), holders=[f"n{i}" for i in range(many)])
    voids = peer_pb2.Announce(voids=[arena.generation(step) for step in range(1, many)])
    for body in ({"report": report}, {"announce": voids}):
        assert code_of(lambda body=body: tell(channel, arena.tell_request(**body))) is REFUSED
    forged = arena.forged()
    push = Push(channel, arena.opening(forged), *forged.messages()[:-5])
    push.send(peer_pb2.PutRequest(chunks=peer_pb2.PutChunks(data=[b""] * many)).SerializeToString())
    assert push.end()[1] is grpc.StatusCode.INVALID_ARGUMENT
    push.close()
    nested = b"\x2a\x00" * many  # unknown and repeated fields of a message that has none
    assert code_of(lambda: tell(channel, arena.tell_request().SerializeToString() + nested)) is grpc.StatusCode.OK


def test_a_traitor_stops_its_own_launch_and_no_more():
    """It need not even lie: a rank that never reports has the same effect. What is committed stays, and a launch
    without it goes on."""
    with Arena() as arena:
        with arena.channel(arena.traitor()) as channel:
            for number in range(150):
                shard = arena.shard_id(step=arena.step + 1000 + number)
                tell(channel, arena.tell_request(report=peer_pb2.Report(shard=shard, digest=bytes(16))))
                give_up = peer_pb2.GiveUp(generation=arena.generation(arena.step + 5000 + number))
                tell(channel, arena.tell_request(give_up=give_up))
            want = peer_pb2.Want(shard=arena.shard_id(rank=0), digest=bytes(16))
            assert tell(channel, arena.tell_request(want=want)).record.generation.step == arena.step
        assert arena.world.agent_pid(0) == arena.pids[0]
        arena.world.check()
        arena.launch = arena.world.launch()
        arena.save()
        arena.world.check()
        assert arena.usage().heap_bytes - arena.baseline.heap_bytes < GROWTH_BYTES


def test_bytes_that_are_no_message(arena, channel):
    good = arena.tell_request().SerializeToString()
    for data in (b"\xff" * 100, good[:-3], b"", b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
        assert code_of(lambda data=data: tell(channel, data)) is REFUSED
        assert put_code(channel, data) is REFUSED


def test_compressed_and_oversized(arena, channel):
    request = arena.tell_request()
    found = code_of(lambda: tell(channel, request, compression=grpc.Compression.Gzip))
    assert found is grpc.StatusCode.UNIMPLEMENTED
    for size in (5 << 20, 64 << 20):
        assert code_of(lambda size=size: tell(channel, bytes(size))) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_command_line_prints_no_escape_codes(arena, run_python):
    """Whatever names nodes have: what reaches a terminal does not steer it."""
    code = """
import sys
from flashckpt.agent.start import look
from flashckpt.cli.memory import open_store, view
from flashckpt.cli.status import _print, overview_of
seen = look(sys.argv[1], sys.argv[2])
bad = "\\x1b]0;owned\\x07\\x1b[2J\\u202e"
for peer in seen.status["peers"]:
    peer.update(node=bad, address=bad, domain=bad, problem=bad)
for one in seen.status["generations"]:
    for shard in one["shards"]:
        shard["holders"] = [bad]
seen.status.update(node=bad, backlog=[{"running": True, "size_bytes": 1, "to": bad, "problem": bad}])
with open_store(sys.argv[1], sys.argv[2]) as store:
    _print(overview_of(view(store, sys.argv[2]), seen, 0.0))
"""
    shown = run_python(code, arena.world.nodes[0].memory_dir, JOB)
    assert shown.returncode == 0, shown.stderr
    assert "owned" in shown.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.stdout + shown.stderr)
