"""One file or directory a step, the two newest kept: how checkpoints are kept without slots."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bench.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path


class StepFiles:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def newest(self) -> Path:
        found = self._all()
        if not found:
            raise BenchError(f"{self._directory}: expected a checkpoint, found none")
        return found[-1]

    def make_room(self) -> None:
        """Removes all but the newest, so that with the next one there are never more than two."""
        for path in self._all()[:-1]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _all(self) -> list[Path]:
        return sorted(self._directory.glob("step-*"))
