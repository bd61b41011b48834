"""The retrieval plan: which stored bytes fill which part of which live tensor. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flashckpt.errors import MissingKeyError, StructureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.load.cover import Index, Piece
    from flashckpt.types import Box, TensorEntry

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Want:
    """One region that this rank has to fill."""

    fqn: str
    per_rank: bool
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    target: int  # index of the tensor to fill, among the caller's


@dataclass(frozen=True, slots=True)
class Transfer:
    """`overlap` of the global tensor, out of one stored entry, into one wanted region."""

    shard: int
    entry: TensorEntry
    want: Want
    overlap: Box


def plan(wants: Sequence[Want], stored: Index, rank: int, *, cast: bool) -> list[Transfer]:
    """Transfers that fill every want completely; raises before anything is touched if that can't be done."""
    transfers: list[Transfer] = []
    for want in wants:
        pieces = stored.get((want.fqn, rank if want.per_rank else None))
        if pieces is None:
            raise MissingKeyError(f"key {want.fqn!r}: not in the checkpoint", key=want.fqn)
        _check_fits(want, pieces[0].entry, cast)
        filled = 0
        for piece in _prefer(pieces, rank):
            overlap = piece.entry.box.intersect(want.box)
            if overlap is not None:
                transfers.append(Transfer(piece.shard, piece.entry, want, overlap))
                filled += overlap.volume
        if filled != want.box.volume:
            raise StructureError(
                f"key {want.fqn!r}: the checkpoint fills {filled} of the {want.box.volume} elements of {want.box}",
                key=want.fqn,
            )
    return transfers


def _check_fits(want: Want, entry: TensorEntry, cast: bool) -> None:
    if entry.global_shape != want.global_shape:
        raise StructureError(
            f"key {want.fqn!r}: expected shape {want.global_shape}, found {entry.global_shape} in the checkpoint",
            hint="the model changed since the save; leave the key out with keys=, or load with the old shape",
            key=want.fqn,
        )
    if "complex" in entry.dtype and "complex" not in want.dtype:
        raise StructureError(f"key {want.fqn!r}: {entry.dtype} does not fit into {want.dtype}", key=want.fqn)
    if entry.dtype != want.dtype and not cast:
        raise StructureError(
            f"key {want.fqn!r}: expected dtype {want.dtype}, found {entry.dtype} in the checkpoint",
            hint="pass cast=True to convert while loading",
            key=want.fqn,
        )


def _prefer(pieces: Iterable[Piece], rank: int) -> list[Piece]:
    """One piece for each region: this rank's own copy where it has one, else the first."""
    best: dict[Box, Piece] = {}
    for piece in pieces:
        if piece.entry.box not in best or piece.shard == rank:
            best[piece.entry.box] = piece
    return list(best.values())


def runs(overlap: Box, source: Box, target: Box, itemsize: int) -> tuple[Int64s, Int64s, int]:
    """(source offsets, target offsets, length), in bytes, of the contiguous runs of `overlap`.

    `source` and `target` are row-major boxes that both contain it. Trailing dimensions that all three have in
    full are one run; for a whole region that is a single one.
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
