"""What a load stands on: this rank's place among the nodes, and the ways to memory and to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.group import PrivateGroup
from flashckpt.load.sources import Place

if TYPE_CHECKING:
    from flashckpt.load.memory import NodeMemory
    from flashckpt.store.slots import SlotStore
    from flashckpt.topology import Topology


@dataclass(frozen=True, slots=True)
class Ground:
    """The same for all attempts of a load. Nodes are known by their index."""

    store: SlotStore
    memory: NodeMemory
    group: PrivateGroup
    rank: int
    node: int  # this one
    is_leader: bool  # acts for its node
    places: tuple[Place, ...]
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
    ) -> Ground:
        """All ranks load."""
        return Ground(
            store,
            memory,
            group,
            topology.rank,
            topology.nodes.index(topology.node),
            topology.is_leader,
            tuple(Place(node.node_id, node.domain) for node in topology.nodes),
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
    ) -> Ground:
        """This rank loads from its own node, without the others."""
        here = topology.node
        place = Place(here.node_id, here.domain)
        group, rank = PrivateGroup.alone(), topology.rank
        return Ground(store, memory, group, rank, 0, True, (place,), ((0,),), job, verify, threads, timeout, warns)
