"""Clones tensors in device memory, in the order of the caller's stream, so that later work can't change the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashckpt.devices.bits import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterable


def clone_on_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Queue a copy of each tensor's bytes, in the memory of its own device, on the caller's current stream.

    What the caller queues on that stream from now on, a replay of a CUDA graph included, does not change the copies.
    The clones are contiguous integers, as `as_bits` returns them. None: the tensor is on the host, or its device had no
    room for a clone (torch.OutOfMemoryError).
    """
    clones: list[torch.Tensor | None] = []
    # A failed allocation makes the driver synchronize, so nothing of the same size or larger is tried again.
    too_large: dict[torch.device, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if tensor.is_cpu or size >= too_large.get(tensor.device, size + 1):
            clones.append(None)
            continue
        try:
            clones.append(as_bits(tensor).clone(memory_format=torch.contiguous_format))
        except torch.OutOfMemoryError:
            too_large[tensor.device] = size
            clones.append(None)
    return clones
