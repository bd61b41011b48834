"""The state that is saved: made, changed between saves, spoilt before loads, and compared after them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bench.spec import StateSpec

StateDict = dict[str, Any]

_SEED = 20


def make_state(spec: StateSpec) -> StateDict:
    """A model's worth of tensors, and the few plain values that always travel with them."""
    generator = torch.Generator().manual_seed(_SEED)
    elements = spec.tensor_bytes // 4
    model = {f"layers.{i}.weight": torch.rand(elements, generator=generator) for i in range(spec.tensors)}
    return {"model": model, "trainer": {"step": 0, "lr": 3e-4, "name": "bench"}}


def make_again(state: StateDict, step: int) -> None:
    """As it was after `change(state, step)`, whatever has happened to it since."""
    generator = torch.Generator().manual_seed(_SEED)
    for tensor in tensors_of(state):
        torch.rand(tensor.shape, generator=generator, out=tensor)
    change(state, step)


def tensors_of(state: StateDict) -> list[torch.Tensor]:
    return list(state["model"].values())


def change(state: StateDict, step: int) -> None:
    """A training step, as far as a checkpoint can tell: every tensor is another one afterwards."""
    for tensor in tensors_of(state):
        tensor[0] = float(step)
    state["trainer"]["step"] = step


def spoil(state: StateDict) -> None:
    """Overwrites everything, so that only what a load brings back can pass the comparison."""
    for tensor in tensors_of(state):
        tensor.fill_(-1.0)
    state["trainer"]["step"] = -1


def digest(state: StateDict) -> str:
    value = 0
    for tensor in tensors_of(state):
        value = zlib.crc32(tensor.numpy().data, value)
    return f"{value:08x}/{state['trainer']['step']}"
