"""Peer-replicated in-memory checkpointing for PyTorch training.

Importing this package imports neither torch nor grpc. Each name below loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashckpt.config import CheckpointConfig, InitialLoad, Memory, Network, Persist, Replication, Saving
from flashckpt.errors import (
    AgentError,
    AmbiguousHistoryError,
    BusyError,
    ChangedError,
    ClosedError,
    ConfigError,
    ConflictError,
    CorruptShardError,
    DeadlineError,
    DeniedError,
    ExistsError,
    FencedError,
    FlashError,
    ForeignStepError,
    IncompatibleError,
    InternalError,
    LiveJobError,
    MismatchError,
    MissingKeyError,
    NoSpaceError,
    NotFoundError,
    OtherRankError,
    PeerError,
    PersistError,
    RetrieveError,
    StorageError,
    StructureError,
    UnsafeDirectoryError,
    UnsupportedValueError,
    UnusableError,
)
from flashckpt.types import Generation, Level, Outcome

if TYPE_CHECKING:
    import flashckpt.dcp as dcp
    from flashckpt.checkpointer import Checkpointer
    from flashckpt.discover import (
        checkpoint_dirname,
        contains_checkpoint,
        dir_is_checkpoint,
        find_checkpoints,
        latest_checkpoint,
        peek,
    )
    from flashckpt.load.disk.elsewhere import load_keys
    from flashckpt.load.result import LoadResult
    from flashckpt.manager import CheckpointManager
    from flashckpt.save.handle import SaveHandle
    from flashckpt.state.flatten import PerRank, Whole
    from flashckpt.training.stopping import install_signal_handlers

_LAZY = {
    "CheckpointManager": "flashckpt.manager",
    "install_signal_handlers": "flashckpt.training.stopping",
    "checkpoint_dirname": "flashckpt.discover",
    "contains_checkpoint": "flashckpt.discover",
    "dir_is_checkpoint": "flashckpt.discover",
    "find_checkpoints": "flashckpt.discover",
    "latest_checkpoint": "flashckpt.discover",
    "peek": "flashckpt.discover",
    "load_keys": "flashckpt.load.disk.elsewhere",
    "Checkpointer": "flashckpt.checkpointer",
    "LoadResult": "flashckpt.load.result",
    "PerRank": "flashckpt.state.flatten",
    "Whole": "flashckpt.state.flatten",
    "SaveHandle": "flashckpt.save.handle",
}

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "dcp":
        return importlib.import_module("flashckpt.dcp")
    raise AttributeError(f"module 'flashckpt' has no attribute {name!r}")


__all__ = [
    "AgentError",
    "AmbiguousHistoryError",
    "BusyError",
    "ChangedError",
    "CheckpointConfig",
    "CheckpointManager",
    "Checkpointer",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "CorruptShardError",
    "DeadlineError",
    "DeniedError",
    "ExistsError",
    "FencedError",
    "FlashError",
    "ForeignStepError",
    "Generation",
    "IncompatibleError",
    "InitialLoad",
    "InternalError",
    "Level",
    "LiveJobError",
    "LoadResult",
    "Memory",
    "MismatchError",
    "MissingKeyError",
    "Network",
    "NoSpaceError",
    "NotFoundError",
    "OtherRankError",
    "Outcome",
    "PeerError",
    "PerRank",
    "Persist",
    "PersistError",
    "Replication",
    "RetrieveError",
    "SaveHandle",
    "Saving",
    "StorageError",
    "StructureError",
    "UnsafeDirectoryError",
    "UnsupportedValueError",
    "UnusableError",
    "Whole",
    "checkpoint_dirname",
    "contains_checkpoint",
    "dcp",
    "dir_is_checkpoint",
    "find_checkpoints",
    "install_signal_handlers",
    "latest_checkpoint",
    "load_keys",
    "peek",
]
