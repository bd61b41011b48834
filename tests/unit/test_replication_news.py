"""How replication goes on, from the agent's core to the training: each change is told once, with its reason."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from flashckpt.agent.watch import Watch
from flashckpt.config import CheckpointConfig
from flashckpt.errors import DeadlineError, IncompatibleError, OtherRankError
from flashckpt.protocol.events import GaveUp, Gone, Pushed, PushEnd, Received, ShardSealed, Tick, Unreachable
from flashckpt.protocol.seeing import lag_of, peers_of, waiting_of
from flashckpt.protocol.verdict import Change, ChangeKind
from flashckpt.protocol.wire import Report
from flashckpt.rpc import convert
from flashckpt.rpc.api import GenerationProgress
from flashckpt.save.agent_slots import AgentSlots
from flashckpt.save.flush_news import FlushNews
from flashckpt.save.handle import SaveHandle
from flashckpt.save.replication_news import ReplicationNews
from flashckpt.save.saver import Saver
from flashckpt.training.metrics import Recorder
from flashckpt.types import Generation, Launch, Level, Outcome, Session
from flashckpt.v1 import agent_pb2
from tests.unit.test_agent_core import LAUNCH, acked, agent, generation, held, shard, told

GENERATION = Generation(1, 2, 3, 4)
AWAY = "n1 does not answer: connection refused"


def change(kind, reason="", step=3):
    return Change(kind, GENERATION._replace(step=step), reason)


# --- what the agent sees


def why(core, now=2.0, since=0.0):
    found = lag_of(core, dict.fromkeys(waiting_of(core), since), peers_of(core, now), now)
    return None if found is None else (found[0].kind.value, found[0].generation.step, found[0].reason)


def test_nothing_waits_before_a_save_and_after_its_commit():
    core = agent("n0")
    assert why(core) is None
    core.handle(ShardSealed(held(1)), 0.0)
    assert why(core) == ("waiting", 1, "rank 1 has not saved it")
    acked(core, held(1))
    told(core, "n1", Report(shard(1, 1), b"d" * 16, ("n0",)))
    assert why(core) is None


def test_a_node_that_does_not_answer_is_named_with_what_went_wrong():
    core = agent("n0")
    core.handle(ShardSealed(held(1)), 0.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.FAILED, reason="connection refused"), 1.0)
    assert why(core) == ("lagging", 1, AWAY)
    core.handle(ShardSealed(held(2)), 1.0)
    assert why(core) == ("lagging", 1, AWAY)  # the oldest
    core.handle(Tick(), 20.0)
    assert why(core, 20.0) == ("lagging", 1, AWAY)  # silent by now


def test_a_node_that_refuses_a_copy_is_named_with_its_reason():
    core = agent("n0")
    core.handle(ShardSealed(held(1)), 0.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.LATER, reason="no room: 3 bytes are free"), 1.0)
    assert why(core) == ("lagging", 1, "n1 does not take the copy of shard 0: no room: 3 bytes are free")


def test_a_rank_that_has_not_saved_is_named_and_is_a_problem_after_five_seconds():
    core = agent("n0")
    core.handle(ShardSealed(held(1)), 0.0)
    acked(core, held(1))
    assert why(core, 2.0) == ("waiting", 1, "rank 1 has not saved it")
    assert why(core, 6.0) == ("lagging", 1, "rank 1 has not saved it")


def test_a_copy_that_takes_its_time_is_no_problem():
    core, other = agent("n0"), agent("n1")
    core.handle(ShardSealed(held(1)), 0.0)
    told(core, "n1", Report(shard(1, 1), b"d" * 16, ("n0",)))
    assert why(core, 6.0) == ("waiting", 1, "copies to n1 are under way")
    acked(core, held(1, rank=0))
    other.handle(ShardSealed(held(1, rank=1)), 0.0)
    acked(other, held(1, rank=1), "n0")
    assert why(other, 6.0) == ("waiting", 1, "this node's copies are made; n0 still waits for those of other nodes")


def test_the_copies_of_another_node_that_take_their_time_are_no_problem():
    core = agent("n0")
    core.handle(ShardSealed(held(1)), 0.0)
    acked(core, held(1))
    told(core, "n1", Report(shard(1, 1), b"d" * 16, ()))
    assert why(core, 6.0) == ("waiting", 1, "shard 1 is still copied to other nodes")


def test_what_is_given_up_does_not_wait():
    core = agent("n0")
    core.handle(ShardSealed(held(1)), 0.0)
    core.handle(GaveUp(generation(1), 1), 1.0)
    assert why(core) is None


def test_trainers_hear_of_each_change_once():
    core, watch = agent("n0"), Watch(SimpleNamespace())
    core.handle(ShardSealed(held(1)), 0.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.FAILED, reason="connection refused"), 0.5)
    assert watch.look(core, 1.0)[1] == []  # it may be replicated before the next look
    (lag,) = watch.look(core, 2.0)[1]
    assert lag == Change(ChangeKind.LAGGING, generation(1), AWAY)
    assert watch.look(core, 3.0)[1] == []
    assert watch.current == [lag]  # for a trainer that comes
    core.handle(Tick(), 3.0)
    core.handle(Pushed(shard(1), "n1", PushEnd.FAILED, reason="no route to host"), 3.1)
    (other,) = watch.look(core, 3.2)[1]  # a better reason, and no news
    assert (other.kind, other.reason) == (ChangeKind.WAITING, "n1 does not answer: no route to host")
    acked(core, held(1), now=4.0)
    told(core, "n1", Report(shard(1, 1), b"d" * 16, ("n0",)), 4.0)
    assert watch.look(core, 4.5)[1] == [Change(ChangeKind.GOING_ON, generation(1), "")]
    assert watch.current == []


def test_trainers_hear_that_shards_are_lost_and_there_again():
    """As agent.log does, in the same words."""
    core, watch = agent("n0"), Watch(SimpleNamespace())
    for rank in (0, 1):
        core.handle(ShardSealed(held(1)) if rank == 0 else Received("n1", LAUNCH, held(1, rank=1)), 0.0)
    acked(core, held(1))
    told(core, "n1", Report(shard(1, 1), held(1, rank=1).digest, ("n0",)))
    assert core.kept == generation(1)
    core.handle(Tick(), 1.5)
    watch.look(core, 1.5)
    core.handle(Unreachable("n1", "connection refused"), 2.0)
    core.handle(Tick(), 20.0)
    lines, (found,) = watch.look(core, 20.0)
    assert (found.kind, found.generation) == (ChangeKind.AT_RISK, generation(1))
    assert "fewer than 2 copies" in found.reason
    assert str(found) in lines
    assert watch.current == [found]
    core.handle(Gone(shard(1, 1)), 21.0)
    core.handle(Tick(), 22.0)
    _, (lost,) = watch.look(core, 22.0)
    assert (lost.kind, "no node that answers has shard 1" in lost.reason) == (ChangeKind.LOST, True)
    assert watch.look(core, 22.5) == ([], [])


# --- on the wire


@pytest.mark.parametrize("kind", ChangeKind)
def test_a_change_arrives_as_it_was_sent(kind):
    data = convert.to_progress(change(kind, "n1 is away")).SerializeToString()
    assert convert.from_progress(agent_pb2.WatchResponse.FromString(data)) == change(kind, "n1 is away")


def test_a_change_that_is_not_known_is_refused():
    message = convert.to_progress(change(ChangeKind.LOST))
    message.change = 99
    with pytest.raises(IncompatibleError, match="change"):
        convert.from_progress(message)


# --- what the trainer makes of it


def test_one_warning_for_each_change(caplog):
    caplog.set_level(logging.WARNING)
    news = ReplicationNews()
    news.changed(change(ChangeKind.WAITING, "copies to n1 are under way"))
    assert (news.problem, news.take()) == ("copies to n1 are under way", [])
    for step in (3, 4):  # an agent that was restarted says it again
        news.changed(change(ChangeKind.LAGGING, AWAY, step))
    assert news.problem == AWAY
    news.changed(change(ChangeKind.GOING_ON))
    news.changed(change(ChangeKind.GOING_ON))
    assert news.problem == ""
    assert [(told.kind, told.step) for told in news.take()] == [("lagging", 3), ("going_on", 3)]
    assert [record.getMessage() for record in caplog.records] == [
        f"step 3: is not replicated yet: {AWAY}; it is tried again",
        "step 3: does not wait for other nodes any more: replication goes on",
    ]


def test_losses_are_told_once_and_again_after_healing(caplog):
    caplog.set_level(logging.WARNING)
    news = ReplicationNews()
    for _ in range(2):
        news.changed(change(ChangeKind.AT_RISK, "shard 1: fewer than 2 copies"))
    news.changed(change(ChangeKind.LOST, "no node that answers has shard 1"))
    news.changed(change(ChangeKind.HEALED, "healed"))
    news.changed(change(ChangeKind.AT_RISK, "shard 1: fewer than 2 copies"))
    assert [told.kind for told in news.take()] == ["at_risk", "lost", "healed", "at_risk"]
    assert len(caplog.records) == 4


def slots():
    """Without an agent: what it tells is put in by hand."""
    return AgentSlots(
        None,
        SimpleNamespace(),
        Session(Launch(GENERATION.epoch, GENERATION.nonce), 1, (), 1, "ring", 2),
        None,
        CheckpointConfig(),
    )


def saved(one, step=3, highest=Level.REPLICATED):
    handle = SaveHandle(step, GENERATION._replace(step=step), highest)
    handle.advance(Level.SEALED)
    one.follow(handle)
    handle.finish(Outcome.OK, "")
    return handle


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_given_up_is_a_failure_that_everybody_hears_of(early, caplog):
    caplog.set_level(logging.WARNING)
    events, one = [], slots()
    recorder = Recorder(events.append)
    recorder.replication_news = one.replication
    void = GenerationProgress(GENERATION, Level.NONE, "rank 1 gave it up")
    if early:
        one._take_news(void)
    handle = saved(one)
    one._take_news(void)
    one._take_news(void)  # an agent that was restarted says it again
    assert handle.wait("replicated", timeout=1) is Outcome.FAILED
    assert handle.reason == "rank 1 gave it up"
    metrics = recorder.metrics(0.0)
    assert metrics.replications == {"done": 0, "failed": 1}
    assert [(e.kind, e.step, e.reason) for e in events] == [("failed", 3, "not replicated: rank 1 gave it up")]
    assert ["will never be replicated: rank 1 gave it up" in record.getMessage() for record in caplog.records] == [True]


def test_it_is_heard_of_also_where_nobody_keeps_the_handle():
    one = slots()
    saved(one)
    one._take_news(GenerationProgress(GENERATION, Level.NONE, "rank 1 gave it up"))
    assert one.replication.take_failure().step == 3
    assert one.replication.take_failure() is None


def test_what_this_rank_did_not_save_and_what_was_rolled_back_is_no_failure():
    one = slots()
    one._take_news(GenerationProgress(GENERATION, Level.NONE, "rank 0 gave it up"))
    saved(one, 4)
    one.enter(Launch(9, 9))
    one._take_news(GenerationProgress(GENERATION._replace(step=4), Level.NONE, "a newer launch"))
    assert one.replication.take() == []


def test_replicated_steps_are_counted():
    recorder, one = Recorder(None), slots()
    recorder.replication_news = one.replication
    handle = saved(one)
    recorder.saved(handle, 0.0)
    one._take_news(GenerationProgress(GENERATION, Level.REPLICATED))
    assert recorder.metrics(0.0).replications == {"done": 1, "failed": 0}


def test_a_wait_that_ends_at_its_deadline_says_why():
    one = slots()
    handle = saved(one)
    one._take_news(change(ChangeKind.LAGGING, AWAY))
    with pytest.raises(DeadlineError, match=f"found sealed: {AWAY}") as caught:
        handle.wait("replicated", timeout=0.01)
    assert caught.value.problem == AWAY
    one._take_news(change(ChangeKind.GOING_ON))
    with pytest.raises(DeadlineError) as caught:
        handle.wait("replicated", timeout=0.01)
    assert caught.value.problem == ""


def test_a_wait_for_the_disk_says_why_memory_is_not_reached():
    handle = SaveHandle(3, GENERATION, Level.REPLICATED, persists=True)
    handle.replication_problem = lambda: AWAY
    handle.advance(Level.SEALED)
    handle.finish(Outcome.OK, "")
    with pytest.raises(DeadlineError, match=AWAY):
        handle.wait("persisted", timeout=0.01)


@pytest.mark.parametrize("on_save_error", ["raise", "log"])
def test_it_is_raised_where_that_is_asked_for(on_save_error):
    news = ReplicationNews()
    news.given_up(3, "rank 1 gave it up")
    saver = SimpleNamespace(
        _config=CheckpointConfig(on_save_error=on_save_error),
        _slots=SimpleNamespace(replication=news, flushes=FlushNews()),
    )
    if on_save_error == "raise":
        with pytest.raises(OtherRankError, match=r"step 3 .* never be replicated: rank 1 gave it up"):
            Saver.raise_late_failure(saver, None)
    Saver.raise_late_failure(saver, None)
