"""The contenders by name. One that is added here can be named in bench/sections.py and by the worker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.contenders.base import Contender

# name -> module and class. Text, because the parent must not import torch, and a worker only its own contender.
CONTENDERS = {
    "memcpy": "bench.contenders.memcpy:MemcpyBlock",
    "memcpy-tensors": "bench.contenders.memcpy:MemcpyTensors",
    "flashckpt": "bench.contenders.flash:Flash",
    "flashckpt-prewarmed": "bench.contenders.flash:FlashPrewarmed",
    "flashckpt-off": "bench.contenders.flash:FlashOff",
    "flashckpt-replicated": "bench.contenders.replicated:FlashReplicated",
    "socket": "bench.contenders.plain_socket:PlainSocket",
    "socket-tls": "bench.contenders.plain_socket:TlsSocket",
    "dcp": "bench.contenders.dcp:Dcp",
    "dcp-tuned": "bench.contenders.dcp:DcpTuned",
    "dcp-async": "bench.contenders.dcp:DcpAsync",
    "torch.save": "bench.contenders.torch_save:TorchSave",
}


def make_contender(name: str) -> Contender:
    module, _, attribute = CONTENDERS[name].partition(":")
    made = cast("Callable[[], Contender]", getattr(importlib.import_module(module), attribute))
    return made()
