"""Tracks the shards that a node answers for: which lie here, which nodes have those of its ranks, and which turned out
damaged here and have to come back. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.wire import Lost, WantBack
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.wire import Body
    from flashckpt.types import Generation, Held, ShardId


class Holdings:
    """What a node holds. A shard that is wanted back keeps its slot."""

    def __init__(self, current: CurrentLaunch) -> None:
        self._current = current
        self.held: dict[ShardId, Held] = {}
        self.acks: dict[ShardId, set[str]] = {}  # shards of this node's ranks → nodes that hold them, verified
        self.wanted: dict[ShardId, bytes] = {}  # copies that turned out damaged here; a holder pushes them back
        self.sources: dict[ShardId, set[str]] = {}  # wanted shards of this node's ranks → nodes that may have them

    def start(self, held: Iterable[Held]) -> None:
        """Adopt the shards found in the directory."""
        self.held = {one.shard: one for one in held}

    def enter(self) -> None:
        """Enter another launch: the shards here stay; who acknowledged copies, and what was wanted back, is
        forgotten."""
        self.acks.clear()
        self.wanted.clear()
        self.sources.clear()

    # --- questions ------------------------------------------------------------------------------------------

    def all_held(self) -> list[Held]:
        """Return all held shards, oldest first."""
        return sorted(self.held.values(), key=held_order)

    def own(self) -> list[Held]:
        """Return the held shards that ranks of this node wrote, oldest first."""
        return [held for held in self.all_held() if self._current.owns(held.shard)]

    def has_from(self, generation: Generation, rank: int) -> bool:
        return any(shard.generation == generation and shard.rank == rank for shard in self.held)

    def has_own(self, generation: Generation) -> bool:
        """Return True if the shards of all ranks of this node are held."""
        mine = self._current.member(self._current.node_id)
        held = {shard.rank for shard in self.held if shard.generation == generation}
        return mine is not None and held >= set(mine.ranks)

    def is_split(self, held: Held) -> bool:
        """Return True if ranks of this node divided their common tensors differently.

        They store what they share once between them: if their tags differ, they relied on each other for tensors that
        nobody stored. This shard is not reported yet, so nothing was committed.
        """
        owns = self._current.owns
        return owns(held.shard) and any(
            other.tag != held.tag
            for shard, other in self.held.items()
            if shard.generation == held.shard.generation and owns(shard)
        )

    def is_stranded(self, shard: ShardId) -> bool:
        """Return True if a shard of a rank of this node is lost and nobody can give it back."""
        return shard in self.wanted and not self.sources.get(shard)

    def missing_from(self, node_id: str) -> list[Body]:
        """Return what to tell the node of shards that are wanted back: it pushes what it has of ours, and learns which
        of its own are lost here."""
        news: list[Body] = []
        for shard, digest in self.wanted.items():
            owner = self._current.owner_of(shard)
            if owner == self._current.node_id and node_id in self.sources.get(shard, ()):
                news.append(WantBack(shard, digest))
            elif owner == node_id:
                news.append(Lost(shard))
        return news

    # --- changes --------------------------------------------------------------------------------------------

    def add(self, held: Held) -> bool:
        """Note that a shard lies here now. Return True if it was wanted back."""
        self.held[held.shard] = held
        self.sources.pop(held.shard, None)
        return self.wanted.pop(held.shard, None) is not None

    def lose(self, shard: ShardId) -> Held | None:
        """Note that a shard does not lie here any more. Return it, or None if it was not known."""
        return self.held.pop(shard, None)

    def acknowledge(self, shard: ShardId, node_id: str) -> int:
        """Note that one more node holds the shard. Return how many do."""
        nodes = self.acks.setdefault(shard, set())
        nodes.add(node_id)
        return len(nodes)

    def want_back(self, held: Held) -> None:
        """Want a replica back from its owner. The caller tells the owner."""
        self.wanted[held.shard] = held.digest

    def want_own_back(self, held: Held) -> set[str]:
        """Want a shard of this node's ranks back. Return the nodes to ask for it."""
        self.wanted[held.shard] = held.digest
        # Nodes that have not acknowledged it are asked too: a restarted agent has forgotten who had.
        nodes = self.acks.get(held.shard, set()) | set(self._current.buddies(held.shard.rank))
        self.sources[held.shard] = nodes
        return nodes

    def not_with(self, shard: ShardId, node_id: str) -> None:
        """Note that the node does not have a shard of this node's ranks."""
        self.acks.get(shard, set()).discard(node_id)
        if shard not in self.held and shard in self.sources:
            self.sources[shard].discard(node_id)

    def forget_wanted(self, which: Callable[[Generation], bool]) -> None:
        self.wanted = {s: digest for s, digest in self.wanted.items() if not which(s.generation)}
        self.sources = {s: nodes for s, nodes in self.sources.items() if s in self.wanted}

    def drop(self, generations: Collection[Generation]) -> list[ShardId]:
        """Forget these generations. Return their shards that lay here, in the order in which to release them."""
        # This node's own shards come first: an agent that died between two releases must not report a generation again
        # of which it has released replicas.
        going = [shard for shard in self.held if shard.generation in generations]
        going.sort(key=lambda shard: not self._current.owns(shard))
        for shard in going:
            del self.held[shard]
        self.acks = {s: nodes for s, nodes in self.acks.items() if s.generation not in generations}
        self.forget_wanted(lambda generation: generation in generations)
        return going


def held_order(held: Held) -> tuple[int, ...]:
    """Sort key: oldest first."""
    return (*age_order(held.shard.generation), held.shard.rank)
