"""Local checkpoints of the NVIDIA Resiliency Extension, to tmpfs.

It is made for CUDA: what is replaced here so that it runs on a CPU is a check, the name of a device, and
`torch.cuda.synchronize`, none of which costs time. With tensors on a GPU its persistent queue copies them; tensors that
are on the CPU already it only refers to, which the test of isolation shows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue  # type: ignore[import-not-found]
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (  # type: ignore[import-not-found]
    BasicTensorAwareStateDict,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (  # type: ignore[import-not-found]
    LocalCheckpointManager,
)

from bench.contenders.base import Synchronous
from bench.contenders.group import join_alone
from bench.contenders.live import copy_into
from bench.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class CpuStateDict(BasicTensorAwareStateDict):  # type: ignore[misc]
    """Without the demand that tensors be on a GPU."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def run_without_cuda() -> None:
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]


class NvrxSync(Synchronous):
    """LocalCheckpointManager.save, which removes the checkpoint before this one by itself."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        logging.disable(logging.WARNING)
        run_without_cuda()
        join_alone(directory)
        self._state = state
        self._manager = LocalCheckpointManager(directory / "local")
        return {}

    def _wrapped(self) -> CpuStateDict:
        # It replaces values within the dictionaries it is given.
        return CpuStateDict({"model": dict(self._state["model"]), "trainer": dict(self._state["trainer"])})

    def save(self, step: int) -> Details:
        self._manager.save(self._wrapped(), step, is_async=False)
        return {}

    def load(self) -> Details:
        if self._manager.find_latest() < 0:
            raise BenchError("nvrx: expected a checkpoint, found none")
        loaded, _ = self._manager.load()
        copy_into(self._state, loaded.state_dict)
        return {}

    def close(self) -> None:
        dist.destroy_process_group()


class NvrxFork(NvrxSync):
    """save with is_async, through its queue that forks a process for each save."""

    _persistent = False

    def set_up(self, state: StateDict, directory: Path) -> Details:
        super().set_up(state, directory)
        self._queue = AsyncCallsQueue(persistent=self._persistent)
        return {}

    def save(self, step: int) -> Details:
        self.finish()
        self._queue.schedule_async_request(self._manager.save(self._wrapped(), step, is_async=True))
        return {}

    def finish(self) -> Details:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        return {}

    def close(self) -> None:
        self.finish()
        self._queue.close()
        super().close()


class NvrxPersistent(NvrxFork):
    """The same with its queue that keeps one process for all saves."""

    _persistent = True
