"""Overlapped saves whose copy takes its time: what reaches the shard, who waits, and what is refused."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from flashckpt import Level
from flashckpt.checkpointer import internals_of
from flashckpt.errors import ConflictError
from flashckpt.save import deferred as deferred_module
from flashckpt.save.overlap import wait_until_staged
from tests.unit.test_overlap import arm, make

__all__ = ["make"]  # the fixture


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
    internals_of(checkpointer).settle()
    assert handle.outcome == "skipped"
    assert "training went on" in handle.reason
    state = {"w": torch.zeros(1000)}
    assert checkpointer.load(state).step == 1
    assert torch.equal(state["w"], torch.ones(1000))


def test_a_change_that_the_version_counter_shows_is_refused_and_then_right(make, monkeypatch, caplog):
    arm(monkeypatch, "before_copy=sleep(0.2)")
    checkpointer = make()
    steady, weight = torch.ones(1000), torch.ones(1000)
    state = {"steady": steady, "w": weight}
    handle = checkpointer.save(1, state, overlap=True)
    weight.mul_(2)
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "step 1: w changed between save() and the end of the copy" in handle.reason
    assert checkpointer.load({"steady": torch.zeros(1000), "w": torch.zeros(1000)}) is None
    handle = checkpointer.save(2, state, overlap=True)
    weight.mul_(2)  # it was copied before save() returned
    assert handle.wait("sealed", timeout=60) == "ok"
    found = {"steady": torch.zeros(1000), "w": torch.zeros(1000)}
    assert checkpointer.load(found).step == 2
    assert torch.equal(found["w"], torch.full((1000,), 2.0))
    assert [record for record in caplog.records if "from now on save() copies it" in record.message]


@pytest.mark.parametrize("strided", [False, True])
def test_a_change_that_no_version_counter_shows_is_found_in_the_first_saves(make, monkeypatch, strided):
    arm(monkeypatch, "before_copy=sleep(0.2)")
    checkpointer = make(verify=True)
    weight = torch.arange(1000.0).reshape(10, 100)
    weight = weight.T if strided else weight
    handle = checkpointer.save(1, {"w": weight}, overlap=True)
    weight.data.clamp_(0, 5)
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "w changed" in handle.reason
    assert not handle.has_reached(Level.SEALED)


def test_recheck_finds_it_in_every_save(make, monkeypatch):
    checkpointer = make(verify="recheck")
    weight = torch.arange(1000.0)
    for step in range(5):
        assert checkpointer.save(step, {"w": weight}, overlap=True).wait("sealed", timeout=60) == "ok"
    arm(monkeypatch, "before_copy=sleep(0.2)")
    handle = checkpointer.save(6, {"w": weight}, overlap=True)
    weight.numpy()[:] = 3
    assert handle.wait("sealed", timeout=60) == "failed"


def test_a_change_by_another_thread_during_a_synchronous_save_is_refused(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.3)")
    checkpointer = make()
    weight = torch.ones(1000)
    changer = threading.Timer(0.1, lambda: weight.add_(1))
    changer.start()
    handle = checkpointer.save(1, {"w": weight})
    changer.join()
    assert handle.outcome == "failed"
    assert "changed while save() copied it" in handle.reason
    assert checkpointer.save(2, {"w": weight}).outcome == "ok"


def test_immediate_tensors_are_copied_before_save_returns(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.2)")
    checkpointer = make()
    small, large, deferred = torch.ones(10), torch.ones(3 << 20), torch.ones(3 << 20)
    state = {"small": small, "large": large, "deferred": deferred}
    handle = checkpointer.save(1, state, overlap=True, defers=lambda key, _: key == "deferred")
    assert handle.level is Level.NONE
    small.zero_()
    large.zero_()
    assert handle.wait("sealed", timeout=60) == "ok"
    found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    checkpointer.load(found)
    assert all(bool((tensor == 1).all()) for tensor in found.values())


def test_large_tensors_that_did_not_change_are_deferred_though_nobody_vouches_for_them(make, monkeypatch):
    checkpointer = make()
    frozen = torch.ones(3 << 20)
    began = []
    options = {"overlap": True, "defers": lambda *_: None, "on_begin": began.append}
    checkpointer.save(1, {"frozen": frozen}, **options).wait("sealed", timeout=60)
    arm(monkeypatch, "before_copy=sleep(0.3)")
    handle = checkpointer.save(2, {"frozen": frozen}, **options)
    assert handle.blocked_seconds < 0.2
    assert began[-1] is handle
    frozen.add_(1)  # thawed after all: found
    assert handle.wait("sealed", timeout=60) == "failed"
    assert checkpointer.save(3, {"frozen": frozen}, **options).wait("sealed", timeout=60) == "ok"


def test_an_inference_tensor_has_no_version_counter_and_is_copied_at_once(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(0.2)")
    checkpointer = make()
    with torch.inference_mode():
        tensor = torch.ones(100)
    handle = checkpointer.save(1, {"w": tensor}, overlap=True)
    with torch.inference_mode():
        tensor.zero_()
    assert handle.wait("sealed", timeout=60) == "ok"
    found = {"w": torch.zeros(100)}
    checkpointer.load(found)
    assert torch.equal(found["w"], torch.ones(100))


def test_two_threads_still_must_not_call_at_once(make, monkeypatch):
    arm(monkeypatch, "before_copy=sleep(1.0)")
    checkpointer = make()
    thread = threading.Thread(target=checkpointer.save, args=(1, {"w": torch.ones(10)}))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while internals_of(checkpointer).turns._current is None and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(ConflictError):
            checkpointer.save(2, {"w": torch.ones(10)}, overlap=True)
    finally:
        thread.join()


@pytest.mark.parametrize("copied_first", [False, True])
def test_a_swap_of_all_tensors_that_comes_late_shows_in_a_sample(make, monkeypatch, copied_first):
    """Long after the first saves, and where no version counter shows it; also where the sample was copied before."""
    checkpointer = make(verify=True)
    state = {f"w{n}": torch.full((50_000,), float(n)) for n in range(100)}
    for step in range(5):
        handle = checkpointer.save(step, state, overlap=True)
        assert handle.wait("sealed", timeout=60) == "ok"
    arm(monkeypatch, f"{'mid' if copied_first else 'before'}_copy=sleep(0.4)")
    for step in range(5, 9):
        wanted = {key: tensor.clone() for key, tensor in state.items()}
        handle = checkpointer.save(step, state, overlap=True)
        for tensor in state.values():
            tensor.data.add_(1)
        if handle.wait("sealed", timeout=60) == "ok":
            found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
            checkpointer.load(found, read_only=True)
            assert all(torch.equal(found[key], wanted[key]) for key in state)
    assert handle.outcome == "ok"


@pytest.mark.parametrize("when", ["after_claim", "before_copy"])
def test_a_deferred_tensor_whose_memory_is_freed_is_refused_by_name(make, monkeypatch, when):
    checkpointer = make()
    state = {"freed": torch.ones(1000), "kept": torch.ones(1000)}
    for step in range(3):
        assert checkpointer.save(step, state, overlap=True).wait("sealed", timeout=60) == "ok"
    arm(monkeypatch, f"{when}=sleep(0.2)")
    handle = checkpointer.save(5, state, overlap=True)
    state["freed"].untyped_storage().resize_(0)
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "freed changed" in handle.reason
    assert "kept" not in handle.reason


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_that_are_deferred_for_the_first_time_are_checksummed_whenever_that_is(make, monkeypatch, strided):
    """They are few among many that have long been proved, and no sample happens to meet them."""
    monkeypatch.setattr(deferred_module, "SAMPLED", 0)
    checkpointer = make(verify=True)
    state = {f"w{n}": torch.full((5000,), float(n)) for n in range(100)}
    for step in range(5):
        assert checkpointer.save(step, state, overlap=True).wait("sealed", timeout=60) == "ok"
    late = torch.arange(9.0).reshape(3, 3)
    state["w50x"] = late.T if strided else late
    arm(monkeypatch, "before_copy=sleep(0.1)")
    handle = checkpointer.save(6, state, overlap=True)
    late.data.copy_(late.flip(0))  # the same numbers at other places
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "w50x changed" in handle.reason


def test_frozen_tensors_are_proved_by_the_chunks_of_earlier_shards(make, monkeypatch):
    """Adapters merged through .data long after the first saves, and out again before anybody looks."""
    monkeypatch.setattr(deferred_module, "SAMPLED", 0)
    checkpointer = make(verify=True)
    frozen = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(3)}
    options = {"overlap": True, "defers": lambda *_: None}
    for step in range(5):
        assert checkpointer.save(step, frozen, **options).wait("sealed", timeout=60) == "ok"
    arm(monkeypatch, "before_copy=sleep(0.2)")
    handle = checkpointer.save(5, frozen, **options)
    assert handle.proof_seconds < 0.1
    frozen["w1"].data.add_(1)
    handle.wait("staged", timeout=60)
    frozen["w1"].data.sub_(1)
    assert handle.wait("sealed", timeout=60) == "failed"
    assert "w1 changed" in handle.reason
    assert "w2" not in handle.reason
    assert checkpointer.save(6, frozen, **options).wait("sealed", timeout=60) == "ok"
