"""Pushes that have to happen, and when each is tried again. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import NoSpaceError
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.types import Generation, Held, ShardId

_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class Transfer:
    """One shard on its way to one node."""

    held: Held
    node_id: str
    heals: bool = False  # asked for by the healer, which asks again: one try
    running: bool = False
    acked: bool = False  # it ended, and the node has these very bytes
    failures: int = 0
    next_at: float = 0.0
    problem: str = ""
    short_since: float | None = None  # the node has had no room for it since then, whenever it was asked

    def failed(self, reason: str, now: float, first: float, most: float) -> None:
        """It is tried again, later each time."""
        self.failures += 1
        self.problem = reason
        is_short = NoSpaceError.code in reason
        self.short_since = (now if self.short_since is None else self.short_since) if is_short else None
        self.next_at = now + min(first * 2 ** min(self.failures - 1, _MOST_DOUBLINGS), most)


class Transfers(dict["tuple[ShardId, str]", Transfer]):
    """By shard and node."""

    def want(self, held: Held, node_id: str, now: float, *, heals: bool = False) -> None:
        one = self.setdefault((held.shard, node_id), Transfer(held, node_id, heals=heals, next_at=now))
        one.heals = one.heals and heals

    def start_due(self, now: float, per_node: int) -> list[Transfer]:
        """Those that begin now; at most so many run to one node at a time."""
        running: dict[str, int] = {}
        for one in self.values():
            running[one.node_id] = running.get(one.node_id, 0) + one.running
        started = []
        # The oldest first: its commit is what frees memory. What only heals must not hold a commit up.
        for one in sorted(self.values(), key=lambda one: (one.heals, held_order(one.held))):
            if not one.running and now >= one.next_at and running[one.node_id] < per_node:
                one.running = True
                running[one.node_id] += 1
                started.append(one)
        return started

    def drop(self, shard: ShardId) -> None:
        for key in [key for key in self if key[0] == shard]:
            del self[key]

    def drop_generations(self, generations: Collection[Generation]) -> None:
        for key in [key for key in self if key[0].generation in generations]:
            del self[key]

    def of(self, shard: ShardId) -> list[Transfer]:
        return [one for one in self.values() if one.held.shard == shard]


def held_order(held: Held) -> tuple[int, ...]:
    """Oldest first."""
    return (*age_order(held.shard.generation), held.shard.rank)
