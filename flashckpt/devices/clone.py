"""Copies in device memory: what is taken in the order of the caller's stream can't tear any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashckpt.devices.bits import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterable


def clone_on_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Queue a copy of each tensor's bytes, in the memory of its own device, on the caller's current stream.

    What the caller queues on that stream from now on, a replay of a CUDA graph included, does not change the copies.
    They are contiguous integers, as `as_bits` gives them. None: the tensor is on the host, or its device had no room
    (torch.OutOfMemoryError) and it has to be copied from where it is.
    """
    clones: list[torch.Tensor | None] = []
    # An allocation that fails costs the driver a synchronization: what is at least as large is not tried again.
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
