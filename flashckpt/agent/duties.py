"""Who does what is one node's to do for all: whoever is first among those that answer. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.agent.flush_policy import who_orders

if TYPE_CHECKING:
    from flashckpt.agent.neighbours import Neighbours
    from flashckpt.agent.standing import Standing


class Duties:
    """As this node sees it: two nodes that do not hear each other may both believe that it is theirs."""

    def __init__(self, standing: Standing, peers: Neighbours, patience: float) -> None:
        self._standing = standing
        self._peers = peers
        self._patience = patience  # seconds that a node may be silent for

    def silent(self, now: float) -> dict[str, tuple[float, str]]:
        """Nodes that do not answer, or that the coordinator does not hear from: since when, and what went wrong."""
        return self._peers.silent(now, self._patience, beats=self._standing.is_coordinator)

    def healer(self, now: float) -> str:
        """The first member that answers this node."""
        silent, session = self.silent(now), self._standing.session
        members = session.members if session is not None else ()
        return next((member.node_id for member in members if member.node_id not in silent), self._standing.node_id)

    def orderer(self, now: float) -> tuple[str, str]:
        """The node whose flush orders count here, and why it is that one."""
        standing = self._standing
        if standing.is_coordinator:  # which hears from all nodes, all the time
            return standing.node_id, "the coordinator"
        members = standing.session.members if standing.session is not None else ()
        return who_orders(members, self.silent(now), standing.node_id)

    def is_orderer(self, now: float) -> bool:
        return self.orderer(now)[0] == self._standing.node_id

    def beats_to(self, healer: str, now: float) -> set[str]:
        """Nodes that a beat goes to: those that keep replicas of ours, the coordinator, the healer, whoever would be it
        if it answered, and the next one where the healer itself does not answer at the moment.

        The healer asks also those that have been quiet for half the time after which they count as lost: one that is
        gone is then known to be gone sooner.
        """
        session, placement, node_id = self._standing.session, self._standing.placement, self._standing.node_id
        if session is None or placement is None:
            return set()
        mine = self._standing.member(node_id)
        nodes = {node for rank in mine.ranks for node in placement.buddies(rank)} if mine else set()
        nodes |= {session.coordinator, healer}
        silent = self.silent(now)
        for member in session.members:
            if member.node_id == node_id:
                break
            nodes.add(member.node_id)
            peer = self._peers.get(member.node_id)
            if member.node_id not in silent and (peer is None or not peer.is_unreachable):
                break
        if healer == node_id:
            nodes |= {name for name, peer in self._peers.items() if now - peer.heard_at > self._patience / 2}
        return nodes - {node_id}
