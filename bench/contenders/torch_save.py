"""torch.save to tmpfs: one pickle, with the checksums of its zip container."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.contenders.step_files import StepFiles
from bench.state import tensors_of

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class TorchSave:
    """torch.save of the whole state; torch.load with a mapping, then a copy into the live tensors."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        self._files = StepFiles(directory)
        return {}

    def save(self, step: int) -> Details:
        torch.save(self._state, self._files.new(step))
        return {}

    def settle(self) -> Details:
        self._files.make_room()
        return {}

    def load(self) -> Details:
        loaded = torch.load(self._files.newest(), mmap=True, weights_only=True)
        for live, stored in zip(tensors_of(self._state), tensors_of(loaded), strict=True):
            live.copy_(stored)
        self._state["trainer"].update(loaded["trainer"])
        return {}

    def close(self) -> None:
        pass
