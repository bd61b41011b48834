"""ByteCheckpoint to tmpfs, as for DDP. It asks for torch 2.1 to 2.5, by a comparison of text that newer ones pass."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.contenders.base import Synchronous
from bench.contenders.group import join_alone
from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class _Model(torch.nn.Module):
    """What it asks for is a module, of which it takes nothing but the state dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self._tensors)

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        """Loads fill the tensors of state_dict() in place."""
        for name, stored in state_dict.items():
            if stored.data_ptr() != self._tensors[name].data_ptr():
                self._tensors[name].copy_(stored)


class ByteCheckpoint(Synchronous):
    """bytecheckpoint.save and load with framework="ddp". Its `fast_saving` takes as long for a state in CPU memory."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        warnings.simplefilter("ignore")
        import bytecheckpoint  # type: ignore[import-not-found]

        logging.disable(logging.WARNING)
        # Its pickles are its own; since 2.6 torch.load refuses them otherwise.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        join_alone(directory)
        self._api = bytecheckpoint
        self._live = state
        self._state = {"model": _Model(state["model"]), "extra_state": state["trainer"]}
        self._files = StepFiles(directory)
        return {}

    def save(self, step: int) -> Details:
        self._api.save(str(self._files.new(step)), self._state, framework="ddp")
        return {}

    def settle(self) -> Details:
        self._files.make_room()
        return {}

    def load(self) -> Details:
        wanted = {"model": self._state["model"], "extra_state": {}}
        self._api.load(str(self._files.newest()), wanted, framework="ddp")
        self._live["trainer"].update(wanted["extra_state"])
        return {}

    def close(self) -> None:
        dist.destroy_process_group()
