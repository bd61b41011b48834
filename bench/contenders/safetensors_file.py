"""safetensors to tmpfs: a header and raw bytes, no checksums."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file

from bench.contenders.base import Synchronous
from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class Safetensors(Synchronous):
    """save_file, plain values as its metadata; safe_open, which maps, then a copy into the live tensors."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        self._files = StepFiles(directory)
        return {}

    def save(self, step: int) -> Details:
        save_file(self._state["model"], self._files.new(step), metadata={"trainer": json.dumps(self._state["trainer"])})
        return {}

    def settle(self) -> Details:
        self._files.make_room()
        return {}

    def load(self) -> Details:
        with safe_open(self._files.newest(), framework="pt") as file:
            for name, live in self._state["model"].items():
                live.copy_(file.get_tensor(name))
            self._state["trainer"].update(json.loads(file.metadata()["trainer"]))
        return {}
