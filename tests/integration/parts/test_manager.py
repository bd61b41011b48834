"""A manager while a copy takes its time: who waits for it, and what the figures say."""

from __future__ import annotations

import time

import pytest
import torch

import flashckpt
from flashckpt import Level, failpoints
from tests.unit.test_manager import job, same, weights

__all__ = ["job"]  # the fixture


@pytest.mark.alone
def test_the_step_waits_while_its_state_is_copied_and_the_snapshot_is_of_the_step(job, monkeypatch):
    one = job(enable_first_step_checkpoint=False)
    events = []
    with one.manager(on_event=events.append) as manager:
        for _ in range(3):
            one.step()
        wanted = weights(one.model)
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=sleep(0.5)*1"))
        handle = manager.save(3)
        assert handle.level is Level.NONE
        one.step()  # changes running means in the forward pass, parameters in the step
        assert not same(weights(one.model), wanted)
        held = [event for event in events if event.kind == "held"]
        assert [event.step for event in held] == [3]
        assert held[0].seconds > 0
        assert handle.blocked_seconds >= held[0].seconds
        assert manager.metrics().blocked_seconds >= held[0].seconds
        one.step()
        assert len([event for event in events if event.kind == "held"]) == 1
    other = job(seed=5)
    with other.manager() as manager:
        assert manager.load(3).step == 3
        assert same(weights(other.model), wanted)


def test_without_an_optimizer_nothing_is_copied_behind_the_callers_back(job, monkeypatch):
    one = job()
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=sleep(0.2)"))
    with one.manager(optimizer=None, lr_scheduler=None) as manager:
        assert manager.save(3).level is Level.SEALED


@pytest.mark.parametrize(("mode", "level"), [("disabled", Level.SEALED), ("async", Level.NONE), ("ASYNC", Level.NONE)])
def test_modes_of_the_ancestors(job, monkeypatch, mode, level):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=sleep(0.3)"))
    one = job(async_mode=mode)
    with one.manager() as manager:
        one.step()
        assert manager.save(3).level is level


def test_lock(job, monkeypatch):
    one = job()
    with one.manager() as manager:
        one.step()
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse("mid_copy=sleep(0.3)*1"))
        wanted = weights(one.model)
        handle = manager.save(3)
        with manager.lock():
            assert handle.outcome == "ok"
            with torch.no_grad():
                one.model[0].weight.zero_()  # outside of optimizer.step()
            with pytest.raises(flashckpt.ConflictError, match="within lock"):
                manager.save(6)
        assert manager.load(3).step == 3
        assert same(weights(one.model), wanted)


def test_waiting_under_its_other_name(job, monkeypatch):
    one = job()
    with one.manager() as manager:
        assert manager.flush_pending_save() is None  # nothing saved yet
        one.step()
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=sleep(0.3)*1"))
        handle = manager.save(3)
        assert manager.is_pending
        assert manager.flush_pending_save() == "ok"
        assert handle.level is Level.SEALED
        assert not manager.is_pending
        # And by its own name, also where the copy is made but not sealed yet.
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_seal=sleep(0.3)*1"))
        handle = manager.save(6)
        assert manager.wait() == "ok"
        assert handle.level is Level.SEALED


def test_figures_of_saves_and_the_age_of_the_newest_at_each_level(job):
    one = job(interval=1)
    with one.manager() as manager:
        assert manager.metrics().age_seconds == {}
        for step in (1, 2):
            one.step()
            manager.save(step).wait("sealed", timeout=60)
        first = manager.metrics()
        assert first.newest_step == {"staged": 2, "sealed": 2}
        assert first.saves == {"ok": 2, "skipped": 0, "failed": 0}
        assert first.blocked_seconds > 0 < first.last_blocked_seconds
        handle = manager.save(3)
        manager.wait("sealed")
        assert first.saved_bytes == 2 * handle.size_bytes > 0
        time.sleep(0.05)
        later = manager.metrics()
        assert later.newest_step["sealed"] == 3
        assert later.age_seconds["staged"] >= later.age_seconds["sealed"] >= 0.05
