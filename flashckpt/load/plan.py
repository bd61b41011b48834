"""The read plan: which stored bytes fill which part of which live tensor. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flashckpt.errors import MissingKeyError, StructureError
from flashckpt.state.assumed import Reader, piece_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flashckpt.state.cover import Index, Piece
    from flashckpt.types import Box, TensorEntry


class Want(NamedTuple):
    """One region that this rank has to fill."""

    fqn: str
    per_rank: bool
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    target: int  # index of the tensor to fill, among the caller's


class Transfer(NamedTuple):
    """A copy of the box `overlap` of the global tensor, from one stored entry to one wanted region."""

    shard: int  # rank whose shard it is
    entry: TensorEntry
    want: Want
    overlap: Box


def plan(
    wants: Sequence[Want],
    stored: Index,
    reader: Reader,
    sources: Mapping[str, int] = MappingProxyType({}),
    *,
    cast: bool,
) -> list[Transfer]:
    """Returns transfers that fill every want completely. Raises if there are none; no tensor has been touched then.

    `sources`: for each assumed tensor (state/assumed.py) the rank whose shard all of it has to come from.
    """
    transfers: list[Transfer] = []
    picked: dict[int, tuple[int, int]] = {}  # by the identity of a layout's ranks, which all its pieces share

    def pick(piece: Piece) -> tuple[int, int]:
        key = id(piece.ranks)
        if key not in picked:
            picked[key] = reader.pick(piece.ranks)
        return picked[key]

    for want in wants:
        pieces = stored.get((want.fqn, reader.layout)) if want.per_rank else stored.get((want.fqn, None))
        if pieces is None or (want.per_rank and reader.layout is None):
            raise MissingKeyError(f"key {want.fqn!r}: not in the checkpoint", key=want.fqn)
        _check_fits(want, pieces[0].entry, cast)
        if not want.per_rank and want.fqn in sources:
            entry = piece_of(pieces, sources[want.fqn]).entry
            transfers.append(Transfer(sources[want.fqn], entry, want, want.box))
            continue
        if len(pieces) == 1 and pieces[0].entry.box == want.box and 0 not in want.box.sizes:
            transfers.append(Transfer(pick(pieces[0])[1], pieces[0].entry, want, want.box))
            continue
        filled = 0
        for piece in _nearest(pieces, pick):
            overlap = piece.entry.box.intersect(want.box)
            if overlap is not None:
                transfers.append(Transfer(pick(piece)[1], piece.entry, want, overlap))
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


def _nearest(pieces: Iterable[Piece], pick: Callable[[Piece], tuple[int, int]]) -> list[Piece]:
    """Returns the nearest piece of each region."""
    best: dict[Box, Piece] = {}
    for piece in pieces:
        known = best.get(piece.entry.box)
        if known is None or pick(piece)[0] < pick(known)[0]:
            best[piece.entry.box] = piece
    return list(best.values())
