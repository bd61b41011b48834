"""The retrieval plan: which chunks each node lacks, and which holders it asks for them. Pure, and alike on every
rank."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashckpt.errors import InternalError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.state.runs import runs
from flashckpt.types import ChunkRange, Portion, Retrieval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashckpt.load.catalogue import Catalogue
    from flashckpt.load.inventory import Copies
    from flashckpt.load.plan import Transfer

# Rank whose shard it is → the chunks of it that are lacking, as ascending ranges that do not touch.
Needs = dict[int, tuple[ChunkRange, ...]]

# Below this, a second connection costs more than it brings.
SPLIT_BYTES = 16 << 20
_MOST_PORTIONS = 4
# A node that needs nearly all of a shard fetches all of it: then it stays as a replica and need not be copied again.
_NEARLY_WHOLE = 7 / 8
# Ranks of a node that need the same chunks fetch them once, by their agent, unless their needs add up to less than this
# many times what the node needs.
_MOST_TWICE = 1.25

_COUNT = struct.Struct("<I")
_NEED = struct.Struct("<II")  # rank, ranges
_RANGE = struct.Struct("<II")  # first, count


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node of the launch that loads."""

    node_id: str
    domain: str


class Fetcher(NamedTuple):
    """Who carries out a retrieval: a rank for itself, or the agent of its node, which that rank asks."""

    node: int
    rank: int  # by its place in the group
    into_tensors: bool  # True: the rank, into its tensors; False: the agent


def needs_of(transfers: Iterable[Transfer], catalogue: Catalogue, near: frozenset[int]) -> Needs:
    """Returns the chunks that the transfers read from shards that do not lie on this node."""
    marks: dict[int, np.ndarray] = {}
    for transfer in transfers:
        rank = transfer.shard
        if rank in near or not transfer.overlap.volume:
            continue
        chunk_bytes = int(catalogue.shards["chunk_bytes"][rank])
        if rank not in marks:
            marks[rank] = np.zeros(catalogue.chunks(rank) + 1, dtype=np.int64)
        starts, _, length = runs(transfer.overlap, transfer.entry.box, transfer.overlap, ITEMSIZE[transfer.entry.dtype])
        starts = starts + transfer.entry.offset_bytes
        # Plus one where a run begins, minus one behind its end: a chunk is needed if the sum up to it is positive.
        np.add.at(marks[rank], starts // chunk_bytes, 1)
        np.add.at(marks[rank], (starts + length - 1) // chunk_bytes + 1, -1)
    return {rank: _ranges(np.cumsum(mark[:-1]) > 0) for rank, mark in sorted(marks.items())}


def _ranges(wanted: np.ndarray) -> tuple[ChunkRange, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return tuple(
        ChunkRange(first, end - first) for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )


def encode_needs(needs: Needs) -> bytes:
    parts = [_COUNT.pack(len(needs))]
    for rank, ranges in needs.items():
        parts.append(_NEED.pack(rank, len(ranges)))
        parts.extend(_RANGE.pack(one.first, one.count) for one in ranges)
    return b"".join(parts)


def decode_needs(data: bytes) -> Needs:
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    needs: Needs = {}
    for _ in range(count):
        rank, ranges = _NEED.unpack_from(data, at)
        at += _NEED.size
        end = at + ranges * _RANGE.size
        needs[rank] = tuple(ChunkRange(first, n) for first, n in _RANGE.iter_unpack(data[at:end]))
        at = end
    if at != len(data):
        raise InternalError(f"needs of {len(data)} bytes, expected {at}")
    return needs


def union(many: Iterable[Needs], chunks: Mapping[int, int]) -> Needs:
    """Returns what several ranks of a node need together. `chunks`: rank → number of chunks of its shard."""
    wanted: dict[int, np.ndarray] = {}
    for needs in many:
        for rank, ranges in needs.items():
            mask = wanted.setdefault(rank, np.zeros(chunks[rank], dtype=bool))
            for one in ranges:
                mask[one.first : one.first + one.count] = True
    return {rank: _ranges(mask) for rank, mask in sorted(wanted.items())}


def deal_out(
    needs: Sequence[Needs], able: Sequence[bool], members: Sequence[Sequence[int]], chunks: Mapping[int, int]
) -> dict[Fetcher, Needs]:
    """Returns who fetches what. `needs` and `able` are by rank, `members` are the ranks of each node.

    If all ranks of a node that lack something are able to, and need different chunks, each fetches into its tensors.
    Otherwise the node's agent fetches for all of them.
    """
    dealt: dict[Fetcher, Needs] = {}
    for node, ranks in enumerate(members):
        together = union([needs[rank] for rank in ranks], chunks)
        if not together:
            continue
        lacking = [rank for rank in ranks if needs[rank]]
        twice = sum(map(_count, (needs[rank] for rank in lacking))) > _MOST_TWICE * _count(together)
        if twice or not all(able[rank] for rank in lacking):
            dealt[Fetcher(node, ranks[0], into_tensors=False)] = together
        else:
            dealt |= {Fetcher(node, rank, into_tensors=True): needs[rank] for rank in lacking}
    return dealt


def _count(needs: Needs) -> int:
    return sum(one.count for ranges in needs.values() for one in ranges)


def plan_retrievals(
    needs: Mapping[Fetcher, Needs], copies: Copies, catalogue: Catalogue, places: Sequence[NodePlace]
) -> dict[Fetcher, tuple[Retrieval, ...]]:
    """Returns, for each fetcher, what to fetch from which holders.

    The largest are dealt out first: each to the holder in the same failure domain, else to the one that has least to
    send so far; large ones to several at once. The other holders are asked next if one fails.
    """
    given = [0] * len(places)  # bytes that each node has to send
    jobs = []
    for fetcher, lacking in needs.items():
        for rank, ranges in lacking.items():
            # A fetch into tensors has no room for more than the rank needs.
            whole = not fetcher.into_tensors and _is_nearly_whole(ranges, catalogue, rank)
            parts = (ChunkRange(0, catalogue.chunks(rank)),) if whole else ranges
            size = sum(one.count for one in parts) * int(catalogue.shards["chunk_bytes"][rank])
            jobs.append((-size, fetcher, rank, whole, parts))
    planned: dict[Fetcher, list[Retrieval]] = {}
    for minus_size, fetcher, rank, whole, parts in sorted(jobs, key=lambda job: job[:3]):
        copy, node = copies[rank], fetcher.node
        holders = [holder for holder in copy.nodes if holder != node]
        if not holders:
            raise InternalError(f"{copy.shard}: {places[node].node_id} needs it, and no other node has it")
        domain = places[node].domain

        def nearness(holder: int, domain: str = domain, node: int = node) -> tuple[bool, int, int]:
            other = not domain or places[holder].domain != domain
            return other, given[holder], (holder - node) % len(places)

        order = sorted(holders, key=nearness)
        # Split only among holders that are equally near: a part from another domain would take the slower way.
        equals = [h for h in order if nearness(h)[0] == nearness(order[0])[0]]
        count = min(len(equals), _MOST_PORTIONS) if -minus_size >= SPLIT_BYTES else 1
        portions = []
        for number, ranges in enumerate(_split(parts, count)):
            turned = order[number:] + order[:number]
            portions.append(Portion(ranges, tuple(places[holder].node_id for holder in turned)))
            given[turned[0]] += -minus_size // count
        planned.setdefault(fetcher, []).append(
            Retrieval(copy.shard, copy.digest, copy.tag, copy.size_bytes, whole, tuple(portions))
        )
    return {fetcher: tuple(retrievals) for fetcher, retrievals in planned.items()}


def _is_nearly_whole(ranges: Sequence[ChunkRange], catalogue: Catalogue, rank: int) -> bool:
    row = catalogue.shards[rank]
    with_tensors = max(1, -(-int(row["values_offset_bytes"]) // int(row["chunk_bytes"])))
    return sum(one.count for one in ranges) >= _NEARLY_WHOLE * min(with_tensors, catalogue.chunks(rank))


def _split(ranges: Sequence[ChunkRange], count: int) -> list[tuple[ChunkRange, ...]]:
    """Cuts ranges into `count` lists of about as many chunks each; none is empty."""
    total = sum(one.count for one in ranges)
    count = max(1, min(count, total))
    result: list[tuple[ChunkRange, ...]] = []
    left = list(ranges)
    for number in range(count):
        room = total * (number + 1) // count - total * number // count
        part: list[ChunkRange] = []
        while room and left:
            one = left.pop(0)
            taken = min(room, one.count)
            part.append(ChunkRange(one.first, taken))
            room -= taken
            if taken < one.count:
                left.insert(0, ChunkRange(one.first + taken, one.count - taken))
        result.append(tuple(part))
    return result
