"""Chooses the rank whose shard all assumed tensors are loaded from.

Their values may differ between ranks, so a load must not combine the mean of one rank with the variance of another. It
takes the values of the lowest rank that stores them. A nearer copy is read instead only if checksums prove it equal.
The functions here are pure.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashckpt.format.caps import CRC_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flashckpt.state.cover import Index, Piece
    from flashckpt.types import Layout, TensorEntry

_CHUNK_BYTES = struct.Struct("<I")


class Group(NamedTuple):
    """Shards that store the same assumed tensors at the same bytes of their data areas."""

    entries: dict[str, TensorEntry]
    ranks: tuple[int, ...]  # of these shards; ascending


class AssumedChoice(NamedTuple):
    """Some of the wanted keys, and the group whose lowest rank all of them come from."""

    keys: tuple[str, ...]
    group: Group

    @property
    def rank(self) -> int:
        return self.group.ranks[0]


class AssumedTensors:
    """The assumed tensors of one generation."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        ranks: Sequence[tuple[int, ...]],
        ends: Sequence[int],
        digests: Sequence[int] | Mapping[int, int],
    ) -> None:
        """`ends`: for each layout the offset where its assumed tensors end; 0: it has none. `digests`: for each rank
        the digest of its checksum table (make_table); 0: not known."""
        found: dict[tuple[tuple[TensorEntry, ...], int], list[int]] = {}
        for layout, owners, end in zip(layouts, ranks, ends, strict=True):
            if end:
                # Assumed tensors come first; the other entries may differ between the shards of a group.
                count = bisect_left(layout.entries, end, key=lambda entry: entry.offset_bytes)
                found.setdefault((layout.entries[:count], end), []).extend(owners)
        groups = (
            Group({one.fqn: one for one in entries if _is_assumed(one, end)}, tuple(sorted(owners)))
            for (entries, end), owners in found.items()
        )
        self.groups = sorted((group for group in groups if group.entries), key=lambda group: group.ranks)
        self._digests = digests

    def choose(self, wanted: Iterable[str]) -> list[AssumedChoice]:
        """Splits the wanted keys into as few choices as possible: one, if any shard holds all of them.

        Keys that are not assumed are left out.
        """
        left = dict.fromkeys(wanted)
        choices = []
        while left:
            best: tuple[str, ...] = ()
            for group in self.groups:  # in the order of their lowest rank, which wins among equals
                keys = tuple(fqn for fqn in left if fqn in group.entries)
                if len(keys) > len(best):
                    best, chosen = keys, group
            if not best:
                break
            choices.append(AssumedChoice(best, chosen))
            for fqn in best:
                del left[fqn]
        return choices

    def equals(self, group: Group) -> tuple[int, ...]:
        """Returns the ranks of the group whose assumed tensors are proved equal to those of its lowest rank."""
        first = self._digests[group.ranks[0]]
        return tuple(rank for rank in group.ranks if first and self._digests[rank] == first) or group.ranks[:1]

    def differing(self) -> list[Group]:
        """Returns the groups whose ranks do not all hold equal tensors. The tables of their lowest ranks are needed."""
        return [group for group in self.groups if len(self.equals(group)) < len(group.ranks)]

    def sources(
        self,
        wanted: Iterable[str],
        reader: Reader,
        references: Mapping[int, bytes],
        table_of: Callable[[int], bytes | None],
    ) -> dict[str, int]:
        """Returns, for each wanted key that is assumed, the rank whose shard it is read from.

        `references` has the tables of the lowest ranks of `differing` groups. `table_of` reads the table of a shard on
        this node; None: it can't be read.
        """
        sources: dict[str, int] = {}
        for choice in self.choose(wanted):
            distance, rank = reader.pick(self.equals(choice.group))
            sources.update(dict.fromkeys(choice.keys, rank))
            reference = references.get(choice.rank)
            if distance < 2 or reference is None:
                continue
            for near in sorted(set(reader.near).intersection(choice.group.ranks), key=lambda one: one != reader.rank):
                table = table_of(near)
                if table is None:
                    continue
                for fqn in choice.keys:
                    if is_equal(choice.group.entries[fqn], table, reference):
                        sources[fqn] = near
                break
        return sources


def _is_assumed(entry: TensorEntry, end_bytes: int) -> bool:
    """Checks that an entry before the end of the assumed tensors is one. A header may be wrong."""
    is_whole = entry.box.sizes == entry.global_shape and not entry.per_rank
    return is_whole and 0 < entry.length_bytes <= end_bytes - entry.offset_bytes


def only_from_one(stored: Index, assumed: AssumedTensors) -> Index:
    """Returns the same regions, but each assumed tensor from its chosen rank only. For readers of all shards."""
    wanted = (fqn for fqn, owner in stored if owner is None)
    chosen = {fqn: choice.rank for choice in assumed.choose(wanted) for fqn in choice.keys}
    return {
        (fqn, owner): _of_rank(pieces, chosen[fqn]) if owner is None and fqn in chosen else pieces
        for (fqn, owner), pieces in stored.items()
    }


def piece_of(pieces: Sequence[Piece], rank: int) -> Piece:
    """Returns the piece in this rank's shard that is the whole tensor."""
    return next(piece for piece in pieces if rank in piece.ranks and piece.entry.box.sizes == piece.entry.global_shape)


def _of_rank(pieces: Sequence[Piece], rank: int) -> list[Piece]:
    return [piece_of(pieces, rank)._replace(ranks=(rank,))]


def make_table(chunk_bytes: int, chunk_crcs: bytes, end_bytes: int, tail_crc: int) -> bytes:
    """Returns the checksums of the assumed tensors of one shard: one per full chunk, and `tail_crc` for the rest."""
    complete = end_bytes // chunk_bytes
    tail = tail_crc.to_bytes(CRC_BYTES, "little") if end_bytes % chunk_bytes else b""
    return _CHUNK_BYTES.pack(chunk_bytes) + chunk_crcs[: complete * CRC_BYTES] + tail


def is_equal(entry: TensorEntry, one: bytes, other: bytes) -> bool:
    """Returns True if two tables prove that both shards hold the same bytes of this entry, at the same offset."""
    (chunk_bytes,) = _CHUNK_BYTES.unpack_from(one)
    first = entry.offset_bytes // chunk_bytes
    last = (entry.offset_bytes + entry.length_bytes - 1) // chunk_bytes
    start, stop = (_CHUNK_BYTES.size + at * CRC_BYTES for at in (first, last + 1))
    return one[: _CHUNK_BYTES.size] == other[: _CHUNK_BYTES.size] and one[start:stop] == other[start:stop] != b""


@dataclass(frozen=True, slots=True)
class Reader:
    """The rank that reads, its layout, and the shards near it."""

    rank: int
    layout: int | None  # of the shard that this rank saved; None if the rank did not exist then
    near: tuple[int, ...] = ()  # ranks whose shards lie on this node

    def pick(self, ranks: tuple[int, ...]) -> tuple[int, int]:
        """Returns (distance, rank) of the nearest of equal shards. Far ones are spread over the readers."""
        if _has(ranks, self.rank):
            return 0, self.rank
        for rank in self.near:
            if _has(ranks, rank):
                return 1, rank
        return 2, ranks[self.rank % len(ranks)]


def _has(ranks: tuple[int, ...], rank: int) -> bool:
    at = bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank
