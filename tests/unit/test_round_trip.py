"""The dry check of the first save: a state that could not be loaded into itself is refused, and its key is named."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
import pytest
import torch

import flashckpt
from flashckpt import CheckpointConfig, Checkpointer, CheckpointManager, PerRank, StructureError, Whole
from flashckpt.errors import UnsupportedValueError
from flashckpt.save.round_trip import check_structure, check_values, outline
from flashckpt.save.values import pack
from flashckpt.state.flatten import flatten


class Own:
    """Gives what `make(number of the call)` returns."""

    def __init__(self, make):
        self.make = make
        self.calls = 0

    def state_dict(self):
        self.calls += 1
        return self.make(self.calls)

    def load_state_dict(self, state):
        self.loaded = state


CHANGING = {
    "more keys": (lambda n: {f"k{i}": i for i in range(n)}, "1 more"),
    "other keys": (lambda n: {f"k{n}": 0}, "1 fewer"),
    "a list of tensors": (lambda n: {"l": [torch.zeros(2)] * n}, "1 more"),
    "another shape": (lambda n: {"t": torch.zeros(n)}, r"float32 \[2\] instead of float32 \[1\]"),
    "another dtype": (lambda n: {"t": torch.zeros(1, dtype=[torch.int8, torch.int32][n % 2])}, "int8"),
    "a tensor, then a value": (lambda n: {"t": torch.zeros(1) if n % 2 else 1}, "a value instead of float32"),
    "PerRank once": (lambda n: {"t": PerRank(torch.zeros(1)) if n % 2 else torch.zeros(1)}, "of each rank"),
}


@pytest.fixture
def config(memory_dir):
    return CheckpointConfig(job="job", memory_dir=memory_dir)


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("way", ["checkpointer", "manager", "nested"])
def test_a_state_that_changes_by_being_asked_is_refused_at_the_first_save(config, kind, way):
    make, said = CHANGING[kind]
    own = Own(make)
    if way == "manager":
        saver = CheckpointManager(config, model=torch.nn.Linear(2, 2), states={"own": own})
        save = lambda: saver.save(1)  # noqa: E731
    else:
        saver = Checkpointer(config)
        state = {"own": own} if way == "checkpointer" else {"app": Own(lambda n: {"own": own})}
        save = lambda: saver.save(1, state)  # noqa: E731
    try:
        with pytest.raises(StructureError, match=said) as caught:
            save()
        assert own.calls == 2
        assert "Whole" in caught.value.hint
        assert "own" in caught.value.key
        with pytest.raises(StructureError):  # it is not accepted when it is tried again
            save()
    finally:
        saver.close()


def test_an_object_is_asked_once_more_and_only_at_the_first_save(config):
    own, whole = Own(lambda n: {"t": torch.zeros(2), "n": n}), Own(lambda n: {f"k{n}": torch.zeros(n)})
    with Checkpointer(config) as saver:
        for step in (1, 2, 3):
            assert saver.save(step, {"own": own, "whole": Whole(whole)}).outcome == "ok"
        assert (own.calls, whole.calls) == (4, 3)
        live = Own(lambda n: {"t": torch.ones(2), "n": 0})
        assert saver.load({"own": live, "whole": Whole(Own(lambda n: {}))}).step == 3
    assert live.loaded["n"] == 4


def test_what_is_stored_is_what_the_last_call_gave(config):
    tensor = torch.zeros(2)
    own = Own(lambda n: {"n": n, "t": tensor.fill_(n)})
    with Checkpointer(config) as saver:
        saver.save(1, {"own": own})
        live = {"own.n": 0, "own.t": torch.zeros(2)}
        saver.load(live)
    assert live["own.n"] == 2
    assert live["own.t"].tolist() == [2, 2]


def test_an_error_of_the_objects_own_is_raised_as_it_is(config):
    with Checkpointer(config) as saver, pytest.raises(ZeroDivisionError):
        saver.save(1, {"own": Own(lambda n: {"x": 1 // 0})})


ODD = {
    "a byte that is no bool": np.array([2], dtype=np.uint8).view(bool),
    "our own mark": Whole([{"\x1ftensors": (torch.float32, (0,), b"")}, torch.ones(1)]),
    "our own mark with nonsense": Whole([{"\x1ftensors": 5}, torch.ones(1)]),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_value_that_does_not_come_back_is_named(config, kind):
    with Checkpointer(config) as saver, pytest.raises(UnsupportedValueError, match=r"'a\.odd'") as caught:
        saver.save(1, {"good": 1, "a": {"odd": ODD[kind]}})
    assert caught.value.key == "a.odd"


def test_an_extra_that_does_not_come_back_is_refused(config):
    with Checkpointer(config) as saver, pytest.raises(UnsupportedValueError, match="'extra'"):
        saver.save(1, {"good": 1}, extra={"mask": ODD["a byte that is no bool"]})


def test_much_is_not_decoded_again():
    """Its time would be noticed."""
    values = {"mask": ODD["a byte that is no bool"], "much": bytes(2 << 20)}
    check_values(values, len(pack(flatten(values), None, False)), allow_torch_save=False)
    values.pop("much")
    with pytest.raises(UnsupportedValueError, match="'mask'"):
        check_values(values, len(pack(flatten(values), None, False)), allow_torch_save=False)


def test_values_that_come_back_are_accepted():
    values = {
        "nan": float("nan"),
        "keys": {1: "a", None: 2, (1, "b"): [], 1.5: {}, True and "t": OrderedDict(x={3})},
        "tensors": ([1, torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], (torch.zeros(0),)),
        "numpy": [np.float32(1), np.zeros((2, 0), dtype=">i4"), np.bool_(True)],
        "others": [slice(1), range(3), torch.Size([2]), torch.float16, torch.device("cpu"), frozenset({1}), 1j],
        "whole": Whole([torch.ones(3), {"a": (torch.ones(1),)}]),
    }
    flat = flatten(values)
    check_values(flat.values, len(pack(flat, None, False)), allow_torch_save=False)


class Odd(torch.nn.Linear):
    """Its extra state grows by being asked."""

    seen = 0

    def get_extra_state(self):
        self.seen += 1
        return {f"k{i}": torch.zeros(1) for i in range(self.seen)}

    def set_extra_state(self, state):
        pass


def test_a_model_whose_state_grows_by_being_asked_is_refused(config):
    manager = CheckpointManager(config, model=Odd(2, 2))
    with pytest.raises(StructureError, match="_extra_state") as caught:
        manager.save(1)
    manager.close()
    assert "get_extra_state" in caught.value.hint


def lbfgs():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.LBFGS(model.parameters(), max_iter=3)


def descend(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def grow_list(state):
    state["replay"].append(torch.ones(2))


def descend_alone(optimizer):
    parameters = optimizer.param_groups[0]["params"]

    def closure():
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss

    optimizer.step(closure)


GROWN = {
    "a list of tensors": (lambda: {"replay": []}, grow_list, "replay"),
    "a tensor": (lambda: {"t": torch.zeros(0)}, lambda state: state.update(t=torch.ones(2)), "'entry.t'"),
    "LBFGS": (lambda: lbfgs()[1], descend_alone, "'entry.state"),
}


@pytest.mark.parametrize("kind", GROWN)
@pytest.mark.parametrize("loads", [True, False])
def test_what_grew_before_the_first_save_is_named_at_it(config, kind, loads, caplog):
    """An error after a load(), which showed what a new process has; else a warning: nobody knows what it will have."""
    make, grow, key = GROWN[kind]
    state = make()
    manager = CheckpointManager(config, model=torch.nn.Linear(2, 2), states={"entry": state})
    try:
        if loads:
            manager.load()
        grow(state)
        if loads:
            with pytest.raises(UnsupportedValueError, match=key):
                manager.save(1)
        else:
            assert manager.save(1).outcome == "ok"
            assert manager.save(2).outcome == "ok"
            (said,) = [one.message for one in caplog.records if "when the manager was made" in one.message]
            assert key in said
            assert "Whole" in said
    finally:
        manager.close()


def test_a_new_manager_asks_no_object_of_the_users(config):
    own = Own(lambda n: {"t": torch.zeros(1)})
    with CheckpointManager(config, model=torch.nn.Linear(2, 2), states={"a": own, "b": {"c": own}}):
        assert own.calls == 0


def test_one_save_of_an_lbfgs_that_never_loaded_can_be_loaded(config):
    """A manager lays out what the checkpoint has of an optimizer: it may have more state than a new one."""

    def make():
        model, optimizer = lbfgs()
        return model, optimizer, CheckpointManager(config, model=model, optimizer=optimizer)

    *first, manager = make()
    with manager:
        descend(*first)
        assert manager.save(1).outcome in (None, "ok")
    *second, manager = make()
    with manager:
        assert manager.load().step == 1
        assert [descend(*first) for _ in range(3)] == [descend(*second) for _ in range(3)]


def test_it_takes_milliseconds():
    tensors = {f"layers.{i}.weight": torch.zeros(1) for i in range(1000)}
    options = flashckpt.format.values.encode_once({"lr": 0.1, "betas": (0.9, 0.999), "foreach": None})
    state = {"model": Own(lambda n: tensors), "groups": dict.fromkeys(tensors, options)}
    best = float("inf")
    flat = flatten(state)
    packed = len(pack(flat, None, False))
    for _ in range(5):
        began = time.process_time()
        check_structure(outline(state), flat)
        check_values(flat.values, packed, allow_torch_save=False)
        best = min(best, time.process_time() - began)
    assert best < 0.05  # 3 ms on an idle core
