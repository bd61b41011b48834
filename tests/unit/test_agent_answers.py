"""What a node takes from others, what it refuses for good or for now, and what its trainers hear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashckpt.protocol.events import (
    Accept,
    Acknowledge,
    Decline,
    KeepRecord,
    Notify,
    Pushed,
    PushEnd,
    Received,
    Release,
    ShardSealed,
    StartPush,
)
from flashckpt.protocol.wire import Announce, GiveUp, PutRefused, Report
from flashckpt.types import Launch, Level, Record
from tests.unit.test_agent_core import LAUNCH, agent, generation, held, only, put, shard, told

# --- replicas that come in


def test_a_holder_takes_one_generation_more_than_a_rank_has_slots():
    """Between a commit on the coordinator and here, the rank writes into the slot that the commit has freed there."""
    core = agent("n1", slots=2)
    for step in (1, 2, 3):
        assert core.handle(put(held(step)), float(step)) == [Accept()]
        assert only(Acknowledge, core.handle(Received("n0", LAUNCH, held(step)), float(step)))
    (refusal,) = core.handle(put(held(4)), 4.0)
    assert isinstance(refusal, Decline)
    assert refusal.answer.reason == "n1 holds 3 generations of rank 0 that are not committed"
    assert refusal.answer.retry, "a commit makes room"
    # What lies here already does not count against itself.
    assert core.handle(put(held(3)), 5.0) != [refusal]


def test_another_content_under_the_same_name_is_refused_for_good():
    """The pusher must not come again: no time makes the two alike."""
    core, one = agent("n1"), held(1)
    core.handle(Received("n0", LAUNCH, one), 0.0)
    (refusal,) = core.handle(put(replace(one, digest=b"x" * 16)), 1.0)
    assert isinstance(refusal.answer, PutRefused)
    assert refusal.answer.reason == "another content lies here under that name"
    assert not refusal.answer.retry


# --- reports


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(shard(1, rank=1, launch=Launch(50, 1)), id="another launch, the same world"),
        pytest.param(shard(1, rank=1, world=3), id="another world"),
    ],
)
def test_a_report_of_another_launch_or_world_is_not_counted(foreign):
    core = agent("n0")
    told(core, "n1", Report(foreign, b"d" * 16, ("n0",)))
    assert core.reported(foreign.generation) == {}
    assert core.committing.counted.reached == {}


# --- what trainers hear


@pytest.mark.parametrize(
    ("node", "sender", "body"),
    [("n0", "n1", GiveUp(generation(1))), ("n1", "n0", Announce(None, (generation(1),)))],
    ids=["coordinator", "member"],
)
def test_trainers_hear_of_a_generation_given_up_of_which_nothing_lies_here(node, sender, body):
    """A rank may wait for it while its own shard is still being written."""
    core = agent(node)
    effects = told(core, sender, body)
    assert [(one.generation, one.level) for one in only(Notify, effects)] == [(generation(1), Level.NONE)]
    # Once.
    assert not only(Notify, told(core, sender, body, 2.0))


def test_nobody_hears_that_a_committed_generation_is_given_up_when_a_newer_one_takes_its_place():
    core = agent("n0", nodes=1, replicas=0)
    assert only(KeepRecord, core.handle(ShardSealed(held(1, world=1)), 1.0))
    effects = core.handle(ShardSealed(held(2, world=1)), 2.0)
    assert [one.shard.generation for one in only(Release, effects)] == [generation(1)]
    assert not only(Notify, effects)


def test_trainers_hear_of_an_older_generation_that_was_never_committed():
    core = agent("n1")
    core.handle(ShardSealed(held(1, rank=1)), 0.0)
    core.handle(ShardSealed(held(2, rank=1)), 0.0)
    effects = told(core, "n0", Announce(Record(generation(2), 2, 1, 0.0), ()))
    levels = [(one.generation.step, one.level) for one in only(Notify, effects)]
    assert levels == [(2, Level.REPLICATED), (1, Level.NONE)]


# --- who owes an answer


def test_whoever_is_pushed_a_shard_owes_an_answer_from_then_on():
    core, one = agent("n1", nodes=3), held(1, rank=1, world=3)
    (push,) = only(StartPush, core.handle(ShardSealed(one), 5.0))
    peer = core.peers[push.node_id]
    assert peer.asked_at == 5.0
    core.handle(Pushed(one.shard, push.node_id, PushEnd.FAILED, reason="reset"), 6.0)
    assert peer.is_unreachable
    core.handle(Pushed(one.shard, push.node_id, PushEnd.ACKED, digest=one.digest), 7.0)
    assert not peer.is_unreachable
