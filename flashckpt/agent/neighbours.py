"""What an agent knows of the other nodes of its launch: where they are, and whether they answer. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.types import Member


@dataclass(slots=True)
class Peer:
    """Another node of the launch."""

    address: str
    heard_at: float  # when the session began, until it was heard from
    asked_at: float | None = None  # the oldest question it has not answered
    beat_at: float = 0.0  # when it is due to hear from us
    problem: str = ""

    @property
    def is_unreachable(self) -> bool:
        """It owes an answer, and the last try to get one failed."""
        return self.asked_at is not None and bool(self.problem)

    def silent_since(self, now: float, timeout: float, beats: bool) -> float | None:
        """None while it is well: it answers, and where it `beats`, it was heard from not long ago."""
        since = self.heard_at if beats else self.asked_at
        return since if since is not None and now - since > timeout else None


class Neighbours(dict[str, Peer]):
    """By node id. What is said of a node that is none of them is not kept."""

    def enter(self, members: Iterable[Member], now: float) -> None:
        """Another launch, with these others."""
        self.clear()
        self.update((one.node_id, Peer(one.address, heard_at=now, beat_at=now)) for one in members)

    def ask(self, node_id: str, now: float) -> None:
        """It was asked something."""
        peer = self.get(node_id)
        if peer is not None and peer.asked_at is None:
            peer.asked_at = now

    def hear(self, node_id: str, now: float) -> None:
        """It said something, be it what it may."""
        peer = self.get(node_id)
        if peer is not None:
            peer.heard_at, peer.asked_at, peer.problem = now, None, ""

    def miss(self, node_id: str, reason: str) -> None:
        """It could not be reached, or would not answer."""
        peer = self.get(node_id)
        if peer is not None:
            peer.problem = reason

    def move(self, node_id: str, address: str) -> None:
        peer = self.get(node_id)
        if peer is not None:
            peer.address = address

    def due(self, now: float, beat: float) -> list[str]:
        """Those that have to hear from us now; the next time in `beat` seconds."""
        found = [node_id for node_id, peer in self.items() if now >= peer.beat_at]
        for node_id in found:
            self[node_id].beat_at = now + beat
        return found

    def silent(self, now: float, timeout: float, *, beats: bool) -> dict[str, tuple[float, str]]:
        """Those that are not well: since when, and what went wrong."""
        found = {}
        for node_id, peer in self.items():
            since = peer.silent_since(now, timeout, beats)
            if since is not None:
                found[node_id] = (since, peer.problem or "no answer")
        return found
