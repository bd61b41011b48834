"""torch.save to tmpfs: one pickle, with the checksums of its zip container."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.contenders.base import Synchronous
from bench.contenders.live import copy_into
from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class TorchSave(Synchronous):
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
        copy_into(self._state, torch.load(self._files.newest(), mmap=True, weights_only=True))
        return {}
