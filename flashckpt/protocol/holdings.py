"""Where the shards are that a node answers for: what lies here, who else has what its ranks wrote, and what turned out
bad here and has to come back. No I/O."""

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
    """What is wanted back keeps its place: its slot is not given away."""

    def __init__(self, current: CurrentLaunch) -> None:
        self._current = current
        self.held: dict[ShardId, Held] = {}
        self.acks: dict[ShardId, set[str]] = {}  # shards of this node's ranks → nodes that hold them, verified
        self.wanted: dict[ShardId, bytes] = {}  # copies that turned out bad here; a holder pushes them back
        self.sources: dict[ShardId, set[str]] = {}  # of what is wanted for a rank of this node: who may have it

    def start(self, held: Iterable[Held]) -> None:
        """With what lies in the directory."""
        self.held = {one.shard: one for one in held}

    def enter(self) -> None:
        """Another launch: what lies here stays, whom others have told what is forgotten."""
        self.acks.clear()
        self.wanted.clear()
        self.sources.clear()

    # --- questions ------------------------------------------------------------------------------------------

    def all_held(self) -> list[Held]:
        """Oldest first."""
        return sorted(self.held.values(), key=held_order)

    def own(self) -> list[Held]:
        """Those that ranks of this node wrote, oldest first."""
        return [held for held in self.all_held() if self._current.owns(held.shard)]

    def has_from(self, generation: Generation, rank: int) -> bool:
        return any(shard.generation == generation and shard.rank == rank for shard in self.held)

    def has_own(self, generation: Generation) -> bool:
        """The shards of all ranks of this node."""
        mine = self._current.member(self._current.node_id)
        held = {shard.rank for shard in self.held if shard.generation == generation}
        return mine is not None and held >= set(mine.ranks)

    def is_split(self, held: Held) -> bool:
        """Ranks of a node store what they share once between them: with different tags they relied on each other
        for tensors that nobody stored. This shard is not reported yet, so that nothing was committed."""
        owns = self._current.owns
        return owns(held.shard) and any(
            other.tag != held.tag
            for shard, other in self.held.items()
            if shard.generation == held.shard.generation and owns(shard)
        )

    def is_stranded(self, shard: ShardId) -> bool:
        """A shard of a rank of this node that nobody can give back."""
        return shard in self.wanted and not self.sources.get(shard)

    def missing_from(self, node_id: str) -> list[Body]:
        """What the node has to be told of what is wanted back: by its owner, what to push; else, that it is lost."""
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
        """It lies here now; whether it was wanted back."""
        self.held[held.shard] = held
        self.sources.pop(held.shard, None)
        return self.wanted.pop(held.shard, None) is not None

    def lose(self, shard: ShardId) -> Held | None:
        """It does not lie here any more; None where it is not known to have."""
        return self.held.pop(shard, None)

    def acknowledge(self, shard: ShardId, node_id: str) -> int:
        """One more node holds it; how many do."""
        nodes = self.acks.setdefault(shard, set())
        nodes.add(node_id)
        return len(nodes)

    def want_back(self, held: Held) -> None:
        """From its owner, which the caller tells."""
        self.wanted[held.shard] = held.digest

    def want_own_back(self, held: Held) -> set[str]:
        """From those that the caller asks for it, which are returned."""
        self.wanted[held.shard] = held.digest
        # Also those that have not acknowledged it: an agent that was restarted forgot who had.
        nodes = self.acks.get(held.shard, set()) | set(self._current.buddies(held.shard.rank))
        self.sources[held.shard] = nodes
        return nodes

    def not_with(self, shard: ShardId, node_id: str) -> None:
        """The node says that it does not have a shard of this node's ranks."""
        self.acks.get(shard, set()).discard(node_id)
        if shard not in self.held and shard in self.sources:
            self.sources[shard].discard(node_id)

    def forget_wanted(self, which: Callable[[Generation], bool]) -> None:
        self.wanted = {s: digest for s, digest in self.wanted.items() if not which(s.generation)}
        self.sources = {s: nodes for s, nodes in self.sources.items() if s in self.wanted}

    def drop(self, generations: Collection[Generation]) -> list[ShardId]:
        """They are needless. What lay here of them, in the order to release it."""
        # This node's own shards first: one that died between two releases must not report a generation again
        # whose replicas it has dropped.
        going = [shard for shard in self.held if shard.generation in generations]
        going.sort(key=lambda shard: not self._current.owns(shard))
        for shard in going:
            del self.held[shard]
        self.acks = {s: nodes for s, nodes in self.acks.items() if s.generation not in generations}
        self.forget_wanted(lambda generation: generation in generations)
        return going


def held_order(held: Held) -> tuple[int, ...]:
    """Oldest first."""
    return (*age_order(held.shard.generation), held.shard.rank)
