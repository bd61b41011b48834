"""Tracks the other nodes of the launch: which of them answer, and which node has which duty. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.types import Member


# What an agent knows of the other nodes of its launch: their addresses, and whether they answer. No I/O.


@dataclass(slots=True)
class Neighbour:
    """Another node of the launch."""

    address: str
    heard_at: float  # when the session began, until the node is heard from
    asked_at: float | None = None  # the oldest question it has not answered
    beat_at: float = 0.0  # when the next message to it is due
    problem: str = ""

    @property
    def is_unreachable(self) -> bool:
        """True if it owes an answer and the last try to reach it failed."""
        return self.asked_at is not None and bool(self.problem)

    def silent_since(self, now: float, timeout: float, beats: bool) -> float | None:
        """Return since when the node is silent; None while it is well: it answers, and if it `beats`, was heard from
        lately."""
        since = self.heard_at if beats else self.asked_at
        return since if since is not None and now - since > timeout else None


class Neighbours(dict[str, Neighbour]):
    """The other nodes, by node id. Messages from nodes outside the launch leave no trace here."""

    def enter(self, members: Iterable[Member], now: float) -> None:
        """Replace the nodes by those of another launch."""
        self.clear()
        self.update((one.node_id, Neighbour(one.address, heard_at=now, beat_at=now)) for one in members)

    def ask(self, node_id: str, now: float) -> None:
        """Note that the node owes an answer."""
        peer = self.get(node_id)
        if peer is not None and peer.asked_at is None:
            peer.asked_at = now

    def hear(self, node_id: str, now: float) -> None:
        """Note that any message of the node has arrived."""
        peer = self.get(node_id)
        if peer is not None:
            peer.heard_at, peer.asked_at, peer.problem = now, None, ""

    def miss(self, node_id: str, reason: str) -> None:
        """Note that the node could not be reached, or refused to answer."""
        peer = self.get(node_id)
        if peer is not None:
            peer.problem = reason

    def move(self, node_id: str, address: str) -> None:
        peer = self.get(node_id)
        if peer is not None:
            peer.address = address

    def due(self, now: float, beat: float) -> list[str]:
        """Return the nodes that a message is due for, and set their next one in `beat` seconds."""
        found = [node_id for node_id, peer in self.items() if now >= peer.beat_at]
        for node_id in found:
            self[node_id].beat_at = now + beat
        return found

    def silent(self, now: float, timeout: float, *, beats: bool) -> dict[str, tuple[float, str]]:
        """Return the nodes that are not well: since when, and what went wrong."""
        found = {}
        for node_id, peer in self.items():
            since = peer.silent_since(now, timeout, beats)
            if since is not None:
                found[node_id] = (since, peer.problem or "no answer")
        return found


# Which node does what for all: the first one that answers. No I/O.


class Duties:
    """The duties as this node sees them: two nodes that do not hear each other may both claim one."""

    def __init__(self, current: CurrentLaunch, peers: Neighbours, patience: float) -> None:
        self._current = current
        self._peers = peers
        self._patience = patience  # seconds that a node may be silent for

    def silent(self, now: float) -> dict[str, tuple[float, str]]:
        """Return the nodes that do not answer, or that the coordinator does not hear from: since when, and what went
        wrong."""
        return self._peers.silent(now, self._patience, beats=self._current.is_coordinator)

    def healer(self, now: float) -> str:
        """Return the first member that answers this node."""
        silent, session = self.silent(now), self._current.session
        members = session.members if session is not None else ()
        return next((member.node_id for member in members if member.node_id not in silent), self._current.node_id)

    def orderer(self, now: float) -> tuple[str, str]:
        """Return the node whose flush orders are in force here, and why it is that one."""
        current = self._current
        if current.is_coordinator:  # which hears from all nodes at all times
            return current.node_id, "the coordinator"
        members = current.session.members if current.session is not None else ()
        return who_orders(members, self.silent(now), current.node_id)

    def is_orderer(self, now: float) -> bool:
        return self.orderer(now)[0] == self._current.node_id

    def beats_to(self, healer: str, now: float) -> set[str]:
        """Return the nodes that get a beat: those that keep our replicas, the coordinator, the healer, each member that
        would be the healer if it answered, and the next one if the healer itself does not answer at the moment.

        The healer also asks nodes that have been quiet for half the time after which they count as lost: so it learns
        sooner that one is gone.
        """
        session, placement, node_id = self._current.session, self._current.placement, self._current.node_id
        if session is None or placement is None:
            return set()
        mine = self._current.member(node_id)
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


def who_orders(members: Sequence[Member], silent: Collection[str], own: str) -> tuple[str, str]:
    """Return the node whose orders are in force, as this node sees it, with the reason: the first member that answers.

    Two nodes that do not hear each other may both order. Each attempt has its own temporary name, a step is complete
    whoever commits it, and `latest` never goes back: one of them wins, the other finds the step there.
    """
    chosen = next((one.node_id for one in members if one.node_id == own or one.node_id not in silent), own)
    if members and chosen != members[0].node_id:
        before = [one.node_id for one in takewhile(lambda one: one.node_id != chosen, members)]
        return chosen, f"{', '.join(before)} {'does' if len(before) == 1 else 'do'} not answer"
    return chosen, "the coordinator"
