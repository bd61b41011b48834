"""Cuts the overlap of two regions into contiguous runs of bytes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from flashckpt.types import Box


Int64s = npt.NDArray[np.int64]


def runs(overlap: Box, source: Box, target: Box, itemsize: int) -> tuple[Int64s, Int64s, int]:
    """Returns (source offsets, target offsets, length), in bytes, of the contiguous runs of `overlap`.

    `source` and `target` are row-major boxes that contain it. Trailing dimensions that all three have in full are
    merged into one run, so that a whole region is a single run.
    """
    dims = len(overlap.sizes)
    length = itemsize
    inner = dims
    while inner > 0:
        inner -= 1
        length *= overlap.sizes[inner]
        if not overlap.sizes[inner] == source.sizes[inner] == target.sizes[inner]:
            break
    starts = []
    for box in (source, target):
        strides = [itemsize] * dims
        for dim in range(dims - 2, -1, -1):
            strides[dim] = strides[dim + 1] * box.sizes[dim + 1]
        first = sum((o - b) * s for o, b, s in zip(overlap.offsets, box.offsets, strides, strict=True))
        offsets = np.array([first], dtype=np.int64)
        for dim in range(inner):
            steps = np.arange(overlap.sizes[dim], dtype=np.int64) * strides[dim]
            offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
        starts.append(offsets)
    return starts[0], starts[1], length
