"""Sums a tensor's bits, weighted by place: on the tensor's device, or on the host for bytes in its memory.

Each place has its own pseudo-random weight, so that the sum changes if elements change places, signs or bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashckpt.devices.bits import as_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Elements per piece. The products take 8 bytes per element, of the memory that the tensor lies in.
_PIECE = 1 << 20
_KEPT = 16 << 10  # weights that are kept per device
_MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd, and less than 2^62
_MASK = (1 << 64) - 1


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum as one int64 on the tensor's device. Only queues work: a device is not waited for.

    Raises torch.OutOfMemoryError if the device has no room for the products of one piece, or for a contiguous copy.
    """
    flat = as_bits(tensor).reshape(-1)
    weights = _weights_on(flat.device, min(_PIECE, len(flat)))
    total = (flat[:_PIECE] * weights).sum()
    for start in range(_PIECE, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        total = total + (piece * weights[: len(piece)]).sum() * _salt(start)
    return total


def weighted_sum_of_bytes(area: memoryview, itemsize: int) -> int:
    """Return what `weighted_sum` returns for a tensor of elements of this size, whose bytes these are."""
    elements = np.frombuffer(area, dtype=np.uint8 if itemsize == 1 else f"<i{min(itemsize, 8)}")
    weights = _host_weights()
    total = 0
    for start in range(0, len(elements), _PIECE):
        piece = elements[start : start + _PIECE].astype(np.int64)
        total += int(np.dot(piece, weights[: len(piece)])) * _salt(start)
    return ((total + (1 << 63)) & _MASK) - (1 << 63)  # int64 wraps around


def _salt(start: int) -> int:
    """Return the odd factor of the piece that begins at this element."""
    return (start // _PIECE) * 2 + 1


def _weights_on(device: torch.device, count: int) -> torch.Tensor:
    """Return the first weights. Those of a sample are kept, because each save takes samples."""
    return _kept_weights(device)[:count] if count <= _KEPT else _weights(count, device)


@functools.cache
def _kept_weights(device: torch.device) -> torch.Tensor:
    return _weights(_KEPT, device)


@functools.cache
def _host_weights() -> NDArray[np.int64]:
    weights: NDArray[np.int64] = _weights(_PIECE, torch.device("cpu")).numpy()
    return weights


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Compute the weights where they are used: a copy from the host would wait for the device."""
    weights = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _MIX:
        weights = weights * factor
        weights = weights ^ (weights >> 29)
    return weights
