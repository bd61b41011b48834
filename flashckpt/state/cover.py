"""Indexes the regions in the shards of a generation, and proves by volume that they hold every element. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashckpt.types import Box, Layout, ShardHeader, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Piece(NamedTuple):
    """One stored region and the shards that have it, at the same bytes."""

    ranks: tuple[int, ...]  # of these shards; ascending
    entry: TensorEntry


# (fqn, layout) → its stored regions. The layout is None for what all ranks share; for what belongs to one rank it is
# the index of its shard's layout.
Index = dict[tuple[str, int | None], list[Piece]]


def index(layouts: Sequence[Layout], ranks: Sequence[tuple[int, ...]]) -> Index:
    """Returns stored regions by name, from each different layout and the ranks whose shards have it."""
    stored: Index = {}
    for number, (layout, owners) in enumerate(zip(layouts, ranks, strict=True)):
        for entry in layout.entries:
            key = (entry.fqn, number if entry.per_rank else None)
            stored.setdefault(key, []).append(Piece(owners, entry))
    return stored


def index_headers(headers: Sequence[ShardHeader]) -> Index:
    """Returns the same from complete headers, ordered by rank, each with a layout of its own."""
    return index([header.layout for header in headers], [(header.shard.rank,) for header in headers])


def uncovered(stored: Index) -> list[str]:
    """Returns the reasons why tensors can't be put together from their regions. Empty = usable."""
    return list(uncovered_keys(stored).values())


def uncovered_keys(stored: Index) -> dict[tuple[str, int | None], str]:
    """Returns the same by key and layout, as in the index."""
    problems: dict[tuple[str, int | None], str] = {}
    for (fqn, layout), pieces in stored.items():
        if len(pieces) == 1 and _is_whole(pieces[0].entry):
            continue
        owner = f"key {fqn!r}" + (f" of rank {pieces[0].ranks[0]}" if layout is not None else "")
        kinds = {(piece.entry.dtype, piece.entry.global_shape) for piece in pieces}
        if len(kinds) > 1:
            problems[fqn, layout] = f"{owner}: shards disagree on dtype and shape: {sorted(kinds)}"
            continue
        ((_, shape),) = kinds
        problem = _cover_problem(shape, {piece.entry.box for piece in pieces})
        if problem:
            problems[fqn, layout] = f"{owner}: {problem}"
    return problems


def keys_in_chunks(layout: Layout, chunk_bytes: int, chunks: Sequence[int]) -> list[str]:
    """Returns the tensors that lie in these chunks of a shard, sorted. Looks at the first 64 chunks only."""
    return sorted(
        {
            entry.fqn
            for entry in layout.entries
            for chunk in chunks[:64]
            if entry.offset_bytes < (chunk + 1) * chunk_bytes
            and entry.offset_bytes + entry.length_bytes > chunk * chunk_bytes
        }
    )


def _is_whole(entry: TensorEntry) -> bool:
    """Returns True if the entry is the whole tensor, like most entries."""
    return entry.box.sizes == entry.global_shape and not any(entry.box.offsets)


def _cover_problem(shape: tuple[int, ...], boxes: set[Box]) -> str:
    total = Box((0,) * len(shape), shape).volume
    have = sum(box.volume for box in boxes)
    if have != total:
        return f"shards hold {have} of {total} elements"
    # With the volumes equal, the boxes fill the tensor exactly if no two of them overlap.
    clash = _overlap(boxes)
    return f"regions {clash[0]} and {clash[1]} overlap" if clash else ""


def _overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Returns two boxes that share an element, if any. Sweeps along the first dimension: a grid of n costs about
    n·√n."""
    active: list[Box] = []
    for box in sorted((b for b in boxes if b.volume), key=lambda b: b.offsets):
        if not box.offsets:
            if active:
                return active[0], box
            active.append(box)
            continue
        active = [other for other in active if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None
