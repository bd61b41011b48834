"""DLRover Flash Checkpoint: a copy into shared memory that a saver process keeps. One image, overwritten in place."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders.base import Synchronous
from bench.contenders.live import copy_into
from bench.errors import BenchError

if TYPE_CHECKING:
    from bench.contenders.base import Details
    from bench.state import StateDict

_SOCKETS = Path("/tmp/ckpt_sock")
_SHARED_MEMORY = Path("/dev/shm")


class DlroverMemory(Synchronous):
    """save_checkpoint with StorageType.MEMORY. Without dlrover-run, it forks its saver by itself.

    A save that finds the saver busy is skipped without an error, which here is one.
    """

    def set_up(self, state: StateDict, directory: Path) -> Details:
        # Names its sockets and its shared memory after the job: this run's, so that nothing old is found.
        self._job = f"{directory.parent.name}_{directory.name}"
        os.environ["TORCHELASTIC_RUN_ID"] = self._job
        logging.disable(logging.WARNING)  # it tells each save
        from dlrover.trainer.torch.flash_checkpoint.ddp import (  # type: ignore[import-not-found]
            DdpCheckpointer,
            StorageType,
        )

        self._state = state
        self._directory = directory
        self._memory = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(str(directory))
        return {}

    def save(self, step: int) -> Details:
        self._step = step
        path = str(self._directory / f"{step}.pt")
        self._checkpointer.save_checkpoint(step, self._state, path, storage_type=self._memory)
        return {}

    def settle(self) -> Details:
        saved = self._checkpointer._engine._cached_step
        if saved != self._step:
            raise BenchError(f"dlrover: expected step {self._step} in its memory, found {saved}: it skipped a save")
        return {}

    def load(self) -> Details:
        loaded = self._checkpointer.load_checkpoint()
        if "model" not in loaded:
            raise BenchError(f"dlrover: expected the saved state, found keys {sorted(loaded)}")
        copy_into(self._state, loaded)
        return {}

    def close(self) -> None:
        # Its shared memory outlives everybody unless somebody unlinks it.
        self._checkpointer._engine.close()
        for path in _SHARED_MEMORY.glob(f"{self._job}_*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(_SOCKETS / self._job, ignore_errors=True)
