"""Inventory: which shards lie where. Encoded once a node, gathered once, merged into one table. Pure.

A table and not objects: with 10,000 nodes there are hundreds of thousands of copies, and every rank looks through
them all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import InternalError
from flashckpt.types import Fence, Generation, Launch, ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.types import NodeInventory

Table = npt.NDArray[Any]

_VERSION = 2
# version, quarantined, fence (step, epoch, nonce), launches, generations, copies, damaged
_HEAD = struct.Struct("<IIqQQIIII")
_LAUNCH = struct.Struct("<QQ")  # epoch, nonce
_GENERATION = struct.Struct("<QQqQI")  # epoch, nonce, step, seq, world
_DAMAGED = struct.Struct("<III")  # generation (index), rank, bytes of the reason that follows
_REASON_BYTES = 400
_COPY = np.dtype(
    [
        ("generation", "<u4"),  # index into the generations
        ("rank", "<u4"),
        ("tag", "<u8"),
        ("size_bytes", "<u8"),
        ("level", "u1"),
        ("verified", "u1"),
        ("digest", "V16"),
    ]
)
_COPY_OF_NODE = np.dtype([("node", "<u4"), *((name, _COPY.fields[name][0]) for name in _COPY.names or ())])  # type: ignore[index]


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """What all nodes hold together."""

    nodes: tuple[str, ...]
    generations: tuple[tuple[Generation, int], ...]  # with the number of ranks that its shards speak of
    copies: Table  # one row a copy: node and generation are indices into the above
    damaged: tuple[tuple[Generation, int, str], ...]  # a shard's rank, and what is wrong with a copy of it where
    fence: Fence | None  # the newest
    quarantined: int
    remembered: dict[Launch, int]  # earlier launches → the first node that knows their members

    @property
    def is_empty(self) -> bool:
        return not len(self.copies)

    def of(self, generation: Generation) -> Table:
        """The copies of its shards, ordered by rank and node. Empty where nobody has any."""
        indices = [i for i, (other, _) in enumerate(self.generations) if other == generation]
        rows = self.copies[np.isin(self.copies["generation"], indices)]
        return rows[np.lexsort((rows["node"], rows["rank"]))]

    def damage(self, generation: Generation) -> list[tuple[int, str]]:
        """Ranks and reasons."""
        return [(rank, reason) for other, rank, reason in self.damaged if other == generation]

    def worlds(self, generation: Generation) -> list[int]:
        """How many ranks its shards say that it has; more than one answer means that they do not belong together."""
        return sorted({world for other, world in self.generations if other == generation})


def encode(inventory: NodeInventory) -> bytes:
    fence = inventory.fence or Fence(step=0, epoch=0, nonce=0)
    index: dict[tuple[Generation, int], int] = {}
    rows = []
    for one in inventory.holdings:
        held = one.held
        key = (held.shard.generation, held.shard.world)
        number = index.setdefault(key, len(index))
        rows.append((number, held.shard.rank, held.tag, held.size_bytes, one.level, one.verified, held.digest))
    damaged = []
    for shard, reason in inventory.damaged:
        number = index.setdefault((shard.generation, shard.world), len(index))
        text = reason.encode()[:_REASON_BYTES]
        damaged += [_DAMAGED.pack(number, shard.rank, len(text)), text]
    launches = [session.launch for session in inventory.past]
    return b"".join(
        [
            _HEAD.pack(
                _VERSION,
                inventory.quarantined,
                fence.step,
                fence.epoch,
                fence.nonce,
                len(launches),
                len(index),
                len(rows),
                len(inventory.damaged),
            ),
            *(_LAUNCH.pack(launch.epoch, launch.nonce) for launch in launches),
            *(_GENERATION.pack(*generation, world) for generation, world in index),
            np.array(rows, dtype=_COPY).tobytes(),
            *damaged,
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Decoded:
    launches: tuple[Launch, ...]
    generations: tuple[tuple[Generation, int], ...]
    copies: Table
    damaged: tuple[tuple[Generation, int, str], ...]
    fence: Fence | None
    quarantined: int


def _decode(data: bytes) -> _Decoded:
    if len(data) < _HEAD.size:
        raise InternalError(f"inventory of {len(data)} bytes, expected at least {_HEAD.size}")
    version, quarantined, step, epoch, nonce, launches, generations, copies, damaged = _HEAD.unpack_from(data)
    generations_at = _HEAD.size + launches * _LAUNCH.size
    copies_at = generations_at + generations * _GENERATION.size
    damaged_at = copies_at + copies * _COPY.itemsize
    if version != _VERSION or len(data) < damaged_at:
        raise InternalError(f"inventory version {version} of {len(data)} bytes with {copies} copies")
    table = np.frombuffer(data, dtype=_COPY, count=copies, offset=copies_at)
    if copies and int(table["generation"].max()) >= generations:
        raise InternalError(f"inventory: a copy of generation {table['generation'].max()} of {generations}")
    found = tuple((Generation(*one[:4]), one[4]) for one in _GENERATION.iter_unpack(data[generations_at:copies_at]))
    return _Decoded(
        tuple(Launch(*one) for one in _LAUNCH.iter_unpack(data[_HEAD.size : generations_at])),
        found,
        table,
        _decode_damaged(data, damaged_at, damaged, [generation for generation, _ in found]),
        # Epoch 0 is never a launch's: it stands for "no fence".
        Fence(step, epoch, nonce) if epoch else None,
        quarantined,
    )


def _decode_damaged(
    data: bytes, at: int, count: int, generations: list[Generation]
) -> tuple[tuple[Generation, int, str], ...]:
    found = []
    for _ in range(count):
        number, rank, length = _DAMAGED.unpack_from(data, at)
        at += _DAMAGED.size + length
        found.append((generations[number], rank, data[at - length : at].decode(errors="replace")))
    if at != len(data):
        raise InternalError(f"inventory of {len(data)} bytes, expected {at}")
    return tuple(found)


def merge(nodes: Sequence[str], encoded: Iterable[bytes]) -> Inventory:
    """What all nodes hold together, from what each of them encoded; the newest fence counts."""
    index: dict[tuple[Generation, int], int] = {}
    remembered: dict[Launch, int] = {}
    parts = []
    damaged: list[tuple[Generation, int, str]] = []
    fence: Fence | None = None
    quarantined = 0
    for number, data in enumerate(encoded):
        one = _decode(data)
        quarantined += one.quarantined
        damaged += [(generation, rank, f"{nodes[number]}: {reason}") for generation, rank, reason in one.damaged]
        if one.fence is not None and (fence is None or fence.order < one.fence.order):
            fence = one.fence
        for launch in one.launches:
            remembered.setdefault(launch, number)
        translate = np.array([index.setdefault(key, len(index)) for key in one.generations], dtype=np.uint32)
        part = np.empty(len(one.copies), dtype=_COPY_OF_NODE)
        part["node"] = number
        for name in _COPY.names or ():
            part[name] = one.copies[name]
        if len(part):
            part["generation"] = translate[one.copies["generation"]]
        parts.append(part)
    copies = np.concatenate(parts) if parts else np.empty(0, dtype=_COPY_OF_NODE)
    return Inventory(tuple(nodes), tuple(index), copies, tuple(damaged), fence, quarantined, remembered)


@dataclass(frozen=True, slots=True)
class Copy:
    """What is known of one shard before any of its bytes is read."""

    shard: ShardId
    digest: bytes
    tag: int
    size_bytes: int
    nodes: tuple[int, ...]  # indices of those that hold it, ascending


def shards_of(inventory: Inventory, generation: Generation) -> dict[int, Copy]:
    """Its shards by rank, each with its holders. For a generation whose copies agree (see choose.py)."""
    (world,) = inventory.worlds(generation)
    rows = inventory.of(generation)
    found: dict[int, Copy] = {}
    ranks, starts = np.unique(rows["rank"], return_index=True)
    ends = [*starts[1:].tolist(), len(rows)]
    nodes = rows["node"].tolist()
    for rank, start, end in zip(ranks.tolist(), starts.tolist(), ends, strict=True):
        row = rows[start]
        found[rank] = Copy(
            ShardId(generation, rank, world),
            row["digest"].tobytes(),
            int(row["tag"]),
            int(row["size_bytes"]),
            tuple(nodes[start:end]),
        )
    return found
