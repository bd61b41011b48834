"""Overlapped saves: what reaches the shard, who waits for whom, and what happens when the copy fails or lags."""

from __future__ import annotations

import threading

import pytest
import torch

from flashckpt import CheckpointConfig, Checkpointer, Level, failpoints
from flashckpt.checkpointer import internals_of
from flashckpt.devices import Copier
from flashckpt.errors import DeadlineError, UnsupportedValueError
from flashckpt.save import deferred as deferred_module
from flashckpt.save import marks
from flashckpt.save.deferred import RECHECKED_SAVES
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
        if not internals_of(checkpointer).closed:
            internals_of(checkpointer).settle()
            assert internals_of(checkpointer).store.check() == []
        checkpointer.close()


def arm(monkeypatch, text):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(text))


def test_the_gate_does_not_wait_once_the_copy_is_made(make):
    checkpointer = make()
    handle = checkpointer.save(1, {"w": torch.ones(10)}, overlap=True)
    handle.wait("sealed", timeout=60)
    assert wait_until_staged(handle, 60) == 0.0


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
    checkpointer = make(verify=True)
    freed = torch.ones(100)
    state = {"w": freed}
    for step in range(RECHECKED_SAVES):
        assert checkpointer.save(step, state, overlap=True).wait("sealed", timeout=60) == "ok"
    freed.untyped_storage().resize_(0)
    handle = checkpointer.save(2, state, overlap=True)
    with pytest.raises(UnsupportedValueError, match="without storage"):
        checkpointer.save(3, state, overlap=True)
    assert handle.outcome == "failed"


def test_a_tensor_without_bytes_found_by_the_recheck_is_raised_at_once(make):
    checkpointer = make()
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="without storage"):
        checkpointer.save(1, {"w": freed}, overlap=True)
    assert checkpointer.save(2, {"w": torch.ones(1)}, overlap=True).wait("sealed", timeout=60) == "ok"


# --- tensors that change while their copy is deferred ------------------------------------------------------


def test_whoever_waited_may_change_tensors_and_stays_overlapped(make, monkeypatch, caplog):
    checkpointer = make()
    weight = torch.ones(1000)
    for step in range(3):
        handle = checkpointer.save(step, {"w": weight}, overlap=True)
        handle.wait("staged", timeout=60)
        weight.add_(1)
        wait_until_staged(handle, 60)
        assert handle.wait("sealed", timeout=60) == "ok"
    assert not [record for record in caplog.records if "copies it" in record.message]


def test_an_interrupt_before_the_copy_gives_the_save_up(make):
    checkpointer = make()

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(1, {"w": torch.ones(10)}, overlap=True, on_begin=interrupt)
    assert checkpointer.save(2, {"w": torch.ones(10)}, overlap=True).wait("sealed", timeout=60) == "ok"


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


@pytest.mark.parametrize("size", [1000, 3 << 20], ids=["cloned", "copied into the slot"])
def test_immediate_tensors_that_another_thread_changes_once_are_copied_again(make, monkeypatch, size):
    """Half of them is copied before the change, half of them after it."""
    checkpointer = make()
    state = {f"w{n}": torch.zeros(size) for n in range(4)}
    changes = []

    def change(*_):
        if not changes:
            changes.append(True)
            for tensor in state.values():
                tensor.fill_(1)

    copied = deferred_module._clone_small
    if size == 1000:
        monkeypatch.setattr(deferred_module, "_clone_small", lambda *given: (copied(*given), change())[0])
    else:
        copy = Copier.copy
        monkeypatch.setattr(Copier, "copy", lambda self, *given: (copy(self, *given), change())[0])
    handle = checkpointer.save(1, state, overlap=True, defers=lambda *_: False)
    assert handle.wait("sealed", timeout=60) == "ok"
    assert changes
    found = {key: torch.full_like(tensor, 7) for key, tensor in state.items()}
    checkpointer.load(found)
    assert all(bool((tensor == 1).all()) for tensor in found.values())


@pytest.mark.parametrize("size", [1000, 3 << 20], ids=["cloned", "copied into the slot"])
def test_immediate_tensors_that_change_all_the_time_are_refused(make, monkeypatch, size):
    checkpointer = make()
    state = {f"w{n}": torch.zeros(size) for n in range(2)}
    changed = marks.ImmediateMarks.changed

    def and_change(self, indices):
        state["w1"].add_(1)
        return changed(self, indices)

    with monkeypatch.context() as patch:
        patch.setattr(marks.ImmediateMarks, "changed", and_change)
        handle = checkpointer.save(1, state, overlap=True, defers=lambda *_: False)
        assert handle.wait("sealed", timeout=60) == "failed"
    assert "w1 changed while save() copied it" in handle.reason
    assert "w0" not in handle.reason
    assert checkpointer.save(2, state, overlap=True, defers=lambda *_: False).wait("sealed", timeout=60) == "ok"


def test_a_load_into_frozen_tensors_is_no_change_behind_the_back(make):
    checkpointer = make()
    frozen = {"w": torch.zeros(1 << 20)}
    options = {"overlap": True, "defers": lambda *_: None}
    for step in range(1, 6):
        assert checkpointer.save(step, frozen, **options).wait("sealed", timeout=60) == "ok"
    other = {"w": torch.ones(1 << 20)}
    assert checkpointer.save(6, other).outcome == "ok"
    assert checkpointer.load(frozen).step == 6
    for step in range(7, 10):
        assert checkpointer.save(step, frozen, **options).wait("sealed", timeout=60) == "ok"
