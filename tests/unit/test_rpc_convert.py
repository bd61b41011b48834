"""Protobuf ↔ types: what goes in comes out, and what does not fit is refused by name."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import IncompatibleError
from flashckpt.protocol import wire
from flashckpt.protocol.line import MAX_LISTED, Ancestor, Line, order
from flashckpt.rpc import convert
from flashckpt.rpc.api import GenerationProgress, Hello, Lease
from flashckpt.rpc.credentials import Bundle
from flashckpt.store.owner import Owner
from flashckpt.types import Claimant, Generation, Launch, Level, Member, Record, Session, ShardId
from flashckpt.v1 import agent_pb2, common_pb2, peer_pb2
from tests.unit.test_agent_session import FULL

counts = st.integers(0, (1 << 63) - 1)
nonces = st.integers(0, (1 << 64) - 1)
small = st.integers(0, (1 << 32) - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
texts = st.text(st.characters(codec="utf-8"), max_size=64)
plain = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=64)
digests = st.binary(min_size=16, max_size=16)
epochs = st.integers(0, 4_000_000_000_000)  # milliseconds since 1970, far from both ends
launches = st.builds(Launch, epochs, nonces)


@st.composite
def _lines(draw):
    """As launches make them: ancestors in order, all of them older than the head."""
    *older, head = sorted(
        draw(st.sets(st.builds(Launch, st.integers(1, 4_000_000_000_000), nonces), min_size=1)), key=order
    )
    below = older.pop(0) if older and draw(st.booleans()) else None
    steps = st.integers(-1, (1 << 63) - 1)
    floor = None if below is None else Ancestor(below, draw(steps))
    return Line(head, draw(launches), tuple(Ancestor(one, draw(steps)) for one in older), floor)


lines = _lines()
generations = st.builds(Generation, counts, nonces, counts, counts)
worlds = st.integers(1, 1 << 24)
shards = st.builds(lambda generation, world, rank: ShardId(generation, rank % world, world), generations, worlds, small)
voids = st.lists(generations, max_size=4).map(tuple)
records = st.builds(Record, generations, worlds, small, st.floats(allow_nan=False, allow_infinity=False), voids)
few_names = st.lists(names, max_size=4).map(tuple)
few_ranks = st.lists(small, max_size=4).map(tuple)
copies = st.lists(st.builds(wire.CopyOrder, small, names, names, st.just(b"") | digests), max_size=4).map(tuple)


@st.composite
def holdings(draw):
    ranks = sorted(draw(st.sets(st.integers(0, (1 << 24) - 1), max_size=5)))
    world = draw(st.integers(ranks[-1] + 1 if ranks else 0, 1 << 24))
    refusals = draw(st.lists(st.builds(wire.Refusal, small, names, plain), max_size=3))
    sizes, told = tuple(draw(counts) for _ in ranks), tuple(draw(digests) for _ in ranks)
    return wire.Holds(draw(generations), world, draw(st.booleans()), tuple(ranks), sizes, told, tuple(refusals))


survivals = st.builds(
    wire.Survival,
    st.integers(-1, (1 << 31) - 1),
    small,
    st.lists(st.builds(wire.Fatal, st.lists(names, min_size=1, max_size=3).map(tuple), small), max_size=3).map(tuple),
    small,
    few_names,
)
healths = st.builds(
    wire.Health,
    generation=generations,
    world=worlds,
    committed=st.booleans(),
    wanted=small,
    copies=small,
    lost=few_ranks,
    lost_count=small,
    at_risk=few_ranks,
    at_risk_count=small,
    left_copies=small,
    left_bytes=counts,
    running=copies,
    missing=few_names,
    survival=survivals,
    reason=plain,
)
failures = st.builds(wire.FlushFailure, generations, st.integers(1, (1 << 64) - 1), plain)
BODIES = {
    wire.Beat: st.builds(wire.Beat),
    wire.Report: st.builds(wire.Report, shards, digests, st.lists(names, max_size=4).map(tuple)),
    wire.GiveUp: st.builds(wire.GiveUp, generations),
    wire.Announce: st.builds(wire.Announce, st.none() | records, voids, st.none(), st.none(), st.none() | failures),
    wire.WantPersisted: st.builds(wire.WantPersisted, generations, plain, st.booleans()),
    wire.FlushFailure: failures,
    wire.Lost: st.builds(wire.Lost, shards),
    wire.WantBack: st.builds(wire.WantBack, shards, digests),
    wire.Holds: holdings(),
}
bodies = st.one_of(*BODIES.values())
envelopes = st.builds(wire.Envelope, names, launches, st.none() | lines, bodies)
answers = st.builds(
    wire.Answer,
    *(st.none() | launches, st.none() | lines, st.none() | records, voids, plain),
    failure=st.none() | failures,
    base=st.none() | generations,
    health=st.none() | healths,
    copies=copies,
)
openings = st.builds(
    lambda *a, head, data: wire.PutOpen(*a, size_bytes=head + data, head_bytes=head),
    *(names, launches, st.none() | lines, shards, nonces, digests),
    head=st.integers(1, 1 << 40),
    data=st.integers(0, 1 << 40),
)
owners = st.builds(Owner, st.integers(1, (1 << 31) - 1), counts, st.from_regex(r"\A[0-9a-f]{8}\Z"), counts)
blobs = st.binary(min_size=1, max_size=64)


@st.composite
def sessions(draw):
    world = draw(st.integers(1, 9))
    nodes = draw(st.lists(names, min_size=1, max_size=world, unique=True))
    owner = list(range(len(nodes))) + [draw(st.integers(0, len(nodes) - 1)) for _ in range(world - len(nodes))]
    ranks = [tuple(rank for rank in range(world) if owner[rank] == node) for node in range(len(nodes))]
    members = [Member(name, draw(texts), draw(texts), mine) for name, mine in zip(nodes, ranks, strict=True)]
    keep = draw(st.integers(1, 64))
    strategy = draw(names.filter(lambda name: "\0" not in name))
    return Session(draw(launches), world, tuple(members), draw(small), strategy, draw(small), keep_memory=keep)


def through(message):
    """As another process gets it."""
    return type(message).FromString(message.SerializeToString())


PAIRS = [
    ("launch", launches, convert.to_launch, convert.from_launch),
    ("line", lines, convert.to_line, convert.from_line),
    ("generation", generations, convert.to_generation, convert.from_generation),
    ("shard", shards, convert.to_shard, convert.from_shard),
    ("record", records, convert.to_record, convert.from_record),
    ("owner", owners, convert.to_owner, convert.from_owner),
    (
        "claimant",
        st.builds(
            Claimant,
            names,
            st.integers(1, (1 << 31) - 1),
            small,
            launches,
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
        ),
        convert.to_claimant,
        convert.from_claimant,
    ),
    ("bundle", st.builds(Bundle, blobs, blobs, blobs), convert.to_bundle, convert.from_bundle),
    ("session", sessions(), convert.to_session, convert.from_session),
    (
        "lease",
        st.builds(Lease, blobs, st.integers(1, (1 << 31) - 1), names, st.integers(1, 1 << 40)),
        convert.to_lease,
        convert.from_lease,
    ),
    (
        "progress",
        st.builds(GenerationProgress, generations, st.sampled_from(Level), plain),
        convert.to_progress,
        convert.from_progress,
    ),
    ("answer", answers, convert.to_answer, convert.from_answer),
    ("ready", st.builds(wire.PutReady, counts, counts), convert.to_ready, convert.from_ready),
    (
        "refused",
        st.builds(wire.PutRefused, plain, st.booleans(), st.none() | launches, st.none() | lines),
        convert.to_refused,
        convert.from_refused,
    ),
]


@pytest.mark.parametrize(("values", "to", "back"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_what_goes_in_comes_out(values, to, back):
    @given(values)
    def check(value):
        assert back(through(to(value))) == value

    check()


def test_every_body_is_among_those_that_go_in():
    assert set(BODIES) == set(get_args(wire.Body))


def test_every_field_of_a_session_comes_out():
    assert convert.from_session(through(convert.to_session(FULL))) == FULL


addresses = st.sampled_from(["", "10.0.0.1:7000", "[2001:db8::1]:65535"])
hellos = st.builds(Hello, small, names, names, addresses, st.none() | launches, st.none() | lines)


@pytest.mark.parametrize(
    ("values", "to", "back"),
    [
        (hellos, convert.to_hello, convert.from_hello),
        (envelopes, convert.to_envelope, convert.from_envelope),
        (openings, convert.to_opening, convert.from_opening),
    ],
    ids=["hello", "envelope", "opening"],
)
def test_what_goes_to_a_node_comes_out_with_its_name(values, to, back):
    @given(values, names)
    def check(value, receiver):
        assert back(through(to(value, receiver))) == (value, receiver)

    check()


def test_policies_come_out():
    assert [convert.from_on_busy(convert.to_on_busy(word)) for word in ("wait", "skip")] == ["wait", "skip"]


GENERATION = common_pb2.Generation(epoch=1, nonce=2, step=3, seq=4)
SHARD = common_pb2.ShardId(generation=GENERATION, rank=0, world=2)
LAUNCH = common_pb2.Launch(epoch=1, nonce=2)
OPEN = {
    "sender": "a",
    "receiver": "b",
    "launch": LAUNCH,
    "shard": SHARD,
    "digest": bytes(16),
    "size_bytes": 2,
    "head_bytes": 1,
}


def opening(**changes):
    return convert.from_opening, peer_pb2.PutOpen(**{**OPEN, **changes})


def tell(**parts):
    return convert.from_envelope, peer_pb2.TellRequest(**{"sender": "a", "receiver": "b", "launch": LAUNCH, **parts})


def session(*members, world=2, launch=LAUNCH, strategy="ring"):
    built = [agent_pb2.Member(node_id=name, ranks=ranks) for name, ranks in members]
    return convert.from_session, agent_pb2.Session(launch=launch, world=world, members=built, strategy=strategy)


def ancestor(epoch, step=1):
    return common_pb2.Ancestor(launch=common_pb2.Launch(epoch=epoch, nonce=2), step=step)


def line(*listed, head=LAUNCH, **more):
    return convert.from_line, common_pb2.Line(head=head, root=LAUNCH, listed=listed, **more)


REFUSED = {
    "generation": (convert.from_shard, common_pb2.ShardId(rank=0, world=1)),
    "rank": (convert.from_shard, common_pb2.ShardId(generation=GENERATION, rank=2, world=2)),
    "world": (convert.from_shard, common_pb2.ShardId(generation=GENERATION, rank=0, world=(1 << 24) + 1)),
    "step": (convert.from_generation, common_pb2.Generation(step=1 << 63)),
    "epoch": (convert.from_launch, common_pb2.Launch(epoch=(1 << 64) - 1)),
    "head": line(head=None),
    "line": line(ancestor(1)),
    "listed": line(*[ancestor(1)] * (MAX_LISTED + 1)),
    "keeps": (convert.from_record, common_pb2.Record(generation=GENERATION, world=1, keeps=[GENERATION] * 65)),
    "committed_at": (convert.from_record, common_pb2.Record(generation=GENERATION, world=1, committed_at=math.nan)),
    "digest": opening(digest=bytes(15)),
    "size_bytes": opening(size_bytes=0),
    "head_bytes": opening(head_bytes=3),
    "sender": opening(sender=""),
    "receiver": opening(receiver="x" * 257),
    "launch": opening(launch=None),
    "shard": opening(shard=None),
    "body": tell(),
    "holders": tell(report=peer_pb2.Report(shard=SHARD, digest=bytes(16), holders=[""])),
    "ranks": tell(holds=peer_pb2.Holds(generation=GENERATION, world=2, ranks=[2], sizes_bytes=[1])),
    "digests": tell(holds=peer_pb2.Holds(generation=GENERATION, world=2, ranks=[1], sizes_bytes=[1])),
    "sizes_bytes": tell(holds=peer_pb2.Holds(generation=GENERATION, world=2, ranks=[1])),
    "target": (convert.from_answer, peer_pb2.TellResponse(copies=[peer_pb2.Copy(source="a")])),
    "survival": (convert.from_answer, peer_pb2.TellResponse(health=peer_pb2.Health(generation=GENERATION, world=1))),
    "members": session(),
    "ranks of the members": session(("a", [0])),
    "ranks of a member": session(("a", [0]), ("b", [])),
    "strategy": session(("a", [0]), ("b", [1]), strategy=""),
    "on_busy": (convert.from_on_busy, 0),
    "pid": (convert.from_owner, agent_pb2.Owner(pid=0, boot_id8="00000000")),
    "boot_id8": (convert.from_owner, agent_pb2.Owner(pid=1, boot_id8="../../..")),
    "key_pem": (convert.from_bundle, agent_pb2.Bundle(certificate_pem=b"a", ca_pem=b"a")),
    "level": (convert.from_progress, agent_pb2.WatchResponse(generation=GENERATION, level=9)),
    "ticket": (convert.from_lease, agent_pb2.AgentHelloResponse(agent_pid=1, node_id="a", granule_bytes=1)),
    "timeout": (lambda value: convert.seconds(value, "timeout"), math.nan),
    "address": (
        convert.from_hello,
        peer_pb2.PeerHello(version=1, job="j", node_id="a", receiver="b", address="x" * 257),
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_does_not_fit_is_refused_by_name(field):
    back, message = REFUSED[field]
    with pytest.raises(IncompatibleError, match=f"^\\[FC-FMT-002\\] {field} of a message: expected"):
        back(message)


@pytest.mark.parametrize(
    "members",
    [
        [("a", [0]), ("a", [1])],  # a name twice
        [("a", [0]), ("b", [0, 1])],  # a rank twice
        [("a", [1]), ("b", [0])],  # not in order
        [("a", [1, 0])],
        [("a", [0]), ("b", [2])],  # a gap
    ],
)
def test_members_that_would_divide_a_job_are_refused(members):
    back, message = session(*members)
    with pytest.raises(IncompatibleError):
        back(message)


def test_lists_are_bounded():
    back, message = tell(announce=peer_pb2.Announce(voids=[GENERATION] * ((1 << 10) + 1)))
    with pytest.raises(IncompatibleError, match="voids"):
        back(message)
    with pytest.raises(IncompatibleError, match="copies"):
        convert.from_answer(peer_pb2.TellResponse(copies=[peer_pb2.Copy(source="a", target="b")] * ((1 << 8) + 1)))


@pytest.mark.parametrize(
    "message",
    [
        line(ancestor(3), ancestor(2), head=common_pb2.Launch(epoch=9)),
        line(ancestor(3), ancestor(3), head=common_pb2.Launch(epoch=9)),
        line(ancestor(10), head=common_pb2.Launch(epoch=9)),
        line(ancestor(3, step=-3), head=common_pb2.Launch(epoch=9)),
        line(floor=ancestor(9, step=-2), head=common_pb2.Launch(epoch=10)),
        line(floor=ancestor(11), head=common_pb2.Launch(epoch=10)),
        line(head=common_pb2.Launch(epoch=0, nonce=5)),
    ],
    ids=["not sorted", "twice", "newer than the head", "step", "step of the floor", "floor above the head", "no head"],
)
def test_a_line_that_nobody_can_have_is_refused(message):
    back, line = message
    with pytest.raises(IncompatibleError, match="line of a message"):
        back(line)


@pytest.mark.parametrize("address", ["unix:/run/x", "dns:///evil:1", "node:7000", "10.0.0.1", "xds:///a"])
def test_an_address_is_numeric(address):
    with pytest.raises(IncompatibleError, match="address of a message: expected host:port with a numeric host"):
        convert.from_hello(peer_pb2.PeerHello(version=1, job="j", node_id="a", receiver="b", address=address))


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message(data):
    for cls, back in (
        (peer_pb2.TellRequest, convert.from_envelope),
        (peer_pb2.PutOpen, convert.from_opening),
        (peer_pb2.PeerHello, convert.from_hello),
        (agent_pb2.Session, convert.from_session),
    ):
        try:
            back(convert.parse(cls, data, "test"))
        except IncompatibleError:
            continue
        pytest.fail(f"{data!r} was taken for a {cls.__name__}")


def test_text_of_another_node_does_not_steer_a_terminal():
    refused = convert.from_answer(peer_pb2.TellResponse(refused="\x1b[2Jgone\x07"))
    assert refused.refused == "\\x1b[2Jgone\\x07"
