"""A launch's epoch: above all that were seen, and never far ahead because of one wrong clock or one wrong word."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import ConfigError
from flashckpt.protocol import events as messages
from flashckpt.protocol.epochs import heard, named, why_refused
from flashckpt.protocol.events import (
    Answered,
    Begun,
    GetAsked,
    LinePut,
    Pushed,
    PushEnd,
    PutAsked,
    Received,
    Tick,
    Told,
)
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.wire import Answer, Beat, Envelope, GetOpen, PutOpen
from flashckpt.start.launch import LAST_EPOCH, LATEST_CLOCK_MS, MAX_CLOCK_DIFFERENCE_MS, agree_epoch
from flashckpt.types import Generation, Held, Launch, Session, ShardId

NOW = 1_800_000_000_000
YEAR = 366 * 86_400_000
HOUR = 3_600_000

clocks = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(NOW - 11 * HOUR, NOW + 11 * HOUR), min_size=1, max_size=6
)


@given(st.integers(0, LAST_EPOCH - 1), clocks)
def test_it_is_above_all_that_was_seen_and_at_a_clock_else(highest, found):
    epoch = agree_epoch(highest, found)
    assert epoch > highest
    assert epoch == highest + 1 or epoch in found.values()
    assert epoch >= min(found.values())


@given(clocks, st.integers(MAX_CLOCK_DIFFERENCE_MS, 500 * YEAR), st.booleans())
def test_a_wrong_clock_is_named_and_leaves_no_epoch(found, by, ahead):
    wrong = NOW + 12 * HOUR + by if ahead else max(0, NOW - 12 * HOUR - by)
    with pytest.raises(ConfigError, match="'wrong'") as refused:
        agree_epoch(0, {**found, "wrong": wrong})
    assert "wrong" in refused.value.nodes
    if len(found) > 1:
        assert refused.value.nodes == ("wrong",)
    assert "set the clock" in refused.value.hint


def test_a_node_alone_174_years_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"before 2100-01-01 .* found 2201-.* on node 'a'"):
        agree_epoch(0, {"a": NOW + 174 * YEAR})


def test_a_clock_that_is_behind_everywhere_is_taken():
    assert agree_epoch(0, {"a": 5, "b": 7}) == 5
    assert agree_epoch(NOW, {"a": 5}) == NOW + 1


def test_an_epoch_that_a_wrong_clock_has_left_goes_on():
    poisoned = NOW + 174 * YEAR
    assert agree_epoch(poisoned, {"a": NOW, "b": NOW}) == poisoned + 1
    assert poisoned > LATEST_CLOCK_MS


def test_the_last_epoch():
    assert agree_epoch(LAST_EPOCH - 1, {"a": NOW}) == LAST_EPOCH
    with pytest.raises(ConfigError, match="no later launch could be above it"):
        agree_epoch(LAST_EPOCH, {"a": NOW})


# --- what an agent accepts

EPOCH, FENCED = 11, 12
OURS, LINE = Launch(EPOCH, 1), from_fence(3, FENCED, 1)
SHARD = ShardId(Generation(EPOCH, 1, 3, 1), 0, 1)
EVENTS = [
    (Begun(Session(OURS, 1, (), 0, "ring", 2)), {EPOCH}),
    (LinePut(OURS, LINE, None), {EPOCH, FENCED}),
    (Told(Envelope("a", OURS, LINE, Beat())), {EPOCH, FENCED}),
    (Answered("a", Answer(OURS, LINE, None, (), "")), {EPOCH, FENCED}),
    (Answered("a", Answer(None, LINE, None, (), "")), {FENCED}),
    (PutAsked(PutOpen("a", OURS, LINE, SHARD, 0, bytes(16), 1, 1)), {EPOCH, FENCED}),
    (GetAsked(GetOpen("a", OURS, LINE, SHARD, bytes(16), True, ())), {EPOCH, FENCED}),
    (Pushed(SHARD, "a", PushEnd.REFUSED, launch=OURS, line=LINE), {EPOCH, FENCED}),
    (Pushed(SHARD, "a", PushEnd.ACKED, digest=bytes(16)), set()),
    (Received("a", OURS, Held(SHARD, bytes(16), 1, 0)), {EPOCH}),
    (Tick(), set()),
]


def test_each_way_in_is_looked_at():
    for event, epochs in EVENTS:
        assert {epoch for _, epoch in heard(event)} == epochs, event
    bring = re.compile(r"\b(Launch|Line|Session|Envelope|Answer|PutOpen|GetOpen)\b")
    kinds = [kind for kind in get_args(messages.Event) if any(bring.search(one.type) for one in fields(kind))]
    # What an agent finds in its own directory is what it knows.
    assert set(kinds) - {messages.Started} <= {type(event) for event, epochs in EVENTS if epochs}


@given(st.integers(0, LAST_EPOCH - 1), clocks)
def test_an_agent_accepts_every_epoch_that_a_launch_agrees_on(highest, found):
    """Where it knows the launch before, and its own clock is anywhere in this century."""
    launch = Launch(agree_epoch(highest, found), 1)
    for now in (NOW, NOW - 57 * YEAR, NOW + 57 * YEAR):
        assert not why_refused(named(launch, None), highest, now / 1000)


@given(st.integers(0, (1 << 63) - 1), st.integers(0, LAST_EPOCH))
def test_an_agent_accepts_no_epoch_far_above_its_clock_and_what_it_knows(epoch, known):
    reason = why_refused(named(None, from_fence(0, epoch, 1)), known, NOW / 1000)
    if epoch <= max(NOW, known):
        assert not reason
    if epoch > max(NOW + 101 * YEAR, known + 25 * HOUR):
        assert reason.startswith("epoch of a line: expected at most")
        assert reason.endswith(f"found {epoch}")
