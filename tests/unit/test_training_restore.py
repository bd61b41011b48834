"""Which parts of a checkpoint a load takes, with the reason; and random generators without an accelerator."""

from __future__ import annotations

import pytest
import torch

from flashckpt.errors import MissingKeyError
from flashckpt.training.restore import LoadWish, choose_parts
from flashckpt.training.rng import capture_rng, restore_rng


def wish(*parts, kept=(), strict=True):
    return LoadWish(parts, kept, strict, None, "raise")


def test_when_all_parts_were_saved_there_is_no_reason_to_give():
    """A reason is logged as a warning."""
    assert choose_parts(wish("model", "optimizer", "rng"), {"model", "optimizer", "rng", "x"}, 5) == (
        ("model", "optimizer", "rng"),
        "",
    )


@pytest.mark.parametrize(
    ("asked", "saved", "found", "reason"),
    [
        pytest.param(
            wish("model", "rng", "dataloader"), {"model"}, ("model",), "not saved: rng, dataloader", id="may be missing"
        ),
        pytest.param(
            wish("model", "optimizer", strict=False), {"model"}, ("model",), "not saved: optimizer", id="not strict"
        ),
        pytest.param(wish("model", kept=("ema", "x")), {"model", "ema"}, ("model", "ema"), "", id="without an owner"),
    ],
)
def test_what_was_not_saved_is_named(asked, saved, found, reason):
    assert choose_parts(asked, saved, 5) == (found, reason)


@pytest.mark.parametrize(
    ("asked", "saved", "missing"),
    [
        (wish("model", "optimizer"), {"model"}, "expected optimizer, found a checkpoint of model"),
        (wish("model", strict=False), {"optimizer"}, "expected model, found a checkpoint of optimizer"),
    ],
)
def test_what_must_not_be_missing_is_refused_by_name(asked, saved, missing):
    with pytest.raises(MissingKeyError, match=missing):
        choose_parts(asked, saved, 5)


def test_of_a_seed_checkpoint_only_the_model_is_taken():
    parts, reason = choose_parts(wish("model", "optimizer"), {"model", "optimizer"}, 0)
    assert (parts, reason) == (("model",), "step 0 is a seed checkpoint: only the model")


@pytest.mark.parametrize(("available", "initialized"), [(True, False), (False, True), (False, False)])
def test_generators_of_an_accelerator_that_is_not_in_use_are_left_alone(monkeypatch, caplog, available, initialized):
    """To read them would create a context on every device: hundreds of megabytes, for nothing."""

    def refuse(*_):
        raise AssertionError("touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", refuse)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refuse)
    state = capture_rng()
    assert "cuda" not in state
    restore_rng(state)
    assert caplog.records == []


def test_generators_of_an_accelerator_in_use_are_saved_and_set(monkeypatch, caplog):
    states, set_to = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8)], {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda one, device: set_to.update({device: one.tolist()}))
    state = capture_rng()
    assert state["cuda"] == [b"\1\2", b"\3\4"]
    restore_rng(state)
    assert set_to == {0: [1, 2], 1: [3, 4]}
    assert caplog.records == []
    # In a process with another number of them: those that are there, with a warning.
    states.pop()
    set_to.clear()
    restore_rng(state)
    assert set_to == {0: [1, 2]}
    assert "random state: expected that of this process's 1 CUDA devices, found that of 2" in caplog.text
