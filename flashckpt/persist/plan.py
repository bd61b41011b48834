"""Plans which rank's shard each part of a persisted checkpoint comes from. Pure: every node computes the same.

Nodes keep complete copies of what they share, each cut in its own way. A DCP checkpoint has every element once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.persist.names import per_rank_key
from flashckpt.state.assumed import AssumedTensors, only_from_one
from flashckpt.state.cover import Piece, uncovered
from flashckpt.types import Box, Layout, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashckpt.state.cover import Index

# Larger regions are cut, so that a flusher needs little memory; a longer row is not cut.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Contribution:
    """Describes what one rank's shard offers."""

    rank: int
    entries: tuple[TensorEntry, ...]
    values: tuple[str, ...]  # keys of its values that all ranks share
    own_values: tuple[str, ...]  # keys of its values that are this rank's alone
    assumed_bytes: int = 0  # where its assumed tensors (state/assumed.py) end in the data area


@dataclass(frozen=True, slots=True)
class TensorItem:
    """Describes one region, to be read out of one entry of one shard."""

    key: str  # the key that DCP readers see
    rank: int
    entry: TensorEntry
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.volume * ITEMSIZE[self.entry.dtype]


@dataclass(frozen=True, slots=True)
class ValueItem:
    key: str
    rank: int
    fqn: str


@dataclass(frozen=True, slots=True)
class PersistPlan:
    tensors: tuple[TensorItem, ...]
    values: tuple[ValueItem, ...]


def plan(contributions: Sequence[Contribution], piece_bytes: int = PIECE_BYTES) -> PersistPlan:
    """Plan every element of every tensor once, the load spread over the ranks that have it. Assumed tensors come from
    one rank.

    CorruptShardError if the shards do not hold every element.
    """
    stored: Index = {}
    for one in contributions:
        for entry in one.entries:
            stored.setdefault((entry.fqn, one.rank if entry.per_rank else None), []).append(Piece((one.rank,), entry))
    assumed = AssumedTensors(
        [Layout(one.entries) for one in contributions],
        [(one.rank,) for one in contributions],
        [one.assumed_bytes for one in contributions],
        dict.fromkeys((one.rank for one in contributions), 0),
    )
    stored = only_from_one(stored, assumed)
    given = dict.fromkeys((one.rank for one in contributions), 0)  # bytes that each rank has to write so far
    tensors: list[TensorItem] = []
    for (fqn, owner), pieces in stored.items():
        key = fqn if owner is None else per_rank_key(owner, fqn)
        for piece, box in _choose((fqn, owner), pieces, given):
            parts = _cut(box, ITEMSIZE[piece.entry.dtype], piece_bytes)
            tensors += [TensorItem(key, piece.ranks[0], piece.entry, part) for part in parts]
    values: dict[str, ValueItem] = {}
    for one in sorted(contributions, key=lambda one: one.rank):
        for fqn in one.values:
            values.setdefault(fqn, ValueItem(fqn, one.rank, fqn))  # the lowest rank that has it
        for fqn in one.own_values:
            key = per_rank_key(one.rank, fqn)
            values[key] = ValueItem(key, one.rank, fqn)
    return PersistPlan(tuple(tensors), tuple(values.values()))


def _choose(name: tuple[str, int | None], pieces: list[Piece], given: dict[int, int]) -> Iterator[tuple[Piece, Box]]:
    kinds = {(piece.entry.dtype, piece.entry.global_shape) for piece in pieces}
    if len(kinds) > 1:
        raise CorruptShardError(f"key {name[0]!r}: shards disagree on dtype and shape: {sorted(kinds)}")
    ((dtype, shape),) = kinds
    total = Box((0,) * len(shape), shape).volume
    same: dict[Box, list[Piece]] = {}
    for piece in pieces:
        same.setdefault(piece.entry.box, []).append(piece)
    tiled = sum(box.volume for box in same) == total and not uncovered({name: [p[0] for p in same.values()]})
    taken: list[Box] = []
    found = 0
    # The largest first, so that those that must be cut are cut into few parts.
    for box in same if tiled else sorted(same, key=lambda box: (-box.volume, box.offsets)):
        piece = min(same[box], key=lambda piece: (given[piece.ranks[0]], piece.ranks[0]))
        parts = [box] if tiled else _rest([box], taken)
        for part in parts:
            given[piece.ranks[0]] += part.volume * ITEMSIZE[dtype]
            found += part.volume
            yield piece, part
        taken += [] if tiled else parts
    if found != total:
        owner = "" if name[1] is None else f" of rank {name[1]}"
        raise CorruptShardError(f"key {name[0]!r}{owner}: shards hold {found} of {total} elements")


def _rest(boxes: list[Box], taken: list[Box]) -> list[Box]:
    """Return what is left of `boxes` without `taken`."""
    for gone in taken:
        boxes = [part for box in boxes for part in _without(box, gone)]
    return boxes


def _without(box: Box, gone: Box) -> Iterator[Box]:
    """Return `box` without `gone`, as boxes that do not overlap."""
    common = box.intersect(gone)
    if common is None or not box.volume:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        start, end = offsets[dim], offsets[dim] + sizes[dim]
        inner, inner_end = common.offsets[dim], common.offsets[dim] + common.sizes[dim]
        for low, high in ((start, inner), (inner_end, end)):
            if low < high:
                yield Box(
                    (*offsets[:dim], low, *offsets[dim + 1 :]),
                    (*sizes[:dim], high - low, *sizes[dim + 1 :]),
                )
        offsets[dim], sizes[dim] = inner, common.sizes[dim]


def _cut(box: Box, itemsize: int, piece_bytes: int) -> Iterator[Box]:
    rows = box.sizes[0] if box.sizes else 1
    row_bytes = box.volume // rows * itemsize if rows else 0
    step = max(1, piece_bytes // row_bytes) if row_bytes else rows
    if rows <= step:
        yield box
        return
    for start in range(0, rows, step):
        count = min(step, rows - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.sizes[1:]))
