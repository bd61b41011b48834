"""torch.distributed.checkpoint to tmpfs: what a user has today. Nothing is checksummed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from bench.contenders.base import Synchronous
from bench.contenders.group import join_alone
from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Any

    from bench.contenders.base import Details
    from bench.state import StateDict


class Dcp(Synchronous):
    """dcp.save and dcp.load with their defaults."""

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


class DcpTuned(Dcp):
    """dcp.save with a writer that uses every core and does not call fsync, which on tmpfs gains nothing."""

    def save(self, step: int) -> Details:
        writer = FileSystemWriter(self._files.new(step), thread_count=len(os.sched_getaffinity(0)), sync_files=False)
        save(self._state, storage_writer=writer, no_dist=True)
        return {}


class DcpAsync(Dcp):
    """dcp.async_save with its defaults: a staged copy, written by a thread."""

    _pending: Future[Any] | None = None

    def save(self, step: int) -> Details:
        self.finish()  # it must not have two under way
        response = self._start(self._files.new(step))
        self._pending = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        return {}

    def _start(self, path: Path) -> AsyncSaveResponse | Future[Any]:
        return async_save(self._state, checkpoint_id=path, no_dist=True)

    def finish(self) -> Details:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return {}

    def close(self) -> None:
        self.finish()


class DcpAsyncShared(DcpAsync):
    """dcp.async_save with a stager that is kept, and copies into shared memory that is kept, too."""

    _type = AsyncCheckpointerType.THREAD

    def set_up(self, state: StateDict, directory: Path) -> Details:
        super().set_up(state, directory)
        join_alone(directory)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        return {}

    def _start(self, path: Path) -> AsyncSaveResponse | Future[Any]:
        return async_save(
            self._state, checkpoint_id=path, async_stager=self._stager, async_checkpointer_type=self._type
        )

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


class DcpAsyncProcess(DcpAsyncShared):
    """As above, written by a process instead of a thread."""

    _type = AsyncCheckpointerType.PROCESS
