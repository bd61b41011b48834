"""Healing by example: real cores, messages carried at once, nodes that vanish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashckpt.agent.spare import missing_slots, why_no_room
from flashckpt.agent.status import describe_peers
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.events import (
    Accept,
    Acknowledge,
    Answered,
    Begun,
    Decline,
    KeepSession,
    LinePut,
    Pushed,
    PushEnd,
    PutAsked,
    Received,
    Reply,
    Rotten,
    Send,
    ShardSealed,
    Started,
    StartPush,
    Tick,
    Told,
    Unreachable,
)
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.placement import place
from flashckpt.protocol.replicate import Limits
from flashckpt.protocol.survival import survival, words
from flashckpt.protocol.wire import Answer, CopyOrder, Envelope, Holds, PutHave, PutOpen, PutRefused
from flashckpt.store.room import Room
from flashckpt.types import Generation, Held, Launch, Member, Record, Session, ShardId

OLD, NEW = Launch(100, 7), Launch(200, 8)
LIMITS = Limits(beat=1.0, retry_first=0.1, retry_most=0.4, peer_timeout=10.0)
BASE = Generation(OLD.epoch, OLD.nonce, 5, 1)
FENCE = from_fence(BASE.step, NEW.epoch, NEW.nonce)


def session(nodes, replicas=1, launch=NEW, domains=None, slots=2):
    members = tuple(Member(f"n{i}", f"10.0.0.{i}:1", domains[i] if domains else "", (i,)) for i in range(nodes))
    return Session(launch, nodes, members, replicas, "ring", slots)


def held(generation, rank, world):
    return Held(ShardId(generation, rank, world), b"%16d" % rank, 4096, 0)


class Cluster:
    """Cores by name; what a dead one gets is not answered. Pushes end at once."""

    def __init__(self, nodes, replicas=1, domains=None, base=None, holdings=None, base_world=None):
        self.session = session(nodes, replicas, domains=domains)
        self.dead, self.now, self.pushed, self.refuses = set(), 0.0, [], {}
        self.cores = {}
        for member in self.session.members:
            mine = [held(base, rank, base_world or nodes) for rank in (holdings or {}).get(member.node_id, ())]
            self.start(member.node_id, mine)
        if base is not None:
            for node in list(self.cores):
                self.feed(node, LinePut(NEW, FENCE, base))

    def start(self, node, mine=(), **kept):
        core = self.cores[node] = AgentCore(node, LIMITS)
        core.handle(Started(tuple(mine), kept.get("lines", ()), (), None), self.now)
        core.handle(Begun(self.session), self.now)
        self.dead.discard(node)

    def feed(self, node, event):
        core = self.cores[node]
        effects = core.handle(event, self.now)
        for effect in effects:
            match effect:
                case Send(target, body) if target in self.dead:
                    self.feed(node, Unreachable(target, "no answer"))
                case Send(target, body):
                    answers = self.feed(target, Told(Envelope(node, core.session.launch, core.line, body)))
                    reply = next(one for one in answers if isinstance(one, Reply))
                    self.feed(node, Answered(target, reply.answer))
                case StartPush(one, target, heals):
                    self.feed(node, self.push(node, one, target, heals))
        return effects

    def push(self, node, one, target, heals):
        if target in self.dead:
            return Pushed(one.shard, target, PushEnd.FAILED, reason="broken")
        if target in self.refuses:
            return Pushed(one.shard, target, PushEnd.LATER, reason=self.refuses[target])
        core = self.cores[node]
        put = PutOpen(node, core.session.launch, core.line, one.shard, one.tag, one.digest, one.size_bytes, 64)
        answer = next(e for e in self.feed(target, PutAsked(put)) if isinstance(e, Accept | Decline))
        if isinstance(answer, Accept):
            effects = self.feed(target, Received(node, core.session.launch, one))
            assert any(isinstance(effect, Acknowledge) for effect in effects)
            if heals:
                self.pushed.append((one.shard.rank, node, target))
        elif isinstance(answer.answer, PutRefused):
            return Pushed(one.shard, target, PushEnd.REFUSED, reason=answer.answer.reason)
        return Pushed(one.shard, target, PushEnd.ACKED, digest=one.digest)

    def run(self, seconds):
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for node in self.cores:
                if node not in self.dead:
                    self.feed(node, Tick())

    def save(self, step):
        generation = Generation(NEW.epoch, NEW.nonce, step, 1)
        for rank, node in enumerate(self.cores):
            self.feed(node, ShardSealed(held(generation, rank, self.session.world)))
        return generation

    def copies(self, generation):
        """By rank, the live nodes that hold it."""
        return {
            rank: sorted(n for n, c in self.cores.items() if n not in self.dead and self.has(c, generation, rank))
            for rank in range(max(s.world for c in self.cores.values() for s in c.held if s.generation == generation))
        }

    def has(self, core, generation, rank):
        return any(s.generation == generation and s.rank == rank for s in core.held)

    def health(self, node):
        return self.cores[node].health[0]


# --- what is healed


def test_what_was_loaded_gets_its_copies_back_before_anything_is_saved():
    """Node 2 came back blank; the shards lay on their owners and on the next node."""
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 2], "n1": [0, 1], "n2": []})
    cluster.run(3)
    assert all(len(nodes) == 2 for nodes in cluster.copies(BASE).values())
    assert {rank for rank, _, _ in cluster.pushed} == {1, 2}
    assert all(target == "n2" for _, _, target in cluster.pushed), "to where the next save would put them"


def test_what_was_loaded_may_have_another_world():
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2, 3, 4], "n1": [], "n2": []}, base_world=5)
    cluster.run(8)
    assert all(len(nodes) == 2 for nodes in cluster.copies(BASE).values())
    loads = [len(core.held) for core in cluster.cores.values()]
    assert sorted(loads) == [2, 3, 5]


def test_a_node_that_falls_silent_is_replaced_as_a_holder_while_nobody_saves():
    cluster = Cluster(4)
    generation = cluster.save(1)
    cluster.run(2)
    assert cluster.pushed == []
    cluster.dead.add("n2")
    cluster.run(9)
    assert cluster.pushed == [], "it may still speak"
    cluster.run(6)
    assert all(len(nodes) == 2 for nodes in cluster.copies(generation).values())
    assert cluster.health("n3").missing == ("n2",)
    assert cluster.health("n3").survival.any_nodes == 1


def test_who_never_speaks_to_a_lost_node_hears_of_it_from_the_healer():
    cluster = Cluster(4)
    cluster.save(1)
    cluster.run(2)
    cluster.dead.add("n2")
    cluster.run(15)
    seen = {
        node: next(one for one in describe_peers(core, cluster.now) if one["node"] == "n2")
        for node, core in cluster.cores.items()
        if node != "n2"
    }
    assert seen["n0"]["state"] == "down"
    strangers = [one for one in seen.values() if one["silent_seconds"] is None]
    assert strangers
    assert {(one["state"], one["problem"]) for one in strangers} == {("missed", "n0 does not hear from it")}
    assert all(one["state"] == "up" for one in describe_peers(cluster.cores["n1"], cluster.now) if one["node"] != "n2")


def test_the_next_member_heals_where_the_first_is_gone_and_lets_go_when_it_is_back():
    cluster = Cluster(4)
    generation = cluster.save(1)
    cluster.run(2)
    cluster.dead.add("n0")
    cluster.run(40)
    assert all(len(nodes) == 2 for nodes in cluster.copies(generation).values())
    assert {cluster.cores[node].healer(cluster.now) for node in ("n1", "n2", "n3")} == {"n1"}
    cluster.dead.discard("n0")
    cluster.run(15)
    assert {core.healer(cluster.now) for core in cluster.cores.values()} == {"n0"}
    assert cluster.health("n3").missing == ()
    assert cluster.health("n3").copies >= 2


def test_a_node_that_is_back_is_counted_again_and_nothing_is_dropped():
    cluster = Cluster(4)
    generation = cluster.save(1)
    cluster.run(2)
    cluster.dead.add("n3")
    cluster.run(20)
    before = cluster.copies(generation)
    cluster.dead.discard("n3")
    cluster.run(5)
    after = cluster.copies(generation)
    assert all(set(before[rank]) <= set(after[rank]) for rank in before)
    assert max(map(len, after.values())) == 3


def test_an_agent_that_came_back_blank_gets_its_own_shard_and_learns_what_was_loaded():
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 2], "n1": [0, 1], "n2": [1, 2]})
    cluster.run(2)
    cluster.dead.add("n2")
    cluster.start("n2")
    cluster.run(5)
    assert cluster.cores["n2"].base == BASE
    assert cluster.copies(BASE) == {0: ["n0", "n1"], 1: ["n1", "n2"], 2: ["n0", "n2"]}


def test_a_copy_that_went_bad_is_healed_though_it_is_of_an_older_launch():
    cluster = Cluster(2, base=BASE, holdings={"n0": [0, 1], "n1": [0, 1]})
    cluster.run(2)
    cluster.feed("n1", Rotten(ShardId(BASE, 0, 2), "crc"))
    cluster.run(2)
    assert cluster.copies(BASE) == {0: ["n0", "n1"], 1: ["n0", "n1"]}


def test_domains_are_respected():
    cluster = Cluster(4, domains=["a", "a", "b", "b"], base=BASE, holdings={"n0": [0, 1], "n1": [2, 3]})
    cluster.run(4)
    for nodes in cluster.copies(BASE).values():
        assert {node in ("n0", "n1") for node in nodes} == {True, False}


def test_a_target_without_room_is_passed_over():
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2], "n1": [], "n2": []})
    cluster.refuses["n2"] = "no room"
    cluster.run(6)
    assert cluster.copies(BASE) == {rank: ["n0", "n1"] for rank in range(3)}
    assert cluster.health("n0").at_risk_count == 0


def test_all_refuse_and_the_reason_is_told():
    cluster = Cluster(2, base=BASE, holdings={"n0": [0, 1], "n1": []})
    cluster.refuses["n1"] = "no room"
    cluster.run(4)
    assert "n1: no room" in cluster.health("n1").reason
    assert cluster.health("n1").left_copies == 2
    assert cluster.health("n1").left_bytes == 8192


def test_a_commit_ends_the_healing_of_what_was_before():
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2], "n1": [], "n2": []})
    cluster.refuses.update(dict.fromkeys(cluster.cores, "no room"))
    cluster.run(3)
    cluster.refuses.clear()
    cluster.now += 5
    generation = cluster.save(6)
    cluster.run(3)
    assert all(core.kept == generation for core in cluster.cores.values())
    assert all(s.generation == generation for core in cluster.cores.values() for s in core.held)
    assert cluster.health("n2").generation == generation


def test_a_commit_says_at_once_what_would_be_survived():
    """Commits may come faster than beats."""
    cluster = Cluster(3)
    for step in (1, 2, 3):
        generation = cluster.save(step)
        assert cluster.health("n0").generation == generation
        assert (cluster.health("n0").copies, cluster.health("n0").survival.any_nodes) == (2, 1)
    cluster.run(1.5)
    assert {cluster.health(node).generation for node in cluster.cores} == {generation}
    assert cluster.pushed == []


def test_a_healer_that_was_paused_does_not_take_the_others_for_lost():
    cluster = Cluster(3)
    cluster.save(1)
    cluster.run(2)
    cluster.now += 60
    cluster.feed("n0", Tick())
    for node in ("n1", "n2", "n0"):
        cluster.feed(node, Tick())
    cluster.run(2)
    assert cluster.pushed == []
    assert cluster.health("n0").missing == ()


def test_nobody_heals_in_the_name_of_a_launch_that_is_over():
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2], "n1": [], "n2": []})
    for core in cluster.cores.values():
        core.handle(Told(Envelope("x", Launch(300, 1), None, Holds(BASE, 3, True, (), (), ()))), cluster.now)
    cluster.run(5)
    assert cluster.pushed == []


# --- what a receiver takes


def core_with_base(node="n1", nodes=3):
    core = AgentCore(node, LIMITS)
    core.handle(Started((), (), (), None), 0.0)
    core.handle(Begun(session(nodes)), 0.0)
    core.handle(LinePut(NEW, FENCE, BASE), 0.0)
    return core


def announce(core, rank, digest=None, now=0.5, node="n0"):
    """The healer tells of a copy that will come to this node, or that this node has to make."""
    told = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2], "n1": [], "n2": []})
    told.run(2)
    copy = CopyOrder(rank, "n2", core.node_id, digest or b"%16d" % rank)
    answer = Answer(NEW, FENCE, None, (), base=BASE, health=told.health("n0"), copies=(copy,))
    core.handle(Answered(node, answer), now)


def put(generation, rank=0, world=3, sender="n2", launch=NEW):
    one = held(generation, rank, world)
    return PutAsked(PutOpen(sender, launch, FENCE, one.shard, one.tag, one.digest, one.size_bytes, 64))


def test_only_what_is_kept_is_taken_from_somebody_who_does_not_own_it():
    core = core_with_base()
    announce(core, 0)
    assert core.handle(put(BASE), 1.0) == [Accept(heals=True)]
    other = BASE._replace(step=4)
    (declined,) = core.handle(put(other), 1.0)
    assert "is not n2's to give away" in declined.answer.reason
    above = BASE._replace(step=6)
    (declined,) = core.handle(put(above), 1.0)
    assert declined.answer.reason.startswith("abandoned")
    (declined,) = core.handle(put(BASE, sender="stranger"), 1.0)
    assert "no member" in declined.answer.reason


def test_only_what_the_healer_has_announced_is_taken():
    """One member that lies must not put its own bytes into the memory of the others."""
    core = core_with_base()
    (declined,) = core.handle(put(BASE), 1.0)
    assert "is not n2's to give away" in declined.answer.reason
    announce(core, 0, digest=b"other bytes 1234")
    assert isinstance(core.handle(put(BASE), 1.0)[0], Decline)
    announce(core, 0, node="n2")
    assert isinstance(core.handle(put(BASE), 1.0)[0], Decline), "n2 is not the healer"
    announce(core, 1)
    assert isinstance(core.handle(put(BASE), 1.0)[0], Decline)
    announce(core, 0, now=1.0)
    assert core.handle(put(BASE), 2.0) == [Accept(heals=True)]
    assert isinstance(core.handle(put(BASE), 12.0)[0], Decline), "that was long ago"


def test_copies_that_differ_are_not_healed_and_one_that_differs_does_not_count():
    cluster = Cluster(4, base=BASE, holdings={"n0": [0, 1], "n1": [0, 1], "n2": [0, 1], "n3": []})
    forged = Held(ShardId(BASE, 0, 4), b"other bytes 1234", 4096, 0)
    cluster.cores["n2"].held[forged.shard] = forged
    cluster.cores["n2"].held[ShardId(BASE, 1, 4)] = replace(forged, shard=ShardId(BASE, 1, 4))
    cluster.cores["n1"].held.pop(ShardId(BASE, 1, 4))
    cluster.run(3)
    assert "copies of shard 1 differ" in cluster.health("n0").reason
    assert cluster.pushed == []
    assert cluster.health("n0").lost_count == 3, "of shards 1 to 3 nobody knows the content"
    cluster.cores["n1"].held.pop(ShardId(BASE, 0, 4))
    cluster.cores["n2"].held.pop(ShardId(BASE, 1, 4))
    cluster.cores["n2"].held.pop(ShardId(BASE, 0, 4))
    cluster.run(3)
    assert {rank for rank, _, _ in cluster.pushed} == {0, 1}


def test_a_copy_that_arrives_for_a_launch_that_is_over_does_not_count():
    core = core_with_base()
    announce(core, 0)
    assert core.handle(put(BASE), 1.0) == [Accept(heals=True)]
    core.handle(Begun(session(3, launch=Launch(300, 1))), 2.0)
    core.handle(LinePut(Launch(300, 1), from_fence(BASE.step, 300, 1), BASE), 2.0)
    assert not any(isinstance(e, Acknowledge) for e in core.handle(Received("n2", NEW, held(BASE, 0, 3)), 3.0))


def test_a_copy_that_is_there_is_not_sent_again():
    core = core_with_base()
    announce(core, 0)
    core.handle(Received("n2", NEW, held(BASE, 0, 3)), 1.0)
    assert core.handle(put(BASE), 1.0) == [Decline(PutHave(b"%16d" % 0))]


def test_what_was_loaded_survives_a_restart_of_the_agent():
    core = AgentCore("n1", LIMITS)
    core.handle(Started((), (), (), None), 0.0)
    core.handle(Begun(session(3)), 0.0)
    effects = core.handle(LinePut(NEW, FENCE, BASE), 0.0)
    (kept,) = [effect for effect in effects if isinstance(effect, KeepSession)]
    again = AgentCore("n1", LIMITS)
    again.handle(Started((), (FENCE,), (), kept.session, kept.base), 0.0)
    assert again.kept == BASE


@pytest.mark.parametrize(
    ("base", "line"),
    [
        (BASE, from_fence(3, NEW.epoch, NEW.nonce)),  # an earlier load of this launch: killed since
        (BASE, None),  # nobody has decided yet
        (BASE._replace(step=4), FENCE),  # of the launch before: the answer is late
    ],
)
def test_what_others_say_was_loaded_is_doubted(base, line):
    core = AgentCore("n1", LIMITS)
    core.handle(Started((), () if line is None else (line,), (), None), 0.0)
    core.handle(Begun(session(3)), 0.0)
    core.handle(Answered("n0", Answer(NEW, line, None, (), base=base)), 1.0)
    assert core.kept is None


def test_hearsay_of_a_commit_heals_and_frees_nothing():
    core = AgentCore("n1", LIMITS)
    older, newer = (Generation(NEW.epoch, NEW.nonce, step, 1) for step in (1, 2))
    core.handle(Started((held(older, 1, 3), held(newer, 1, 3)), (), (), session(3)), 0.0)
    says = Answered("n2", Answer(NEW, None, Record(newer, 3, 1, 0.0), ()))
    core.handle(says, 1.0)
    assert core.kept is None, "the coordinator answers, as far as is known"
    core.handle(Tick(), 1.0)
    core.handle(Tick(), 12.0)
    core.handle(says, 12.0)
    assert core.kept == newer
    assert core.threshold is None
    assert {shard.generation for shard in core.held} == {older, newer}
    core.handle(Answered("n0", Answer(NEW, None, Record(older, 3, 1, 0.0), ())), 13.0)
    core.handle(Tick(), 13.0)
    assert core.kept == older, "its own word counts again"


def test_a_copy_is_made_only_of_what_this_node_has_and_for_a_member():
    core = core_with_base("n1")
    core.handle(Received("n2", NEW, held(BASE, 0, 3)), 1.0)
    health = None
    cluster = Cluster(3, base=BASE, holdings={"n0": [0, 1, 2], "n1": [], "n2": []})
    cluster.run(2)
    health = cluster.health("n0")
    digests = [b"%16d" % rank for rank in range(2)]
    copies = (
        CopyOrder(0, "n1", "n0", digests[0]),
        CopyOrder(0, "n1", "n2", b"other bytes 1234"),
        CopyOrder(1, "n1", "n0", digests[1]),
        CopyOrder(0, "n2", "n0", digests[0]),
        CopyOrder(0, "n1", "stranger", digests[0]),
    )
    effects = core.handle(Answered("n0", Answer(NEW, FENCE, None, (), base=BASE, health=health, copies=copies)), 2.0)
    assert [(e.held.shard.rank, e.node_id) for e in effects if isinstance(e, StartPush)] == [(0, "n0")]


# --- words


@pytest.mark.parametrize(
    ("holders", "world", "said"),
    [
        ({0: ["a", "b"], 1: ["b", "c"], 2: ["a", "c"]}, 3, "any 1 node; not a together with b; a together with c; b"),
        ({0: ["a", "b", "c"], 1: ["a", "b", "c"]}, 2, "any 2 nodes"),
        ({0: ["a"], 1: ["b", "c"]}, 2, "nothing may be lost: a holds the only copy of shard 0"),
        ({0: ["a", "b"]}, 3, "no live node has shard 1, 2"),
    ],
)
def test_losses_in_words(holders, world, said):
    lost = tuple(rank for rank in range(world) if rank not in holders)
    assert said in words(survival(holders, world, dict.fromkeys("abc", "")), lost, len(lost))


def test_a_domain_that_may_not_be_lost_is_named():
    found = survival({0: ["a", "b"], 1: ["a", "c"]}, 2, {"a": "east", "b": "east", "c": "west"})
    assert "not all nodes of domain east" in words(found, (), 0)


def test_survival_of_thousands_of_shards_is_a_matter_of_milliseconds():
    nodes = [f"n{i}" for i in range(1000)]
    holders = {rank: [nodes[rank // 8], nodes[(rank // 8 + 1) % 1000]] for rank in range(8000)}
    found = survival(holders, 8000, dict.fromkeys(nodes, ""))
    assert (found.any_nodes, found.fatal_count, len(found.fatal)) == (1, 1000, 4)
    assert "996 more sets of nodes" in words(found, (), 0)


# --- room


def test_room_for_saves_is_kept_free():
    one = session(3)
    placement = place(one.members, one.replicas, one.strategy)
    assert missing_slots(one, placement, "n0", 0) == 2 + 3
    assert missing_slots(one, placement, "n0", 4) == 1
    assert missing_slots(one, placement, "n0", 9) == 0
    shard = ShardId(BASE, 0, 6)

    def room(free):
        return Room("tmpfs", "/x", 1 << 30, free, None, None, None, None)

    assert why_no_room(shard, 100, 3, 0, room(100)) is None
    assert why_no_room(shard, 100, 3, 1, room(300)) is None, "half as many ranks, slots of twice the size"
    assert "200 B are kept free for saves" in why_no_room(shard, 100, 3, 1, room(299))
