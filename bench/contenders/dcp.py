"""torch.distributed.checkpoint to tmpfs: what a user has today."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Any

    from bench.contenders.base import Details
    from bench.state import StateDict


class Dcp:
    """dcp.save and dcp.load with their defaults. Nothing is checksummed."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        self._files = StepFiles(directory)
        return {}

    def save(self, step: int) -> Details:
        save(self._state, checkpoint_id=self._files.new(step), no_dist=True)
        return {}

    def settle(self) -> Details:
        self._files.make_room()
        return {}

    def load(self) -> Details:
        load(self._state, checkpoint_id=self._files.newest(), no_dist=True)
        return {}

    def close(self) -> None:
        pass


class DcpTuned(Dcp):
    """dcp.save with a writer that uses every core and does not call fsync, which on tmpfs gains nothing."""

    def save(self, step: int) -> Details:
        writer = FileSystemWriter(self._files.new(step), thread_count=len(os.sched_getaffinity(0)), sync_files=False)
        save(self._state, storage_writer=writer, no_dist=True)
        return {}


class DcpAsync(Dcp):
    """dcp.async_save with its defaults. The clock stops when it returns: the checkpoint does not exist yet."""

    _pending: Future[Any] | None = None

    def save(self, step: int) -> Details:
        self._began = time.perf_counter()
        response = async_save(self._state, checkpoint_id=self._files.new(step), no_dist=True)
        self._pending = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        return {}

    def settle(self) -> Details:
        details: Details = {}
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            details["until_written"] = time.perf_counter() - self._began
        super().settle()
        return details

    def close(self) -> None:
        self.settle()
