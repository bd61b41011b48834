"""ml-flashpoint's PyTorch adapter with its buffer pool, after its user guide.

Its source distribution fetches abseil from GitHub while it is built; where that fails, it is left out.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bench.contenders.base import Synchronous
from bench.contenders.group import join_alone
from bench.errors import BenchError
from bench.state import tensors_of

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict


class MlFlashpoint(Synchronous):
    """dcp.save with its MemoryStorageWriter, two pooled buffers; dcp.load with its MemoryStorageReader."""

    _path = ""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        os.environ.setdefault("MLFLASHPOINT_LOG_LEVEL", "ERROR")
        logging.disable(logging.WARNING)
        from ml_flashpoint.adapter.pytorch.memory_storage_writer import (  # type: ignore[import-not-found]
            MemoryStorageWriter,
        )
        from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import (  # type: ignore[import-not-found]
            CheckpointObjectManager,
        )
        from ml_flashpoint.core.buffer_pool import BufferPoolConfig  # type: ignore[import-not-found]
        from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId  # type: ignore[import-not-found]
        from ml_flashpoint.core.checkpoint_loader import (  # type: ignore[import-not-found]
            DefaultMLFlashpointCheckpointLoader,
        )
        from ml_flashpoint.core.checkpoint_saver import (  # type: ignore[import-not-found]
            DefaultMLFlashpointCheckpointSaver,
        )
        from ml_flashpoint.replication.replication_manager import ReplicationManager  # type: ignore[import-not-found]

        join_alone(directory)
        self._state = state
        self._base = directory / "checkpoints"
        self._base.mkdir()
        self._id: Any = CheckpointContainerId
        size_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
        pool = BufferPoolConfig(
            pool_dir_path=str(self._base / "buffer_pool"), rank=0, num_buffers=2, buffer_size=size_bytes + (64 << 20)
        )
        objects, replication = CheckpointObjectManager(pool_config=pool), ReplicationManager()
        replication.initialize(objects)
        self._saver = DefaultMLFlashpointCheckpointSaver(
            global_rank_getter=dist.get_rank,
            local_rank_getter=lambda: 0,
            global_barrier_func=dist.barrier,
            ckpt_obj_manager=objects,
            replication_manager=replication,
            initial_buffer_size_bytes=size_bytes + (64 << 20),
        )
        manager: Future[Any] = Future()
        manager.set_result(multiprocessing.get_context("spawn").Manager())
        self._writer = MemoryStorageWriter(checkpoint_saver=self._saver, mp_manager_future=manager)
        self._loader = DefaultMLFlashpointCheckpointLoader(
            objects,
            replication,
            global_rank_getter=dist.get_rank,
            local_rank_getter=lambda: 0,
            broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )
        return {}

    def save(self, step: int) -> Details:
        self._path = str(self._base / self._id.format_version_container(step))
        save(self._state, checkpoint_id=self._path, storage_writer=self._writer)
        self._saver.finalize_checkpoint(self._id(self._path))
        return {}

    def load(self) -> Details:
        from ml_flashpoint.adapter.pytorch.memory_storage_reader import (  # type: ignore[import-not-found]
            MemoryStorageReader,
        )

        if not self._path:
            raise BenchError("ml-flashpoint: expected a checkpoint of this process, found none")
        load(self._state, checkpoint_id=self._path, storage_reader=MemoryStorageReader(self._path, self._loader))
        return {}

    def close(self) -> None:
        dist.destroy_process_group()
