"""Overlapped saves: what reaches the shard, who waits for whom, and what happens when the copy fails or lags."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from flashckpt import CheckpointConfig, Checkpointer, Level, failpoints
from flashckpt.errors import ConflictError, DeadlineError, UnsupportedValueError
from flashckpt.save.handle import SaveHandle
from flashckpt.save.overlap import Overlap, wait_until_staged
from flashckpt.types import Generation

GENERATION = Generation(epoch=1, nonce=2, step=3, seq=4)


@pytest.fixture
def make(memory_dir):
    opened = []

    def make(**settings):
        checkpointer = Checkpointer(CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, **settings}))
        opened.append(checkpointer)
        return checkpointer

    yield make
    for checkpointer in opened:
        if not checkpointer._closed:
            checkpointer.settle()
            assert checkpointer.store.check() == []
        checkpointer.close()


def arm(monkeypatch, text):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(text))


def test_save_returns_before_the_copy_and_the_gate_waits_for_it(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.5)")
    checkpointer = make()
    weight = torch.arange(100_000.0)
    wanted = weight.clone()
    handle = checkpointer.save(1, {"w": weight, "n": 7}, overlap=True)
    assert handle.level is Level.NONE
    assert handle.outcome is None
    assert wait_until_staged(handle, 60) > 0
    weight.zero_()
    assert handle.wait("sealed", timeout=60) == "ok"
    assert handle.blocked_seconds > 0.1
    assert handle.timings.copy >= 0.5
    state = {"w": torch.zeros_like(weight), "n": 0}
    assert checkpointer.load(state).step == 1
    assert torch.equal(state["w"], wanted)
    assert state["n"] == 7


def test_values_are_those_of_the_call(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.3)")
    checkpointer = make()
    values = {"list": [1, 2], "n": 1}
    handle = checkpointer.save(1, {"values": values}, extra={"k": values["list"]}, overlap=True)
    values["list"].append(3)
    values["n"] = 2
    handle.wait("sealed", timeout=60)
    state = {"values": {"list": [], "n": 0}}
    result = checkpointer.load(state)
    assert state["values"] == {"list": [1, 2], "n": 1}
    assert result.extra == {"k": [1, 2]}


def test_the_gate_does_not_wait_once_the_copy_is_made(make):
    checkpointer = make()
    handle = checkpointer.save(1, {"w": torch.ones(10)}, overlap=True)
    handle.wait("sealed", timeout=60)
    assert wait_until_staged(handle, 60) == 0.0


def test_the_next_call_waits_for_the_copy(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.3)")
    checkpointer = make()
    state = {"w": torch.ones(1000)}
    first = checkpointer.save(1, state, overlap=True)
    second = checkpointer.save(2, state, overlap=True)
    assert first.outcome == "ok"
    assert checkpointer.load({"w": torch.zeros(1000)}).step == 2
    assert second.outcome == "ok"
    third = checkpointer.save(3, state, overlap=True)
    checkpointer.close()
    assert third.outcome == "ok"


def test_a_copy_that_lags_is_thrown_away_and_the_one_before_stays(make, monkeypatch):
    checkpointer = make(save_timeout=60)
    weight = torch.ones(1000)
    checkpointer.save(1, {"w": weight})
    arm(monkeypatch, "mid_copy=sleep(0.6)")
    handle = checkpointer.save(2, {"w": weight}, overlap=True)
    assert wait_until_staged(handle, 0.05) > 0
    weight.mul_(5)  # training goes on
    checkpointer.settle()
    assert handle.outcome == "skipped"
    assert "training went on" in handle.reason
    state = {"w": torch.zeros(1000)}
    assert checkpointer.load(state).step == 1
    assert torch.equal(state["w"], torch.ones(1000))


def test_a_failed_copy_is_an_outcome_and_holds_nobody(make, monkeypatch):
    arm(monkeypatch, "before_copy=error(ENOSPC)*1")
    checkpointer = make()
    handle = checkpointer.save(1, {"w": torch.ones(10)}, overlap=True)
    wait_until_staged(handle, 60)
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "No space left" in handle.reason
    with pytest.raises(OSError, match="No space left"):
        handle.staging_completion.result()
    assert checkpointer.save(2, {"w": torch.ones(10)}, overlap=True).wait("sealed", timeout=60) == "ok"
    assert checkpointer.status().saves["failed"] == 1


def test_raise_where_asked_comes_with_the_next_call(make, monkeypatch):
    arm(monkeypatch, "before_copy=error(ENOSPC)*1")
    checkpointer = make(on_save_error="raise")
    checkpointer.save(1, {"w": torch.ones(10)}, overlap=True)
    with pytest.raises(OSError, match="No space left"):
        checkpointer.save(2, {"w": torch.ones(10)}, overlap=True)
    assert checkpointer.save(3, {"w": torch.ones(10)}).outcome == "ok"


def test_what_the_state_dict_is_to_blame_for_is_raised_at_once(make):
    checkpointer = make()
    with pytest.raises(UnsupportedValueError, match="object"):
        checkpointer.save(1, {"w": object()}, overlap=True)
    assert checkpointer.save(2, {"w": torch.ones(1)}, overlap=True).wait("sealed", timeout=60) == "ok"


def test_a_tensor_without_bytes_found_by_the_thread_is_raised_by_the_next_call(make):
    checkpointer = make()
    freed = torch.ones(100)
    state = {"w": freed}
    checkpointer.save(1, state)
    freed.untyped_storage().resize_(0)
    handle = checkpointer.save(2, state, overlap=True)
    with pytest.raises(UnsupportedValueError, match="without storage"):
        checkpointer.save(3, state, overlap=True)
    assert handle.outcome == "failed"


def test_two_threads_still_must_not_call_at_once(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(1.0)")
    checkpointer = make()
    thread = threading.Thread(target=checkpointer.save, args=(1, {"w": torch.ones(10)}))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while checkpointer._turns._current is None and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(ConflictError):
            checkpointer.save(2, {"w": torch.ones(10)}, overlap=True)
    finally:
        thread.join()


def test_a_copy_that_never_ends_does_not_hang_who_waits():
    overlap, released = Overlap(), threading.Event()
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    overlap.start(handle, lambda: released.wait(60) and None)
    assert overlap.handle is handle
    with pytest.raises(DeadlineError, match="did not end within"):
        overlap.settle(0.05)
    assert not handle.stage()  # nothing of it will be sealed
    overlap.close()
    released.set()


def test_giving_up_comes_too_late_once_staged():
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    assert handle.stage()
    assert not handle.give_up()
    assert handle.staging_completion.done()
