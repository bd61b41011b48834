"""The agent's core by example: one node, or a few of them with the messages carried by hand."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from flashckpt.protocol.commit import Reached, abandoned_by
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.events import (
    Accept,
    Acknowledge,
    Answered,
    Begun,
    Decline,
    GaveUp,
    Gone,
    Grant,
    KeepLine,
    KeepRecord,
    LeaseEnded,
    LinePut,
    Notify,
    Pushed,
    PushEnd,
    PutAsked,
    Received,
    RefuseBusy,
    RefuseFenced,
    Release,
    Reply,
    Rotten,
    Send,
    ShardSealed,
    SlotWanted,
    Started,
    StartPush,
    Tick,
    Told,
)
from flashckpt.protocol.line import NOTHING, Ancestor, Line, begun, from_fence, merged
from flashckpt.protocol.replicate import Limits
from flashckpt.protocol.wire import (
    Announce,
    Answer,
    Beat,
    Envelope,
    GiveUp,
    Lost,
    PutHave,
    PutOpen,
    PutRefused,
    Report,
    WantBack,
)
from flashckpt.types import Generation, Held, Launch, Level, Member, Record, Session, ShardId

LAUNCH = Launch(epoch=100, nonce=7)
FENCE = from_fence(step=-1, epoch=100, nonce=7)
OLDER = Launch(epoch=50, nonce=1)
LIMITS = Limits(beat=1.0, retry_first=0.1, retry_most=0.4, peer_timeout=10.0)


def session(nodes=2, replicas=1, launch=LAUNCH, slots=2, keep=1):
    members = tuple(Member(f"n{i}", f"10.0.0.{i}:1", "", (i,)) for i in range(nodes))
    return Session(launch, nodes, members, replicas, "ring", max(slots, keep + 1), keep_memory=keep)


def generation(step, launch=LAUNCH, seq=1):
    return Generation(launch.epoch, launch.nonce, step, seq)


def shard(step, rank=0, world=2, launch=LAUNCH):
    return ShardId(generation(step, launch), rank, world)


def held(step, rank=0, world=2, launch=LAUNCH, tag=0):
    return Held(shard(step, rank, world, launch), b"%16d" % rank, 4096, tag)


def agent(name="n0", **options):
    core = AgentCore(name, LIMITS)
    core.handle(Started((), (), (), None), 0.0)
    core.handle(Begun(session(**options)), 0.0)
    return core


def only(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind=object):
    return [(effect.node_id, effect.body) for effect in only(Send, effects) if isinstance(effect.body, kind)]


def want(core, step, number=1, now=0.0, may_wait=False, deadline=0.0, rank=0, launch=LAUNCH):
    world = core.session.world if core.session is not None else 2
    return core.handle(SlotWanted(number, 1, shard(step, rank, world, launch), may_wait, deadline), now)


def told(core, sender, body, now=1.0, launch=LAUNCH, line=None):
    return core.handle(Told(Envelope(sender, launch, line, body)), now)


def acked(core, one, node="n1", now=1.0):
    return core.handle(Pushed(one.shard, node, PushEnd.ACKED, digest=one.digest), now)


def put(one, sender="n0", launch=LAUNCH):
    return PutAsked(PutOpen(sender, launch, None, one.shard, one.tag, one.digest, one.size_bytes, 64))


class Nodes:
    """Several cores whose messages and pushes are carried at once, in order."""

    def __init__(self, nodes, replicas, keep=1):
        self.cores = {f"n{i}": agent(f"n{i}", nodes=nodes, replicas=replicas, keep=keep) for i in range(nodes)}
        self.notified = []
        self.world = nodes

    def feed(self, node, event, now=1.0):
        core = self.cores[node]
        effects = core.handle(event, now)
        for effect in effects:
            match effect:
                case Send(target, body):
                    answers = self.feed(target, Told(Envelope(node, core.session.launch, core.line, body)), now)
                    self.feed(node, Answered(target, only(Reply, answers)[0].answer), now)
                case StartPush(one, target):
                    if only(Accept, self.feed(target, put(one, node), now)):
                        assert only(Acknowledge, self.feed(target, Received(node, core.session.launch, one), now))
                    self.feed(node, Pushed(one.shard, target, PushEnd.ACKED, digest=one.digest), now)
                case Notify(g, level, _):
                    self.notified.append((node, g.step, level))
        return effects

    def seal(self, step, rank):
        self.feed(f"n{rank}", ShardSealed(held(step, rank, self.world)))

    def steps(self, node):
        return sorted({s.generation.step for s in self.cores[node].held})


# --- slots


def test_a_slot_is_granted_while_there_are_some():
    assert want(agent(), 1) == [Grant(1)]


def test_a_full_rank_is_busy_and_hears_what_it_waits_for():
    core = agent()
    for step in (1, 2):
        core.handle(ShardSealed(held(step)), 0.0)
    (refusal,) = want(core, 3)
    assert isinstance(refusal, RefuseBusy)
    assert "all 2 slots are needed" in refusal.reason
    assert "step 1 is not on n1" in refusal.reason


def test_a_request_that_may_wait_is_answered_at_its_deadline():
    core = agent()
    for step in (1, 2):
        core.handle(ShardSealed(held(step)), 0.0)
    assert want(core, 3, may_wait=True, deadline=5.0) == []
    assert not only(RefuseBusy, core.handle(Tick(), 4.9))
    assert only(RefuseBusy, core.handle(Tick(), 5.0)) == [RefuseBusy(1, ANY, in_vain=False)]


def test_a_request_that_waits_in_vain_is_answered_at_once_and_says_so():
    """Else the trainer asks again until its own deadline."""
    core = agent()
    for step in (1, 2):
        core.handle(ShardSealed(held(step)), 0.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.LATER, reason="[FC-MEM-001] tmpfs can't hold it"), 1.0)
    assert want(core, 3, now=1.0, may_wait=True, deadline=60.0) == []
    assert not only(RefuseBusy, core.handle(Pushed(shard(1), "n1", PushEnd.LATER, reason="[FC-MEM-001]"), 5.9))
    assert only(RefuseBusy, core.handle(Tick(), 6.1)) == [RefuseBusy(1, ANY, in_vain=True)]
    core = agent()
    for step in (1, 2):
        core.handle(ShardSealed(held(step)), 0.0)
    assert want(core, 3, may_wait=True, deadline=60.0) == []
    told(core, "n1", GiveUp(generation(3)))
    (busy,) = want(core, 3, number=2, may_wait=True, deadline=60.0)
    assert busy.in_vain
    assert "given up" in busy.reason


def test_a_request_that_waits_gets_the_slot_that_a_commit_frees():
    core = agent("n1")
    for step in (1, 2):
        core.handle(ShardSealed(held(step, rank=1)), 0.0)
    assert want(core, 3, rank=1, may_wait=True, deadline=9.0) == []
    effects = told(core, "n0", Announce(Record(generation(2), 2, 1, 0.0), ()))
    assert [one.shard.generation.step for one in only(Release, effects)] == [1]
    assert only(Grant, effects) == [Grant(1)]


def test_a_shard_that_is_fetched_back_keeps_its_slot():
    core = agent("n1")
    for step in (1, 2):
        core.handle(ShardSealed(held(step, rank=1)), 0.0)
    core.handle(Rotten(shard(1, rank=1), "crc"), 1.0)
    assert only(RefuseBusy, want(core, 3, now=1.0, rank=1))


def test_a_trainer_that_asks_again_has_ended_with_what_it_was_granted_before():
    core = agent("n1")
    core.handle(ShardSealed(held(1, rank=1)), 0.0)
    assert only(Grant, want(core, 2, rank=1))
    effects = want(core, 3, number=2, rank=1)
    assert only(Grant, effects) == [Grant(2)]
    assert sent(effects) == [("n0", GiveUp(generation(2)))]


# --- launches


def test_a_launch_that_was_overtaken_gets_no_slot_and_no_session():
    core = agent()
    newer = Launch(200, 1)
    told(core, "n1", Beat(), launch=newer)
    assert core.is_fenced
    assert isinstance(want(core, 1)[0], RefuseFenced)
    core.handle(Begun(session(launch=newer)), 2.0)
    (refusal,) = core.handle(Begun(session()), 3.0)
    assert isinstance(refusal, RefuseFenced)
    assert "epoch 200 has taken over from that of epoch 100" in refusal.reason


def test_a_message_of_an_older_launch_is_refused_with_the_newer_one():
    core = agent(launch=Launch(200, 1))
    effects = told(core, "n1", Report(shard(1, rank=1), b"d" * 16, ("n0",)))
    (reply,) = effects
    assert reply.answer.launch == Launch(200, 1)
    assert "taken over" in reply.answer.refused
    assert not core.reported(generation(1))


def test_a_late_line_does_not_kill_what_a_newer_launch_may_load():
    core = AgentCore("n0", LIMITS)
    older = Launch(100, 7)
    core.handle(Started((held(9, launch=Launch(50, 1)),), (), (), None), 0.0)
    core.handle(Begun(session(launch=Launch(200, 1))), 0.0)
    told(core, "n1", Beat(), launch=older, line=from_fence(step=3, epoch=100, nonce=7))
    assert core.line is None
    assert list(core.held) == [shard(9, launch=Launch(50, 1))]


def test_a_line_drops_what_it_abandons_and_leaves_what_was_loaded():
    old = Launch(50, 1)
    core = AgentCore("n0", LIMITS)
    core.handle(Started(tuple(held(step, launch=old) for step in (3, 4, 5)), (), (), None), 0.0)
    core.handle(Begun(session()), 0.0)
    line = from_fence(step=4, epoch=100, nonce=7)
    effects = core.handle(LinePut(LAUNCH, line, generation(4, old)), 0.0)
    assert [one.shard.generation.step for one in only(Release, effects)] == [5]
    assert sorted(s.generation.step for s in core.held) == [3, 4]


def alone(*mine, lines=(), line=None):
    """A launch of one node that goes on from what `line` says, where others left `mine`."""
    core = AgentCore("n0", LIMITS)
    core.handle(Started(mine, lines, (), None), 0.0)
    core.handle(Begun(session(nodes=1, replicas=0)), 0.0)
    if line is not None:
        core.handle(LinePut(LAUNCH, line, None), 0.0)
    return core


def left_after_a_commit(core):
    for step in (20, 21):
        core.handle(ShardSealed(held(step, 0, 1)), 1.0)
    assert core.threshold.generation == generation(21)
    return {one.generation for one in core.held} - {generation(21)}


def test_a_record_frees_what_its_line_went_on_from():
    older = generation(9, OLDER)
    line = begun(LAUNCH).including(None, [older])
    assert left_after_a_commit(alone(held(9, 0, 1, OLDER), line=line)) == set()


@pytest.mark.parametrize("line", [None, begun(LAUNCH)], ids=["no line", "a line that does not list it"])
def test_a_record_frees_nothing_of_a_history_that_its_line_does_not_know(line):
    """A node that was away brings what nobody has given up."""
    assert left_after_a_commit(alone(held(9, 0, 1, OLDER), line=line)) == {generation(9, OLDER)}


def test_a_line_that_comes_later_kills_what_it_knows_to_be_abandoned():
    core = alone(held(9, 0, 1, OLDER), line=begun(LAUNCH))
    newer = Launch(200, 1)
    told(core, "n1", Beat(), launch=newer, line=begun(newer, [OLDER]))
    assert generation(9, OLDER) not in {one.generation for one in core.held}


def test_the_floor_kills_what_is_of_its_own_root():
    floor = Ancestor(Launch(60, 1), NOTHING)
    line = Line(LAUNCH, Launch(10, 1), (), floor)
    one = held(9, 0, 1, OLDER)
    assert not alone(one, line=line).held
    assert not alone(one, lines=(Line(OLDER, Launch(10, 1)),), line=line).held
    assert list(alone(one, lines=(begun(OLDER),), line=line).held) == [one.shard], (
        "its own line says that it is another"
    )


def test_the_lines_of_launches_that_nothing_is_left_of_are_forgotten():
    other = Launch(40, 1)
    before = (begun(other), begun(OLDER))
    listing = begun(LAUNCH).including(None, [generation(9, OLDER), generation(3, other)])
    assert alone(held(9, 0, 1, OLDER), lines=before, line=listing).lines == (begun(OLDER), listing)
    assert alone(lines=before, line=begun(LAUNCH)).lines == (*before, begun(LAUNCH)), "it knows of none of them"


def test_two_nodes_that_saved_without_a_load_are_both_believed():
    ours = begun(LAUNCH).including(None, [generation(9, OLDER)])
    theirs = begun(LAUNCH).including(None, [generation(12, Launch(OLDER.epoch - 1, 1))])
    core = alone(line=ours)
    effects = told(core, "n1", Beat(), line=theirs)
    both = merged(ours, theirs)
    assert {one.launch for one in both.listed} == {OLDER, Launch(OLDER.epoch - 1, 1)}
    assert core.line == both
    assert only(KeepLine, effects) == [KeepLine(both)]
    assert not only(KeepLine, told(core, "n1", Beat(), line=begun(LAUNCH))), "nothing new"
    assert core.line == both


# --- replication


def test_a_failed_push_is_tried_again_with_growing_pauses():
    core = agent()
    one = held(1)
    assert [effect.node_id for effect in only(StartPush, core.handle(ShardSealed(one), 0.0))] == ["n1"]
    now = 0.0
    for pause in (0.1, 0.2, 0.4, 0.4):
        core.handle(Pushed(one.shard, "n1", PushEnd.FAILED, reason="reset"), now)
        assert not only(StartPush, core.handle(Tick(), now + pause - 0.01))
        now += pause
        assert only(StartPush, core.handle(Tick(), now))
    assert core.backlog()[0][3] == "reset"


def test_a_refusal_for_good_ends_a_push_and_a_newer_launch_ends_them_all():
    core = agent()
    core.handle(ShardSealed(held(1)), 0.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.REFUSED, reason="fenced", launch=Launch(200, 1)), 1.0)
    assert core.backlog() == []
    assert core.is_fenced


def test_a_replica_is_taken_once_acknowledged_and_known_again():
    core, one = agent("n1"), held(1)
    assert core.handle(put(one), 0.0) == [Accept()]
    assert core.handle(Received("n0", LAUNCH, one), 1.0) == [Acknowledge()]
    assert core.handle(put(one), 2.0) == [Decline(PutHave(one.digest))]


def test_a_replica_that_nobody_asked_this_node_to_keep_is_refused():
    core = agent("n1")
    (refusal,) = core.handle(put(held(1, rank=1)), 0.0)
    assert isinstance(refusal.answer, PutRefused)
    assert "not n0's to give away" in refusal.answer.reason
    assert not refusal.answer.retry


# --- commit


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_generation_is_committed_everywhere_when_all_ranks_are_replicated(nodes, replicas):
    world = Nodes(nodes, replicas)
    for step in (1, 2):
        for rank in range(nodes):
            assert all(core.threshold is None or core.threshold.generation.step < step for core in world.cores.values())
            world.seal(step, rank)
    for name, core in world.cores.items():
        assert core.threshold.generation == generation(2)
        assert core.threshold.replicas == replicas
        assert world.steps(name) == [2]
        assert len(core.held) == 1 + replicas
    told_level = {(node, step) for node, step, level in world.notified if level is Level.REPLICATED}
    assert told_level == ({(f"n{i}", step) for i in range(nodes) for step in (1, 2)} if replicas else set())


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5])])
def test_as_many_committed_generations_stay_as_were_asked_for(keep, kept):
    world = Nodes(3, 1, keep=keep)
    for step in range(1, 6):
        for rank in range(3):
            world.seal(step, rank)
    assert all(world.steps(node) == kept for node in world.cores)
    coordinator = world.cores["n0"]
    assert [g.step for g in coordinator.threshold.keeps] == kept[-2::-1]
    # The next one finds a slot beside them, and the one after it does not before a commit.
    assert only(Grant, want(coordinator, 6))
    core = coordinator.handle(ShardSealed(held(6, 0, 3)), 2.0)
    assert not only(Release, core)
    (busy,) = only(RefuseBusy, want(coordinator, 7, number=2))
    assert busy.reason.count("one of those that keep_memory keeps") == keep - 1


def test_what_was_loaded_is_one_of_those_that_stay():
    base = generation(9, Launch(50, 1))
    core = AgentCore("n0", LIMITS)
    core.handle(Started((held(9, 0, 1, Launch(50, 1)), held(8, 0, 1, Launch(50, 1))), (), (), None), 0.0)
    core.handle(Begun(session(nodes=1, replicas=0, keep=2)), 0.0)
    core.handle(LinePut(LAUNCH, from_fence(9, LAUNCH.epoch, LAUNCH.nonce), base), 0.0)
    for step, stay in ((10, [9, 10]), (11, [10, 11])):
        core.handle(ShardSealed(held(step, 0, 1)), 1.0)
        assert sorted(s.generation.step for s in core.held) == stay


def test_who_missed_a_record_learns_from_the_next_that_it_was_there():
    core = agent("n1", keep=2)
    for step in (1, 2, 3):
        core.handle(ShardSealed(held(step, 1)), 1.0)
    record = Record(generation(3), 2, 1, 0.0, (generation(2),))
    effects = told(core, "n0", Announce(record, ()))
    told_of = [(effect.generation.step, effect.level) for effect in only(Notify, effects)]
    assert told_of == [(2, Level.REPLICATED), (3, Level.REPLICATED), (1, Level.NONE)]
    assert [effect.shard.generation.step for effect in only(Release, effects)] == [1]


def test_a_line_takes_what_a_record_kept():
    world = Nodes(1, 0, keep=3)
    for step in (1, 2, 3):
        world.seal(step, 0)
    core = world.cores["n0"]
    newer = Launch(200, 1)
    core.handle(Begun(session(nodes=1, replicas=0, keep=3, launch=newer)), 2.0)
    core.handle(LinePut(newer, from_fence(1, newer.epoch, newer.nonce), generation(1)), 2.0)
    assert world.steps("n0") == [1]


def test_the_record_is_durable_before_anybody_hears_of_it():
    core = agent(nodes=2, replicas=0)
    core.handle(ShardSealed(held(1)), 0.0)
    effects = told(core, "n1", Report(shard(1, rank=1), b"d" * 16, ()))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(KeepRecord) < kinds.index(Send)


def test_a_report_of_too_few_holders_takes_an_earlier_one_back():
    core = agent()
    told(core, "n1", Report(shard(1, rank=1), b"d" * 16, ("n0",)))
    assert list(core.reported(generation(1))) == [1]
    told(core, "n1", Report(shard(1, rank=1), b"d" * 16, ()))
    assert not core.reported(generation(1))


def test_members_report_to_a_restarted_coordinator_again():
    member = agent("n1")
    one = held(1, rank=1)
    member.handle(ShardSealed(one), 0.0)
    acked(member, one, "n0")
    (report,) = [body for node, body in sent(member.handle(Tick(), 2.0), Report) if node == "n0"]
    assert report.holders == ("n0",)
    coordinator = AgentCore("n0", LIMITS)
    coordinator.handle(Started((held(1), one), (FENCE,), (), session()), 2.0)
    acked(coordinator, held(1), "n1", 2.0)
    assert only(KeepRecord, told(coordinator, "n1", report, 3.0))


def test_a_launch_that_stepped_back_keeps_its_records_beside_higher_ones_of_the_launch_before():
    old = tuple(Record(generation(step, Launch(50, 1)), 1, 0, 0.0) for step in (11, 12, 13, 14))
    core = AgentCore("n0", LIMITS)
    core.handle(Started((), (), old, None), 0.0)
    core.handle(Begun(session(nodes=1)), 0.0)
    core.handle(ShardSealed(held(1, world=1)), 1.0)
    assert core.threshold.generation == generation(1)


# --- giving up


def test_a_rank_that_gives_up_voids_the_generation_for_all():
    nodes = Nodes(2, 1)
    nodes.seal(1, 0)
    assert nodes.steps("n1") == [1]
    nodes.feed("n1", GaveUp(generation(1), 1))
    assert nodes.steps("n0") == nodes.steps("n1") == []
    assert {(node, level) for node, _, level in nodes.notified} == {("n0", Level.NONE), ("n1", Level.NONE)}


def test_a_trainer_that_dies_while_it_writes_gives_up():
    core = agent("n1")
    want(core, 1, rank=1)
    assert sent(core.handle(LeaseEnded(1), 1.0)) == [("n0", GiveUp(generation(1)))]


def test_giving_up_is_repeated_until_the_coordinator_knows_or_a_commit_has_overtaken_it():
    for answer in (
        Answer(LAUNCH, None, None, (generation(1),)),
        Answer(LAUNCH, None, Record(generation(2), 2, 1, 0.0), ()),
    ):
        core = agent("n1")
        core.handle(GaveUp(generation(1), 1), 0.0)
        assert ("n0", GiveUp(generation(1))) in sent(core.handle(Tick(), 1.0))
        core.handle(Answered("n0", answer), 1.5)
        assert ("n0", GiveUp(generation(1))) not in sent(core.handle(Tick(), 2.5))


def test_a_rank_that_went_on_without_a_generation_voids_it():
    core = agent()
    core.handle(ShardSealed(held(1)), 0.0)
    told(core, "n1", Report(shard(2, rank=1), b"d" * 16, ()))
    assert generation(1) in core.voids
    assert "rank 1 went on to step 2 without it" in core.voids[generation(1)]
    assert shard(1) not in core.held


def test_own_shards_go_before_replicas():
    core = agent()
    core.handle(Received("n1", LAUNCH, held(1, rank=1)), 0.0)
    core.handle(ShardSealed(held(1)), 0.0)
    effects = told(core, "n1", GiveUp(generation(1)))
    assert [one.shard.rank for one in only(Release, effects)] == [0, 1]
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Release) < kinds.index(Send)


# --- loss and repair


def test_a_lost_replica_is_pushed_again_and_not_reported_meanwhile():
    core, one = agent("n1"), held(1, rank=1)
    core.handle(ShardSealed(one), 0.0)
    acked(core, one, "n0")
    effects = told(core, "n0", Lost(one.shard), 2.0)
    assert only(StartPush, effects) == [StartPush(one, "n0")]
    assert sent(effects, Report) == [("n0", Report(one.shard, one.digest, ()))]


def test_a_holder_tells_the_owner_of_its_loss_until_it_has_a_copy_again():
    core, one = agent("n1"), held(1)
    core.handle(Received("n0", LAUNCH, one), 0.0)
    assert ("n0", Lost(one.shard)) in sent(core.handle(Gone(one.shard), 1.0))
    assert ("n0", Lost(one.shard)) in sent(core.handle(Tick(), 2.0))
    assert core.handle(put(one), 3.0) == [Accept()]
    core.handle(Received("n0", LAUNCH, one), 3.0)
    assert ("n0", Lost(one.shard)) not in sent(core.handle(Tick(), 4.0))


def test_an_owner_fetches_its_bad_copy_back_even_if_it_forgot_who_has_it():
    core, one = AgentCore("n1", LIMITS), held(1, rank=1)
    core.handle(Started((one, held(1)), (FENCE,), (), session()), 0.0)
    effects = core.handle(Rotten(one.shard, "crc"), 1.0)
    assert ("n0", WantBack(one.shard, one.digest)) in sent(effects)
    assert ("n0", Lost(one.shard)) in sent(effects)
    assert not only(Release, effects)  # of others' replicas: the generation may be committed
    assert core.handle(put(one), 2.0) == [Accept()]
    assert only(Acknowledge, core.handle(Received("n0", LAUNCH, one), 2.0))
    assert one.shard in core.held


def test_who_has_nothing_to_give_back_says_so_and_the_coordinator_decides():
    holder, one = agent("n0"), held(1, rank=1)
    assert ("n1", Lost(one.shard)) in sent(told(holder, "n1", WantBack(one.shard, one.digest)))
    owner = agent("n1")
    owner.handle(ShardSealed(one), 0.0)
    owner.handle(Gone(one.shard), 1.0)
    effects = told(owner, "n0", Lost(one.shard), 2.0)
    assert sent(effects) == [("n0", GiveUp(generation(1)))]
    assert generation(1) not in owner.voids
    told(owner, "n0", Announce(None, (generation(1),)), 3.0)
    assert generation(1) in owner.voids


def test_ranks_of_a_node_that_disagree_are_noticed_after_a_restart_too():
    members = (Member("n0", "a:1", "", (0, 1)),)
    two = Session(LAUNCH, 2, members, 0, "ring", 2)
    core = AgentCore("n0", LIMITS)
    effects = core.handle(Started((held(1, tag=5), held(1, rank=1, tag=0)), (FENCE,), (), two), 0.0)
    assert not only(KeepRecord, effects)
    assert {one.shard.rank for one in only(Release, effects)} == {0, 1}


def test_a_shard_that_is_not_spoken_of_any_more_was_lost_while_nobody_looked():
    sealed = {0: 5.0, 1: 5.0}
    reached = {0: Reached(generation(1), 30.0), 1: Reached(generation(2), 15.0)}
    assert abandoned_by(generation(1), sealed, reached, patience=10.0) is None
    reached[1] = Reached(generation(2), 15.1)
    assert abandoned_by(generation(1), sealed, reached, patience=10.0) == 1
    assert abandoned_by(generation(1), {0: 5.0}, {1: Reached(generation(2), 0.0)}, patience=10.0) == 1
