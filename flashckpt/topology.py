"""Which ranks there are, and which of them share this node's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks count within the checkpointer's group; `global_ranks` translates to torch's default group."""

    rank: int
    world: int
    node_ranks: tuple[int, ...]  # sorted
    global_ranks: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """One rank of each node acts for it."""
        return self.rank == self.node_ranks[0]

    def on_node(self, global_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the given global ranks that are on this node, this rank always among them."""
        wanted = set(global_ranks)
        return tuple(rank for rank in self.node_ranks if self.global_ranks[rank] in wanted or rank == self.rank)
