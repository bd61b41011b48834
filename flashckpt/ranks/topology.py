"""Which ranks there are, and which of them share a node's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a launch, as its ranks describe it."""

    node_id: str
    domain: str  # failure domain; "" where none was given
    ranks: tuple[int, ...]  # sorted


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks count within the checkpointer's group; `global_ranks` translates to torch's default group."""

    rank: int
    world: int
    nodes: tuple[Node, ...]  # in the order of their lowest rank
    global_ranks: tuple[int, ...]

    @property
    def node(self) -> Node:
        """This rank's."""
        return next(node for node in self.nodes if self.rank in node.ranks)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        return self.node.ranks

    @property
    def is_leader(self) -> bool:
        """One rank of each node acts for it."""
        return self.rank == self.node_ranks[0]

    @property
    def shares_nodes(self) -> bool:
        """Whether any two ranks have a memory in common, so that what both hold need be stored once."""
        return any(len(node.ranks) > 1 for node in self.nodes)

    def on_node(self, global_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the given global ranks that are on this node, this rank always among them."""
        wanted = set(global_ranks)
        return tuple(rank for rank in self.node_ranks if self.global_ranks[rank] in wanted or rank == self.rank)
