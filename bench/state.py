"""The state that is saved: made, changed between saves, spoilt before loads, and compared after them."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bench.spec import StateSpec

StateDict = dict[str, Any]

_SEED = 20
_PARTS = 4  # of a digest, which are computed side by side


def make_state(spec: StateSpec) -> StateDict:
    """A model's worth of tensors, and the few plain values that always travel with them."""
    pattern = _pattern(spec.tensor_bytes // 4)
    model = {f"layers.{i}.weight": pattern + i for i in range(spec.tensors)}
    return {"model": model, "trainer": {"step": 0, "lr": 3e-4, "name": "bench"}}


def make_again(state: StateDict, step: int) -> None:
    """As it was after `change(state, step)`, whatever has happened to it since."""
    tensors = tensors_of(state)
    pattern = _pattern(len(tensors[0]))
    for number, tensor in enumerate(tensors):
        torch.add(pattern, number, out=tensor)
    change(state, step)


def _pattern(elements: int) -> torch.Tensor:
    """Random once: to draw a GiB takes longer than to save it."""
    return torch.rand(elements, generator=torch.Generator().manual_seed(_SEED))


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
    tensors = tensors_of(state)
    each = -(-len(tensors) // _PARTS)
    with ThreadPoolExecutor(_PARTS) as pool:  # zlib lets go of the interpreter's lock
        parts = pool.map(_crc, [tensors[start : start + each] for start in range(0, len(tensors), each)])
    value = zlib.crc32(b"".join(part.to_bytes(4, "big") for part in parts))
    return f"{value:08x}/{state['trainer']['step']}"


def _crc(tensors: list[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.numpy().data, value)
    return value
