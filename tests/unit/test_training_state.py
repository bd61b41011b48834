"""Model, optimizer and random state: what is captured, and that fresh objects get all of it back."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from flashckpt import ConfigError, StructureError
from flashckpt.format.values import decode_values, encode_values
from flashckpt.load.recover import Found
from flashckpt.state.flatten import OneValue, flatten
from flashckpt.training.assemble import TrainingState
from flashckpt.training.model import ModelState
from flashckpt.training.optimizer import OptimizerState, own
from flashckpt.training.rng import capture_rng, restore_rng
from flashckpt.types import Box, TensorEntry


def step(model, optimizer, batch=None):
    model(torch.randn(4, 4) if batch is None else batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- optimizer --------------------------------------------------------------------------------------------


def test_capturing_a_fresh_optimizer_does_not_make_it_take_a_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    captured = OptimizerState(own([model], optimizer)).capture()
    assert "state" not in captured
    assert decode_values(encode_values({"x": captured["param_groups"]["weight"].value}))["x"]["lr"] == 1e-3
    assert not stepped
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def found(captured):
    """What a load finds where `captured` was saved."""
    flat = flatten({"optimizer": captured})

    def entry(key):
        tensor = flat.tensors.get(key)
        if tensor is None:
            return None
        shape = tuple(tensor.shape)
        box = Box((0,) * len(shape), shape)
        return TensorEntry(key, flat.path(key), str(tensor.dtype).removeprefix("torch."), shape, box, 0, 0)

    keys = frozenset((*flat.tensors, *flat.values))
    return Found(1, 1, None, keys, entry, lambda key: (key in flat.values, flat.values.get(key)))


def stepped(model, optimizer, part=None):
    (part or model)(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    captured = OptimizerState(own([model], optimizer)).capture()
    optimizer.zero_grad()
    return captured


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_fresh_optimizer_makes_room_for_its_moments(with_gradients):
    other = nn.Linear(4, 4)
    saved = found(stepped(other, torch.optim.AdamW(other.parameters())))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    if with_gradients:
        model(torch.randn(2, 4)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = model.weight.clone()
    state = OptimizerState(own([model], optimizer))
    assert not state.lay_out(saved)
    assert set(state.state_dict()["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(model.weight, before)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert not optimizer.state  # nothing is loaded yet: it is as fresh as before
    state.end_load()
    assert "state" not in state.state_dict()


def test_parameters_without_state_have_none_afterwards():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    saved = stepped(model, torch.optim.AdamW(model.parameters()), model["used"])
    assert set(saved["state"]) == {"used.weight", "used.bias"}

    for fresh in (True, False):
        other = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        optimizer = torch.optim.AdamW(other.parameters())
        if not fresh:
            stepped(other, optimizer, nn.Sequential(other["used"], other["unused"]))
        state = OptimizerState(own([other], optimizer))
        state.lay_out(found(saved))
        template = state.state_dict()
        assert set(template["state"]) == {"used.weight", "used.bias"}
        state.load_state_dict(template)
        assert set(optimizer.state) == {other["used"].weight, other["used"].bias}


def test_groups_that_were_split_otherwise_are_refused():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": [model.weight, model.bias]}], lr=0.1)
    state = OptimizerState(own([model], optimizer))
    template = state.state_dict()
    template["param_groups"]["bias"] = OneValue({**template["param_groups"]["bias"].value, "weight_decay": 0.5})
    with pytest.raises(StructureError, match=r"'weight' and 'bias' are in one group now.*weight_decay 0 and 0\.5"):
        state.load_state_dict(template)


def test_what_an_optimizer_owns_changes_only_in_its_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.1), foreach=False)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    training = TrainingState(model=model, optimizer=optimizer, states={"ema": {"w": model[0].weight.detach().clone()}})
    defers = training.changes_only_in_step()
    tensors = flatten(training.capture()).tensors
    owned = {key for key, tensor in tensors.items() if defers(key, tensor)}
    assert owned == {
        *(f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
        *(key for key in tensors if key.startswith("optimizer.state.")),
    }
    assert {key for key, tensor in tensors.items() if defers(key, tensor) is None} == {"model.2.weight", "model.2.bias"}
    assert "optimizer.param_group_tensors.0.weight.lr" in tensors


def test_optimizers_that_do_not_fit_the_model():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="2 of 2 parameters of SGD are not the model's"):
        own([model], torch.optim.SGD(other.parameters()))
    with pytest.raises(ConfigError, match="has parameters of 2 parts"):
        own([model, other], torch.optim.SGD([*model.parameters(), *other.parameters()]))
    with pytest.raises(ConfigError, match="two optimizers have the same parameter"):
        own([model], [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())])
    with pytest.raises(ConfigError, match="expected a torch optimizer"):
        own([model], object())
    two = own([model], [torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias])])
    assert [owned.part for owned in two] == [model, model]


# --- model ------------------------------------------------------------------------------------------------


def test_parts_with_the_same_names_are_refused():
    with pytest.raises(StructureError, match="key 'weight': two parts of the model have it"):
        ModelState([nn.Linear(2, 2), nn.Linear(2, 2)]).capture()


def test_tied_weights_stay_one_tensor():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    state = ModelState([model])
    captured = state.state_dict()
    assert captured["embed.weight"].data_ptr() == captured["head.weight"].data_ptr()
    state.load_state_dict(captured)
    assert model["head"].weight is model["embed"].weight


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile])
def test_a_capture_is_what_torchs_helpers_tell_the_second_time_too(wrap):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())[:1], "lr": 0.5}, {"params": list(model.parameters())[1:]}]
    )
    state = TrainingState(model=model, optimizer=optimizer, rng=False)
    for _ in range(3):
        captured = state.capture()
        helped = get_model_state_dict(model)
        assert captured["model"].keys() == helped.keys()
        assert all(captured["model"][name].data_ptr() == value.data_ptr() for name, value in helped.items())
        if optimizer.state:
            moments = get_optimizer_state_dict(model, optimizer)
            assert captured["optimizer"]["state"] == moments["state"]
            options = {
                n: decode_values(encode_values({"x": one.value}))["x"]
                for n, one in captured["optimizer"]["param_groups"].items()
            }
            assert options == {
                name: {k: v for k, v in g.items() if k != "params"}
                for g in moments["param_groups"]
                for name in g["params"]
            }
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="1 of 5 parameters of AdamW are not the model's"):
        state.capture()


# --- random numbers ---------------------------------------------------------------------------------------


def draw():
    return random.random(), float(np.random.rand()), torch.rand(3).tolist(), np.random.randn(), random.gauss(0, 1)


def test_every_generator_goes_on_where_it_was():
    np.random.randn()  # leaves a second number waiting
    state = capture_rng()
    wanted = draw()
    draw()
    restore_rng(state)
    assert draw() == wanted
    assert {"python", "torch", "numpy"} <= set(state)


def test_python_numbers_as_an_earlier_version_saved_them():
    state = capture_rng() | {"python": random.getstate()}
    wanted = random.random()
    restore_rng(state)
    assert random.random() == wanted


# --- the whole --------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, value=0):
        self.value = torch.tensor([value])

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_parts_and_what_is_per_rank():
    model = nn.Linear(2, 2)
    state = TrainingState(model=model, dataloader=Counter(), states={"counter": Counter(5), "plain": {"a": 1}})
    assert state.parts == ("model", "dataloader", "rng", "counter", "plain")
    flat = flatten(state.capture())
    assert flat.per_rank == {"dataloader", "rng"}
    assert flat.values["plain.a"] == 1


def test_bad_parts():
    model = nn.Linear(2, 2)
    for states, message in (
        ({"model": {}}, "is the name of a separate argument"),
        ({"a.b": {}}, "names without dots"),
        ({"x": 5}, "expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainingState(model=model, states=states)
    with pytest.raises(ConfigError, match="expected a torch module"):
        TrainingState(model={"weight": 1})
    with pytest.raises(ConfigError, match="at least one module"):
        TrainingState(model=[])
    with pytest.raises(ConfigError, match="expected a model as well"):
        TrainingState(model=None, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="lr_scheduler: expected state_dict"):
        TrainingState(model=model, lr_scheduler=object())


def test_a_loader_without_state_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        state = TrainingState(model=None, dataloader=[1, 2, 3])
    assert "dataloader" not in state.parts
    assert "its position is not saved" in caplog.text


def test_whole_is_one_leaf_whatever_it_holds():
    flat = flatten({"a": OneValue({"x": {"y": 1}, "t": torch.ones(1)}), "b": [OneValue({"z": 1})]})
    assert set(flat.values) == {"a", "b.0"}
    assert not flat.tensors
