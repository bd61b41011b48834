"""What every stage of a load needs: this rank's place among the nodes, its node's memory, and the group of the
ranks."""

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
    """What all attempts of a load share. Nodes are identified by their index."""

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
    threads: int  # number of threads that copy and verify
    timeout: float  # seconds for an inventory, and for the retrieval of one generation
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
        """Returns the context of a load by all ranks."""
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
        """Returns the context of a load by this rank alone, from its own node."""
        here = topology.node
        place = NodePlace(here.node_id, here.domain)
        group, rank = PrivateGroup.alone(), topology.rank
        return LoadContext(store, memory, group, rank, 0, True, (place,), ((0,),), job, verify, threads, timeout, warns)
