"""The model's part of the state: one module, or a list of pipeline parts, as one set of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from flashckpt.errors import ConfigError, StructureError
from flashckpt.state.regions import plain_local
from flashckpt.training.names import Renaming

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelState:
    """A Stateful. Its names are the parameters' own: without wrappers, and the same at any sharding."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = tuple(parts)
        self.renaming = Renaming()  # of the load that is under way

    def capture(self, overlap: bool) -> dict[str, Any]:
        """For a save. With `overlap` buffers are copied here: a forward pass changes them (running means)."""
        state = self._collect()
        if not overlap:
            return state
        # Address 0: nothing to copy here, or a wrapper without one address, which is copied to be safe.
        steady = {_address(parameter) for part in self.parts for parameter in part.parameters()} - {0}
        return {
            fqn: value.detach().clone() if isinstance(value, torch.Tensor) and _address(value) not in steady else value
            for fqn, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """For a load: the live tensors under the names that the checkpoint has for them."""
        state = self._collect()
        self.renaming.check(state)
        return {self.renaming.saved_name(fqn): value for fqn, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            own = {fqn: state[self.renaming.saved_name(fqn)] for fqn in get_model_state_dict(part)}
            set_model_state_dict(part, own, options=StateDictOptions(strict=True))

    def _collect(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in self.parts:
            for fqn, value in get_model_state_dict(part).items():
                if fqn in merged:
                    raise StructureError(
                        f"key {fqn!r}: two parts of the model have it",
                        hint="pipeline parts need names that are unique over the whole model (e.g. layers.7.weight)",
                        key=fqn,
                    )
                merged[fqn] = value
        return merged


def model_parts(model: Any) -> tuple[nn.Module, ...]:
    parts = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ConfigError(f"model: expected a torch module or a list of them, found a {type(part).__name__}")
    if not parts:
        raise ConfigError("model: expected at least one module, found an empty list")
    return parts


def _address(tensor: torch.Tensor) -> int:
    local = plain_local(tensor)
    return 0 if local is None else local.data_ptr()
