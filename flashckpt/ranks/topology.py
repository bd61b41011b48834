"""The ranks of a launch, and which of them share a node's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a launch, as its ranks describe it."""

    node_id: str
    domain: str  # failure domain; "" if none was given
    ranks: tuple[int, ...]  # sorted


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a launch. Ranks are those of the Checkpointer's group; `global_ranks` has those of torch's
    default."""

    rank: int
    world: int
    nodes: tuple[Node, ...]  # in the order of their lowest rank
    global_ranks: tuple[int, ...]

    @property
    def node(self) -> Node:
        """The node of this rank."""
        return next(node for node in self.nodes if self.rank in node.ranks)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        return self.node.ranks

    @property
    def is_leader(self) -> bool:
        """True on one rank of each node, which acts for the node."""
        return self.rank == self.node_ranks[0]

    @property
    def shares_nodes(self) -> bool:
        """True if any two ranks share a node's memory, so that what both hold need be stored only once."""
        return any(len(node.ranks) > 1 for node in self.nodes)

    def on_node(self, global_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the given global ranks that are on this node, as ranks of the group; this rank is always among
        them."""
        wanted = set(global_ranks)
        return tuple(rank for rank in self.node_ranks if self.global_ranks[rank] in wanted or rank == self.rank)
