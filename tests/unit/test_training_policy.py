"""When a manager saves, and why."""

from __future__ import annotations

import pytest

from flashckpt import CheckpointConfig, ConfigError
from flashckpt.training.policy import decide, power2_window


def config(**settings):
    return CheckpointConfig(job="job", **{"interval": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "step", "asked", "saves", "persists", "reason"),
    [
        ({}, 10, {}, True, False, "a multiple of interval 10"),
        ({}, 11, {}, False, False, "not a multiple of interval 10"),
        ({}, 0, {}, False, False, "not a multiple of interval 10"),
        ({}, 0, {"force": True}, True, False, "forced"),
        ({}, 11, {"force": True}, True, False, "forced"),
        ({}, 11, {"last_step": True}, True, False, "the last step"),
        ({"persist_dir": "/d"}, 11, {"last_step": True}, True, True, "the last step"),
        ({"persist_dir": "/d"}, 11, {"last_step": True, "persist": False}, True, False, "the last step"),
        ({"persist_dir": "/d"}, 11, {"persist": True}, True, True, "asked to persist"),
        ({}, 1, {}, True, False, "the first step: shows that saving works"),
        ({"enable_first_step_checkpoint": False}, 1, {}, False, False, "not a multiple of interval 10"),
        ({"persist_dir": "/d"}, 1, {}, True, False, "the first step: shows that saving works"),
        ({"persist_dir": "/d", "persist_interval": 25}, 25, {}, True, True, "a multiple of persist_interval 25"),
        ({"persist_dir": "/d", "persist_interval": 25}, 50, {"persist": False}, True, False, None),
        ({"fixed_steps": (7,)}, 7, {}, True, False, "one of fixed_steps"),
        ({"fixed_steps": (7,), "persist_dir": "/d"}, 7, {}, True, True, "one of fixed_steps"),
        ({"load_only": True}, 10, {"force": True}, False, False, "load_only is set"),
    ],
)
def test_decision(settings, step, asked, saves, persists, reason):
    decision = decide(step, config(**settings), **asked)
    assert (decision.save, decision.persist) == (saves, persists)
    assert reason is None or decision.reason == reason


def test_a_policy_replaces_the_interval_and_nothing_else():
    settings = config(persist_dir="/d", persist_interval=100)
    odd = lambda step: step % 2 == 1  # noqa: E731
    assert decide(3, settings, policy=odd).reason == "save_policy says so"
    assert not decide(10, settings, policy=odd).save
    assert decide(10, settings, policy=odd, force=True).save
    assert decide(100, settings, policy=odd).persist


@pytest.mark.parametrize("step", [-1, 1.0, "5", None, True])
def test_what_is_no_step(step):
    with pytest.raises(ConfigError, match="step: expected an integer"):
        decide(step, config())


def test_the_window_doubles_its_distance():
    policy = power2_window(100, 140)
    assert [step for step in range(200) if policy(step)] == [100, 101, 102, 104, 108, 116, 132]
    with pytest.raises(ValueError, match="start < stop"):
        power2_window(5, 5)
