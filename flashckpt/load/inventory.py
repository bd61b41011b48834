"""The inventory: which node holds which shards. Encoded once per node, gathered once, merged into one table. Pure.

A table instead of objects, because 10,000 nodes have hundreds of thousands of copies, and every rank looks at all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import InternalError
from flashckpt.protocol.line import by_head, launch_of
from flashckpt.protocol.line import decode as decode_line
from flashckpt.protocol.line import encode as encode_line
from flashckpt.types import Generation, Launch, ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.protocol.line import Line
    from flashckpt.protocol.node_inventory import NodeInventory

Table = npt.NDArray[Any]
NOBODY = 0xFFFFFFFF

_VERSION = 3
# version, quarantined, damaged lines, bytes of lines, launches, generations, copies, damaged
_HEAD = struct.Struct("<IIIIIIII")
_LENGTH = struct.Struct("<I")  # before each line
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
    generations: tuple[tuple[Generation, int], ...]  # with the world size that its shards name
    copies: Table  # one row per copy: node and generation are indices into the above
    damaged: tuple[tuple[Generation, int, str], ...]  # a shard's rank, and what is wrong with a copy on which node
    lines: tuple[Line, ...]  # of each launch that one of the nodes knows, oldest first
    quarantined: int
    remembered: dict[Launch, int]  # earlier launches → the first node that knows their members
    damaged_lines: tuple[str, ...] = ()  # nodes with damaged line files

    def launches(self) -> set[Launch]:
        """Returns the launches of which a shard is left, whether its generation is complete or not."""
        return {launch_of(generation) for generation, _ in self.generations}

    def of(self, generation: Generation) -> Table:
        """Returns the copies of its shards, ordered by rank and node. Empty if no node has any."""
        indices = [i for i, (other, _) in enumerate(self.generations) if other == generation]
        rows = self.copies[np.isin(self.copies["generation"], indices)]
        return rows[np.lexsort((rows["node"], rows["rank"]))]

    def damage(self, generation: Generation) -> list[tuple[int, str]]:
        """Returns (rank, reason) for each of its damaged copies."""
        return [(rank, reason) for other, rank, reason in self.damaged if other == generation]

    def worlds(self, generation: Generation) -> list[int]:
        """Returns the world sizes that its shards name; more than one means that they do not belong together."""
        return sorted({world for other, world in self.generations if other == generation})


def encode(inventory: NodeInventory) -> bytes:
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
    encoded = [encode_line(line) for line in inventory.lines]
    lines = b"".join(_LENGTH.pack(len(one)) + one for one in encoded)
    return b"".join(
        [
            _HEAD.pack(
                _VERSION,
                inventory.quarantined,
                inventory.damaged_lines,
                len(lines),
                len(launches),
                len(index),
                len(rows),
                len(inventory.damaged),
            ),
            lines,
            *(_LAUNCH.pack(launch.epoch, launch.nonce) for launch in launches),
            *(_GENERATION.pack(*generation, world) for generation, world in index),
            np.array(rows, dtype=_COPY).tobytes(),
            *damaged,
        ]
    )


class _Merger:
    """Merges encoded inventories. Adds the nodes one by one, and decodes the copies of all of them at once."""

    def __init__(self) -> None:
        self.index: dict[bytes, int] = {}  # encoded generation → its number
        self.remembered: dict[Launch, int] = {}
        self.damaged: list[tuple[Generation, int, str]] = []
        self.lines: list[Line] = []
        self.damaged_lines: list[str] = []
        self.quarantined = 0
        self._tables: list[bytes] = []
        self._counts: list[int] = []
        self._bases: list[int] = []  # of each node's generations in `translate`
        self._translate: list[int] = []

    def add(self, node: int, node_id: str, data: bytes) -> None:
        if len(data) < _HEAD.size:
            raise InternalError(f"inventory of {len(data)} bytes, expected at least {_HEAD.size}")
        version, quarantined, bad_lines, line_bytes, launches, generations, copies, damaged = _HEAD.unpack_from(data)
        launches_at = _HEAD.size + line_bytes
        generations_at = launches_at + launches * _LAUNCH.size
        copies_at = generations_at + generations * _GENERATION.size
        damaged_at = copies_at + copies * _COPY.itemsize
        if version != _VERSION or len(data) < damaged_at:
            raise InternalError(f"inventory version {version} of {len(data)} bytes with {copies} copies")
        self.quarantined += quarantined
        self._add_lines(data[_HEAD.size : launches_at])
        self.damaged_lines += [node_id] if bad_lines else []
        for launch in _LAUNCH.iter_unpack(data[launches_at:generations_at]):
            self.remembered.setdefault(Launch(*launch), node)
        keys = [data[at : at + _GENERATION.size] for at in range(generations_at, copies_at, _GENERATION.size)]
        self._bases.append(len(self._translate))
        self._translate += [self.index.setdefault(key, len(self.index)) for key in keys]
        self._tables.append(data[copies_at:damaged_at])
        self._counts.append(copies)
        self._add_damaged(node_id, data, damaged_at, damaged, keys)

    def _add_lines(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            line = decode_line(data[at - length : at])
            if line is None:
                raise InternalError(f"inventory: expected a line, found {length} other bytes")
            self.lines.append(line)

    def _add_damaged(self, node_id: str, data: bytes, at: int, count: int, keys: list[bytes]) -> None:
        for _ in range(count):
            number, rank, length = _DAMAGED.unpack_from(data, at)
            at += _DAMAGED.size + length
            reason = data[at - length : at].decode(errors="replace")
            self.damaged.append((_generation(keys[number])[0], rank, f"{node_id}: {reason}"))
        if at != len(data):
            raise InternalError(f"inventory of {len(data)} bytes, expected {at}")

    def copies(self) -> Table:
        told = np.frombuffer(b"".join(self._tables), dtype=_COPY)
        table = np.empty(len(told), dtype=_COPY_OF_NODE)
        for name in _COPY.names or ():
            table[name] = told[name]
        table["node"] = np.repeat(np.arange(len(self._counts)), self._counts)
        limits = np.diff([*self._bases, len(self._translate)])
        if len(told):
            if (told["generation"] >= np.repeat(limits, self._counts)).any():
                raise InternalError("inventory: expected copies of the generations that it lists, found one of another")
            numbers = np.repeat(self._bases, self._counts) + told["generation"]
            table["generation"] = np.array(self._translate, dtype=np.uint32)[numbers]
        return table


def merge(nodes: Sequence[str], encoded: Iterable[bytes]) -> Inventory:
    """Merges the nodes' encoded inventories into one."""
    merger = _Merger()
    for number, data in enumerate(encoded):
        merger.add(number, nodes[number], data)
    return Inventory(
        tuple(nodes),
        tuple(map(_generation, merger.index)),
        merger.copies(),
        tuple(merger.damaged),
        tuple(by_head(merger.lines).values()),
        merger.quarantined,
        merger.remembered,
        tuple(merger.damaged_lines),
    )


def _generation(key: bytes) -> tuple[Generation, int]:
    *generation, world = _GENERATION.unpack(key)
    return Generation(*generation), world


@dataclass(frozen=True, slots=True)
class Copy:
    """One shard, as the inventory describes it, with its holders."""

    shard: ShardId
    digest: bytes
    tag: int
    size_bytes: int
    nodes: tuple[int, ...]  # indices of those that hold it, ascending


class Copies:
    """The shards of one generation with their holders. All copies of a shard have the same digest. Every rank has a
    shard, unless a load takes parts of an incomplete generation."""

    def __init__(self, generation: Generation, world: int, rows: Table) -> None:
        """`rows` are ordered by rank and node (see choose.py)."""
        self.generation = generation
        self.world = world
        self._rows = rows
        self._starts = np.searchsorted(rows["rank"], np.arange(world + 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks whose shards a node has, ascending."""
        return tuple(np.flatnonzero(np.diff(self._starts)).tolist())

    @property
    def agree(self) -> bool:
        """Returns True if all copies of each shard have the same digest."""
        same_rank = self._rows["rank"][1:] == self._rows["rank"][:-1]
        return not bool((same_rank & (self._rows["digest"][1:] != self._rows["digest"][:-1])).any())

    def __getitem__(self, rank: int) -> Copy:
        start, end = int(self._starts[rank]), int(self._starts[rank + 1])
        row = self._rows[start]
        return Copy(
            ShardId(self.generation, rank, self.world),
            row["digest"].tobytes(),
            int(row["tag"]),
            int(row["size_bytes"]),
            tuple(self._rows["node"][start:end].tolist()),
        )

    def on(self, node: int) -> list[int]:
        """Returns the ranks whose shards lie on this node, ascending."""
        ranks: list[int] = self._rows["rank"][self._rows["node"] == node].tolist()
        return ranks

    def tellers(self) -> npt.NDArray[np.uint32]:
        """Returns, by rank, the node that describes its shard to the others; NOBODY if no node has the shard.

        The ranks are spread over the holders, so that each describes about as many.
        """
        nodes: npt.NDArray[np.uint32] = np.full(self.world, NOBODY, dtype=np.uint32)
        ranks, counts = np.array(self.ranks, dtype=np.int64), np.diff(self._starts)
        nodes[ranks] = self._rows["node"][self._starts[:-1][ranks] + ranks % counts[ranks]]
        return nodes

    def without(self, bad: frozenset[tuple[int, int]]) -> Copies | None:
        """Returns these copies without the bad ones, given as (node, rank). None if there was none to remove, or if a
        shard has no copy left."""
        drop = np.zeros(len(self._rows), dtype=bool)
        for node, rank in bad:
            drop |= (self._rows["node"] == node) & (self._rows["rank"] == rank)
        left = Copies(self.generation, self.world, self._rows[~drop])
        return left if drop.any() and left.ranks == self.ranks else None


def copies_of(inventory: Inventory, generation: Generation) -> Copies:
    """Returns the copies of a generation that choose() made a candidate, or named as one with missing shards."""
    (world,) = inventory.worlds(generation)
    return Copies(generation, world, inventory.of(generation))
