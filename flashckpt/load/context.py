"""What a load stands on: this rank's place among the nodes, and the ways to memory and to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.load.sources import NodePlace
from flashckpt.ranks.group import PrivateGroup

if TYPE_CHECKING:
    from flashckpt.load.memory import NodeMemory
    from flashckpt.ranks.topology import Topology
    from flashckpt.store.slots import SlotStore


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The same for all attempts of a load. Nodes are known by their index."""

    store: SlotStore
    memory: NodeMemory
    group: PrivateGroup
    rank: int
    node: int  # this one
    is_leader: bool  # acts for its node
    places: tuple[NodePlace, ...]
    members: tuple[tuple[int, ...], ...]  # of each node, by their place in the group; the first one is its leader
    job: str
    verify: bool
    threads: int  # that copy and verify
    timeout: float  # seconds that an inventory or the retrieval of one generation may take
    warns: bool = True  # log a warning if copies of assumed tensors differ

    @staticmethod
    def together(
        topology: Topology,
        group: PrivateGroup,
        store: SlotStore,
        memory: NodeMemory,
        *,
        job: str,
        verify: bool,
        threads: int,
        timeout: float,
        warns: bool = True,
    ) -> LoadContext:
        """All ranks load."""
        return LoadContext(
            store,
            memory,
            group,
            topology.rank,
            topology.nodes.index(topology.node),
            topology.is_leader,
            tuple(NodePlace(node.node_id, node.domain) for node in topology.nodes),
            tuple(node.ranks for node in topology.nodes),
            job,
            verify,
            threads,
            timeout,
            warns,
        )

    @staticmethod
    def alone(
        topology: Topology,
        store: SlotStore,
        memory: NodeMemory,
        *,
        job: str,
        verify: bool,
        threads: int,
        timeout: float,
        warns: bool = True,
    ) -> LoadContext:
        """This rank loads from its own node, without the others."""
        here = topology.node
        place = NodePlace(here.node_id, here.domain)
        group, rank = PrivateGroup.alone(), topology.rank
        return LoadContext(store, memory, group, rank, 0, True, (place,), ((0,),), job, verify, threads, timeout, warns)
