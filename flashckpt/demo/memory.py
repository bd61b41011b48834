"""Shows what is in the nodes' memory, seen from outside: names and records only. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, NotFoundError
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Record, ShardId, age_order

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeContents:
    """Describes one node at one moment."""

    shards: Mapping[ShardId, int] = field(default_factory=dict)  # with their sizes in bytes
    records: tuple[Record, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(self.shards.values())

    def sealed_step(self, rank: int) -> int:
        """Return the newest step of which that rank's shard is here; 0 if there is none."""
        return max((shard.generation.step for shard in self.shards if shard.rank == rank), default=0)


def look(memory_dir: str, job: str) -> NodeContents:
    """Read a node's memory. Returns nothing if there is no directory, or if it is removed meanwhile."""
    try:
        with SlotStore.open(memory_dir, job, create=False) as store:
            shards = {}
            for sealed in store.scan():
                try:
                    shards[sealed.shard] = sealed.size_bytes
                except NotFoundError:
                    continue  # recycled meanwhile
            return NodeContents(shards, store.read_records())
    except (FlashError, OSError):
        return NodeContents()


def newest_record(nodes: Mapping[str, NodeContents]) -> Record | None:
    """Return the newest generation that any node knows to be committed."""
    records = [record for held in nodes.values() for record in held.records if record.replicas]
    return max(records, key=lambda record: age_order(record.generation), default=None)


def holders(nodes: Mapping[str, NodeContents], generation: Generation, rank: int) -> list[str]:
    """Return the nodes that hold this rank's shard of a generation."""
    return [
        name
        for name, held in nodes.items()
        if any(shard.generation == generation and shard.rank == rank for shard in held.shards)
    ]


def size_of(nodes: Mapping[str, NodeContents], generation: Generation, rank: int) -> int:
    """Return the size of one shard in bytes; 0 if no node has it."""
    for held in nodes.values():
        for shard, size_bytes in held.shards.items():
            if shard.generation == generation and shard.rank == rank:
                return size_bytes
    return 0
