"""Least time between saves: rank 0's clock decides, and ranks a step apart never disagree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from flashckpt import CheckpointConfig, ConfigError
from flashckpt.training.cooldown import Cooldown
from flashckpt.training.policy import decide


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_alone():
    clock = Clock()
    cooldown = Cooldown(30.0, "", 0, 1, clock=clock)
    assert cooldown.permits(1)
    cooldown.note(1, saved=True)
    for step in (2, 3):
        clock.now += 14
        assert not cooldown.permits(step)
        cooldown.note(step, saved=False)
    clock.now += 14
    cooldown.note(4, saved=False)  # 42 s: from the next step on
    assert not cooldown.permits(4)
    assert cooldown.permits(5)
    assert cooldown.permits(9)


def test_none_is_asked_for():
    cooldown = Cooldown(0.0, "", 0, 8)
    for step in range(5):
        assert cooldown.permits(step)
        cooldown.note(step, saved=True)


@given(
    order=st.lists(st.booleans(), min_size=20, max_size=400),
    waits=st.lists(st.floats(0, 40), min_size=1, max_size=50),
    interval=st.integers(1, 4),
    skew=st.floats(-1e6, 1e6),
)
def test_ranks_that_are_a_step_apart_save_the_same_steps(order, waits, interval, skew):
    """Two ranks that wait for each other at each step, in any order, with clocks that have nothing to do with each
    other."""
    store, clock, other = HashStore(), Clock(), Clock()
    other.now += skew
    ranks = [Cooldown(30.0, "", rank, 2, clock=one, store=store) for rank, one in ((0, clock), (1, other))]
    done, saved = [0, 0], [[], []]
    for number, first in enumerate(order):
        # A rank may begin a step only when the other has finished the one before.
        rank = 0 if first else 1
        if done[rank] > done[1 - rank]:
            rank = 1 - rank
        clock.now += waits[number % len(waits)]
        other.now -= waits[number % len(waits)]
        done[rank] += 1
        step = done[rank]
        saves = step % interval == 0 and ranks[rank].permits(step)
        ranks[rank].note(step, saves)
        if saves:
            saved[rank].append(step)
    common = min(done)
    assert [s for s in saved[0] if s <= common] == [s for s in saved[1] if s <= common]


def test_what_is_forced_does_not_wait():
    config = CheckpointConfig(save_cooldown=30.0, fixed_steps=(7,), persist_dir="/p", persist_interval=10)
    assert decide(3, config).save
    cold = decide(3, config, cooled=False)
    assert not cold.save
    assert cold.reason == "a multiple of interval 1, but the last save is less than 30 s ago"
    assert not decide(3, config, cooled=False, policy=lambda _: True).save
    for step, how in (
        (3, {"force": True}),
        (3, {"last_step": True}),
        (3, {"persist": True}),
        (7, {}),
        (10, {}),
        (1, {}),
    ):
        assert decide(step, config, cooled=False, **how).save


@pytest.mark.parametrize("bad", [-1, float("inf"), float("nan"), "30"])
def test_bad_seconds(bad):
    with pytest.raises(ConfigError, match="save_cooldown"):
        CheckpointConfig(save_cooldown=bad)
