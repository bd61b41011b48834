"""Finds the torch optimizers in the argument `optimizer=`: in wrappers, containers, lists and dicts of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A torch optimizer and what it was wrapped in."""

    optimizer: torch.optim.Optimizer  # holds the state; its step() changes the parameters
    outer: Any  # the wrapper, or the optimizer itself; its state_dict() and load_state_dict() are called
    sharded: bool = False  # the optimizer has only this rank's parameters of `outer` (ZeRO)


def unwrap(given: Any) -> list[Unwrapped]:
    """Returns every optimizer in `given`, in its order. Raises ConfigError for any other object."""
    found = list(_unwrap_all(given))
    if not found:
        raise ConfigError(
            f"optimizer: expected at least one optimizer, found none in a {type(given).__name__}",
            hint="leave optimizer= out to save no optimizer",
        )
    return found


def _unwrap_all(given: Any) -> Iterator[Unwrapped]:
    if isinstance(given, (list, tuple, Mapping)):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _unwrap_all(one)
        return
    yield from _unwrap_one(given)


def _unwrap_one(one: Any) -> Iterator[Unwrapped]:
    if _is_zero(one):
        yield _unwrap_zero(one)
        return
    held = {name: value for name, value in _attributes(one).items() if value is not one}
    inner = {name: value for name, value in held.items() if isinstance(value, torch.optim.Optimizer)}
    many = {name: value for name, value in held.items() if _is_collection(value)}
    if len(inner) + len(many) > 1:
        names = ", ".join(map(repr, (*inner, *many)))
        raise ConfigError(
            f"optimizer: expected a torch optimizer, found a {_name(one)} that holds {len(inner) + len(many)} "
            f"optimizers or collections of them ({names}), and nothing tells which to save",
            hint="pass those that change the model's parameters as a list",
        )
    for name, value in many.items():
        yield from _unwrap_container(one, name, value)
    for name, value in inner.items():
        yield _unwrap_wrapper(one, name, value)
    if not inner and not many:
        if not isinstance(one, torch.optim.Optimizer) or not hasattr(one, "param_groups"):
            raise ConfigError(
                f"optimizer: expected a torch optimizer or a list of them, found a {_name(one)}",
                hint="pass the torch optimizer that it uses",
            )
        yield Unwrapped(one, one)


def _unwrap_wrapper(one: Any, name: str, inner: torch.optim.Optimizer) -> Unwrapped:
    """Accepts a wrapper of one optimizer only if both have the same parameters and the same state."""
    described = f"optimizer: found a {_name(one)} around a {_name(inner)}"
    groups = getattr(one, "param_groups", None)
    if not isinstance(groups, list) or _identities(groups) != _identities(inner.param_groups):
        raise ConfigError(
            f"{described} with other parameters; expected both to have the same parameters",
            hint=f"pass the optimizer that changes the model's own parameters: the {_name(one)}'s .{name}, if it does",
        )
    if getattr(one, "state", inner.state) is not inner.state:
        raise ConfigError(
            f"{described} that keeps a state of its own; expected both to have the same state",
            hint=f"pass its .{name} as optimizer=, and what it keeps itself in states=",
        )
    (found,) = _exactly_one(one, name, inner)
    return replace(found, outer=one) if not found.sharded else found


def _exactly_one(one: Any, name: str, inner: torch.optim.Optimizer) -> list[Unwrapped]:
    found = list(_unwrap_one(inner))
    if len(found) != 1:
        raise ConfigError(
            f"optimizer: found a {_name(one)} around a {_name(inner)}, which holds {len(found)} optimizers",
            hint=f"pass the optimizers in its .{name} as a list",
        )
    return found


def _unwrap_container(one: Any, name: str, held: Any) -> Iterator[Unwrapped]:
    members = list(_unwrap_all(held))
    groups = getattr(one, "param_groups", None)
    theirs = {i for m in members for group in _identities(m.outer.param_groups) for i in group}
    if groups is not None and {i for group in _identities(groups) for i in group} != theirs:
        raise ConfigError(
            f"optimizer: a {_name(one)} holds optimizers in {name!r} that have other parameters than it has itself",
            hint="pass the optimizers to save as a list",
        )
    if isinstance(one, torch.optim.Optimizer) and one.state:
        raise ConfigError(
            f"optimizer: a {_name(one)} holds optimizers in {name!r} and keeps a state of its own beside theirs",
            hint=f"pass its .{name} as a list, and what it keeps itself in states=",
        )
    yield from members


def _unwrap_zero(one: Any) -> Unwrapped:
    local = getattr(one, "optim", None)
    if not isinstance(local, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a {_name(one)} with a torch optimizer in .optim, found a {_name(local)}: with "
            "overlap_with_ddp=True it steps within the backward pass, which no save can wait for",
            hint="make it with overlap_with_ddp=False",
        )
    return Unwrapped(local, one, sharded=True)


def _is_zero(one: Any) -> bool:
    # Not imported here: if the user made one, its module is loaded.
    module = sys.modules.get(_ZERO)
    return module is not None and isinstance(one, module.ZeroRedundancyOptimizer)


def _attributes(one: Any) -> dict[str, Any]:
    if isinstance(one, type):
        return {}
    return {
        name: value for name, value in getattr(one, "__dict__", {}).items() if name not in ("state", "param_groups")
    }


def _is_collection(value: Any) -> bool:
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return bool(members) and all(isinstance(member, torch.optim.Optimizer) for member in members)


def _identities(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in groups]


def _name(one: Any) -> str:
    return type(one).__name__
