"""The core's part in a load: who may read what, and what becomes of a shard that was fetched."""

from __future__ import annotations

import pytest

from flashckpt.protocol.events import (
    Acknowledge,
    Begun,
    DeclineGet,
    Fetched,
    GetAsked,
    LinePut,
    Release,
    Serve,
    Started,
)
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.wire import GetOpen
from flashckpt.types import ChunkRange, Launch
from tests.unit.test_agent_core import LAUNCH, agent, held, only, session, shard

OLD = Launch(90, 3)


def loading(name="n0"):
    """A node of a launch that loads what an earlier one left."""
    core = agent(name)
    core.handle(Started((held(5, 1, launch=OLD),), (), (), None), 0.0)
    core.handle(Begun(session()), 0.0)
    return core


def get(rank=1, step=5, sender="n1", launch=LAUNCH, line=None, digest=None):
    digest = held(step, rank).digest if digest is None else digest
    return GetAsked(GetOpen(sender, launch, line, shard(step, rank, launch=OLD), digest, True, (ChunkRange(0, 1),)))


def refused(core, event):
    effects = core.handle(event, 1.0)
    assert not only(Serve, effects)
    (declined,) = only(DeclineGet, effects)
    return declined.refused


def test_a_member_reads_what_is_held():
    core = loading()
    assert only(Serve, core.handle(get(), 1.0)) == [Serve(held(5, 1, launch=OLD))]


@pytest.mark.parametrize(
    ("changes", "reason", "retry"),
    [
        ({"sender": "n7"}, "no member", False),
        ({"launch": Launch(99, 1)}, "has taken over", False),
        ({"launch": Launch(101, 1)}, "has not begun", True),
        ({"digest": bytes(16)}, "another content", False),
        ({"rank": 0}, "does not hold", False),
        ({"step": 6}, "does not hold", False),
    ],
)
def test_everybody_else_is_told_why_not(changes, reason, retry):
    answer = refused(loading(), get(**changes))
    assert reason in answer.reason
    assert answer.retry is retry


def test_a_line_that_comes_with_a_read_is_adopted_first():
    core = loading()
    answer = refused(core, get(line=from_fence(4, LAUNCH.epoch, LAUNCH.nonce)))
    assert "does not hold" in answer.reason
    assert answer.line == core.line == from_fence(4, 100, 7)


def test_what_was_fetched_is_held_and_stays_until_a_line_kills_it():
    core = loading()
    fetched = held(5, 0, launch=OLD)
    for _ in range(2):
        assert only(Acknowledge, core.handle(Fetched(fetched), 1.0))
    assert core.held[fetched.shard] == fetched
    core.handle(LinePut(LAUNCH, from_fence(5, 100, 7), fetched.shard.generation), 2.0)
    assert fetched.shard in core.held
    late = held(9, 0, launch=OLD)
    effects = core.handle(Fetched(late), 3.0)
    assert not only(Acknowledge, effects)
    assert [one.shard for one in only(Release, effects)] == [late.shard]
