"""The contenders by name, and what is to be known of each before it is measured."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.contenders.base import Contender


class Kind(enum.Enum):
    """What its call promises when it returns: only contenders of one kind are on a par."""

    LIMIT = "limit: no checkpoint, but what one is measured by"
    SYNCHRONOUS = "complete in memory when the call returns"
    ASYNCHRONOUS = "returns earlier, completes behind the training"
    PEER = "brings a peer's state into live tensors"


@dataclass(frozen=True, slots=True)
class About:
    # Module and class. Text, because the parent must not import torch, and a worker only its own contender.
    made_by: str
    kind: Kind
    title: str
    environment: str | None = None  # name of the lock file, if it has packages of its own
    warm_up: int = 2  # saves before the steady ones
    copies: int = 3  # of the state that it needs at most: its tensors, what it stages, what it keeps
    checked: bool = False  # a flipped bit would be noticed by its load
    note: str = ""


def _ours(name: str, kind: Kind, title: str, *, copies: int = 3, warm_up: int = 2, note: str = "") -> About:
    return About(f"bench.contenders.{name}", kind, title, copies=copies, warm_up=warm_up, checked=True, note=note)


_SYNC, _ASYNC = Kind.SYNCHRONOUS, Kind.ASYNCHRONOUS
_PIN_NOTE = "its pins (torch<=2.5) are not kept"
_CUDA_NOTE = "made for CUDA; a check and device calls are replaced"

CONTENDERS = {
    "memcpy": About("bench.contenders.memcpy:MemcpyBlock", Kind.LIMIT, "memcpy, one block"),
    "memcpy-tensors": About("bench.contenders.memcpy:MemcpyTensors", Kind.LIMIT, "memcpy, by tensor", copies=2),
    "socket": About("bench.contenders.plain_socket:PlainSocket", Kind.LIMIT, "one TCP connection", copies=2),
    "socket-into-new": About(
        "bench.contenders.plain_socket:SocketIntoNew", Kind.LIMIT, "one TCP connection, into new memory", copies=2
    ),
    "socket-tls": About("bench.contenders.plain_socket:TlsSocket", Kind.LIMIT, "the same with TLS", copies=2),
    "flashckpt": _ours("flash:Flash", _SYNC, "flashckpt, save()"),
    "flashckpt-overlapped": _ours("flash:FlashOverlapped", _ASYNC, "flashckpt, overlapped"),
    "flashckpt-prewarmed": _ours("flash:FlashPrewarmed", _SYNC, "flashckpt, after prewarm()"),
    "flashckpt-off": _ours("flash:FlashOff", _SYNC, "flashckpt without an agent"),
    "flashckpt-replicated": _ours(
        "replicated:FlashReplicated", _SYNC, "flashckpt, two nodes", copies=6, warm_up=4, note="replicated behind it"
    ),
    "flashckpt-unlogged": _ours(
        "replicated:FlashUnlogged", _SYNC, "flashckpt, two nodes, as a user has it", copies=6, warm_up=4
    ),
    "torch.save": About("bench.contenders.torch_save:TorchSave", _SYNC, "torch.save, load(mmap)"),
    "safetensors": About("bench.contenders.safetensors_file:Safetensors", _SYNC, "safetensors"),
    "dcp": About("bench.contenders.dcp:Dcp", _SYNC, "dcp.save"),
    "dcp-tuned": About("bench.contenders.dcp:DcpTuned", _SYNC, "dcp.save, tuned", note="2 threads, no fsync"),
    "dcp-async": About("bench.contenders.dcp:DcpAsync", _ASYNC, "dcp.async_save", copies=4),
    "dcp-async-shared": About(
        "bench.contenders.dcp:DcpAsyncShared", _ASYNC, "dcp.async_save, cached stager", copies=4, note="shared memory"
    ),
    "dcp-async-process": About(
        "bench.contenders.dcp:DcpAsyncProcess", _ASYNC, "dcp.async_save, process", copies=5, note="shared memory"
    ),
    "torchsnapshot": About(
        "bench.contenders.torchsnapshot_take:TorchSnapshot", _SYNC, "torchsnapshot", "torchsnapshot", copies=4
    ),
    "torchsnapshot-async": About(
        "bench.contenders.torchsnapshot_take:TorchSnapshotAsync",
        _ASYNC,
        "torchsnapshot, async_take",
        "torchsnapshot",
        copies=4,
    ),
    "dlrover": About(
        "bench.contenders.dlrover_memory:DlroverMemory",
        _SYNC,
        "DLRover, memory",
        "dlrover",
        note="one image, overwritten in place",
    ),
    "nvrx": About("bench.contenders.nvrx_local:NvrxSync", _SYNC, "NVRx local", "nvrx", note=_CUDA_NOTE),
    "nvrx-fork": About(
        "bench.contenders.nvrx_local:NvrxFork", _ASYNC, "NVRx local, fork", "nvrx", copies=4, note=_CUDA_NOTE
    ),
    "nvrx-persistent": About(
        "bench.contenders.nvrx_local:NvrxPersistent",
        _ASYNC,
        "NVRx local, persistent",
        "nvrx",
        copies=4,
        note=_CUDA_NOTE,
    ),
    "bytecheckpoint": About(
        "bench.contenders.bytecheckpoint_ddp:ByteCheckpoint",
        _SYNC,
        "ByteCheckpoint",
        "bytecheckpoint",
        copies=5,
        note=_PIN_NOTE,
    ),
    "ml-flashpoint": About(
        "bench.contenders.ml_flashpoint_pool:MlFlashpoint",
        _SYNC,
        "ml-flashpoint, sync + pool",
        "ml-flashpoint",
        warm_up=5,
        note="saves 1 to 4 are slower",
    ),
    "torchft-http": About(
        "bench.contenders.torchft_transport:Http", Kind.PEER, "torchft, HTTP", "torchft", note="then a copy into place"
    ),
    "torchft-pg": About(
        "bench.contenders.torchft_transport:InPlace", Kind.PEER, "torchft, process group in place", "torchft"
    ),
}


def make_contender(name: str) -> Contender:
    module, _, attribute = CONTENDERS[name].made_by.partition(":")
    made = cast("Callable[[], Contender]", getattr(importlib.import_module(module), attribute))
    return made()
