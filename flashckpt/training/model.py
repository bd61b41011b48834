"""The model's part of the state: one module, or a list of pipeline parts, under one set of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from flashckpt.errors import ConfigError, StructureError
from flashckpt.state.regions import address_of
from flashckpt.training.names import Renaming

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelState:
    """A Stateful. Its names are the parameters' own: without those of wrappers, and the same with any sharding."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = tuple(parts)
        self.renaming = Renaming()  # of the load that is under way
        self.tied: dict[str, frozenset[str]] = {}  # name → all names of the same tensor, after state_dict()
        self.renamings = 0  # how often the names changed; caches of names are dropped then
        self._names: dict[int, dict[str, str]] = {}  # part → state_dict()'s name → the parameter's own

    @property
    def has_extra_state(self) -> bool:
        """Return True if modules add state of their own, but not with FSDP1, which gathers tensors in state_dict()."""
        kinds = {type(module) for part in self.parts for module in part.modules()}
        flat = any(issubclass(kind, FullyShardedDataParallel) for kind in kinds)
        return not flat and any(kind.get_extra_state is not nn.Module.get_extra_state for kind in kinds)

    def capture(self) -> dict[str, Any]:
        """Returns the live tensors under the parameters' own names, for a save."""
        return self._collect(quick=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the live tensors under the names that the checkpoint has for them, for a load."""
        state = self._collect()
        self.renaming.check(state)
        renamed = {self.renaming.saved_name(fqn): value for fqn, value in state.items()}
        self.tied = _ties(renamed)
        return renamed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            own = {fqn: state[self.renaming.saved_name(fqn)] for fqn in get_model_state_dict(part)}
            set_model_state_dict(part, own, options=StateDictOptions(strict=True))

    def _collect(self, quick: bool = False) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for number, part in enumerate(self.parts):
            told = (self._told(number) if quick else None) or get_model_state_dict(part)
            for fqn, value in told.items():
                if fqn in merged:
                    raise StructureError(
                        f"key {fqn!r}: two parts of the model have it",
                        hint="pipeline parts need names that are unique over the whole model (e.g. layers.7.weight)",
                        key=fqn,
                    )
                merged[fqn] = value
        return merged

    def _told(self, number: int) -> dict[str, Any] | None:
        """Returns what torch's helper would return, by remembered names: the helper takes longer than a small copy."""
        part = self.parts[number]
        if any(isinstance(module, FullyShardedDataParallel) for module in part.modules()):
            return None  # FSDP1 gathers in state_dict(), unless the helper is used
        state: dict[str, Any] = part.state_dict()
        known = self._names.get(number)
        if known is None or known.keys() != state.keys():
            self.renamings += 1
            helped = get_model_state_dict(part)
            known = {key: key.removeprefix("module.").replace("_orig_mod.", "") for key in state}
            if set(known.values()) != set(helped) or len(known) != len(helped):
                return helped
            self._names[number] = known
        return {known[key]: value for key, value in state.items()}


def model_parts(model: Any) -> tuple[nn.Module, ...]:
    parts = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ConfigError(f"model: expected a torch module or a list of them, found a {type(part).__name__}")
    if not parts:
        raise ConfigError("model: expected at least one module, found an empty list")
    return parts


def _ties(state: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Returns the groups of names whose tensors are exactly the same memory, like tied weights."""
    same: dict[tuple[int, torch.Size, torch.dtype], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (address := address_of(value)):
            same.setdefault((address, value.shape, value.dtype), []).append(name)
    return {name: frozenset(names) for names in same.values() if len(names) > 1 for name in names}
