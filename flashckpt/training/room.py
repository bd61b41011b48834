"""Makes the tensors of optimizer state that a load fills, without a step of the user's optimizer."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from flashckpt.training.rng import capture_rng, restore_rng

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flashckpt.types import TensorEntry

log = logging.getLogger(__name__)

# The checkpoint's entries below one parameter, by the rest of the key. None: the value is not a tensor.
Below = dict[str, "TensorEntry | None"]

_LIKE = (torch.Tensor, nn.Parameter, DTensor, ShardedTensor)
_HOOKS = "_hooks"


def make_room(below: Below, reference: torch.Tensor, parameter_dtype: str | None) -> Any:
    """Returns nested state for one parameter, its tensors not filled. None if the names do not show the structure.

    `reference` is the live parameter; for FSDP1, what the model's state dict has for it. `parameter_dtype` is the dtype
    of the saved parameter: a moment of that dtype gets the live parameter's dtype, any other moment keeps its own.
    """
    if type(reference) not in _LIKE:
        return None
    root: dict[str, Any] = {}
    for tail, entry in below.items():
        parts = tail.split(".")
        made = None if entry is None else _tensor(parts[-1], entry, reference, parameter_dtype)
        if entry is not None and made is None:
            return None
        inner = root
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
        inner[parts[-1]] = made
    if any(entry is not None and _has_numbers_as_names(tail, entry) for tail, entry in below.items()):
        return None
    return {key: _lists(value) for key, value in root.items()} if all(map(_is_certain, root.values())) else None


def _tensor(name: str, entry: TensorEntry, reference: torch.Tensor, parameter_dtype: str | None) -> torch.Tensor | None:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    shape, sharded = entry.global_shape, isinstance(reference, (DTensor, ShardedTensor))
    if name == "step" and not shape:
        # On the CPU: Optimizer.load_state_dict moves it to the device if the options need that (fused, capturable).
        return torch.empty((), dtype=dtype)
    if shape == tuple(reference.shape):
        both = dtype.is_floating_point and reference.dtype.is_floating_point
        if both and parameter_dtype in (None, entry.dtype):
            dtype = reference.dtype
        return torch.empty_like(reference, dtype=dtype, requires_grad=False)
    if sharded and shape:
        return None  # the checkpoint does not show whether it was sharded too
    return torch.empty(shape, dtype=dtype, device=reference.device)


def _has_numbers_as_names(tail: str, entry: TensorEntry) -> bool:
    """Returns True if a part that looks like a list index was a mapping's key. Only generations in memory tell."""
    parts = tail.split(".")
    last = entry.path[-len(parts) :]
    if len(entry.path) < len(parts) or [str(part) for part in last] != parts:
        return False
    return any(part.isdigit() and not isinstance(was, int) for part, was in zip(parts, last, strict=True))


def _is_certain(value: Any) -> bool:
    """Returns True for lists and for mappings of plain values. A mapping of tensors may be a flattened tensor."""
    if not isinstance(value, dict):
        return True
    if _is_list(value):
        return all(map(_is_certain, value.values()))
    return all(item is None for item in value.values()) and not any(key.isdigit() for key in value)


def _is_list(value: dict[str, Any]) -> bool:
    # A list of plain values only is saved as one value and has no keys of its own.
    return set(value) == {str(number) for number in range(len(value))} and any(v is not None for v in value.values())


def _lists(value: Any) -> Any:
    if not isinstance(value, dict) or not _is_list(value):
        return value
    return [_lists(value[str(number)]) for number in range(len(value))]


def rehearse(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Returns the state after a first step, by parameter, from a copy of the optimizer over copies of its parameters.

    Used if the names do not show the structure of the state. Meanwhile it needs memory for a copy of the parameters and
    for their gradients. No hook is called, and the random state is restored. Returns {} if the copy can't take a step.
    """
    copies: dict[torch.Tensor, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            copies[parameter] = double = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            double.__dict__.update(getattr(parameter, "__dict__", {}))
            double.grad = torch.zeros_like(double) if parameter.requires_grad else None
    stand_in = _stand_in(optimizer, copies)
    step = type(optimizer).step
    rng = capture_rng()
    with _without_global_hooks(), torch.no_grad():
        try:
            # torch wraps step() to call the hooks; __wrapped__ is the method of the class.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(stand_in)  # type: ignore[attr-defined]
        except Exception as error:
            kind = type(error).__name__
            log.info("%s: a copy of it could not take a step: %s: %s", type(optimizer).__name__, kind, error)
            return {}
        finally:
            restore_rng(rng)
    return {parameter: stand_in.state[double] for parameter, double in copies.items() if double in stand_in.state}


def _stand_in(optimizer: torch.optim.Optimizer, copies: Mapping[torch.Tensor, nn.Parameter]) -> torch.optim.Optimizer:
    memo: dict[int, Any] = {id(parameter): double for parameter, double in copies.items()}
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a scheduler replaced it by one that counts steps
        if name.endswith(_HOOKS):
            vars(made)[name] = OrderedDict()
        elif name not in ("state", "param_groups"):
            try:
                vars(made)[name] = copy.deepcopy(value, memo)
            except Exception:  # a process group, say
                vars(made)[name] = value
    made.state = defaultdict(dict)
    made.param_groups = [
        {
            **copy.deepcopy({key: value for key, value in group.items() if key != "params"}),
            "params": [copies[parameter] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return made


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    module = sys.modules[torch.optim.Optimizer.__module__]
    found: list[dict[int, Any]] = [getattr(module, f"_global_optimizer_{when}{_HOOKS}") for when in ("pre", "post")]
    kept = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, mine in zip(found, kept, strict=True):
            hooks.update(mine)
