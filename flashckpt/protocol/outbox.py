"""What the core has decided so far on one event, in order. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Send, StartPush

if TYPE_CHECKING:
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import Effect
    from flashckpt.protocol.members import Neighbours
    from flashckpt.protocol.wire import Body
    from flashckpt.types import Held


class Outbox:
    """Every part of the core puts its effects here. Whoever is sent something owes an answer from then on."""

    def __init__(self, current: CurrentLaunch, peers: Neighbours) -> None:
        self._current = current
        self._peers = peers
        self.effects: list[Effect] = []

    def begin(self) -> None:
        """Another event."""
        self.effects = []

    def add(self, *effects: Effect) -> None:
        self.effects += effects

    def send(self, node_id: str, body: Body, now: float) -> None:
        """Nothing to this node itself, and nothing at all in the name of a launch that is over."""
        if node_id == self._current.node_id or self._current.is_fenced:
            return
        self._peers.ask(node_id, now)
        self.effects.append(Send(node_id, body))

    def push(self, held: Held, node_id: str, now: float, *, heals: bool) -> None:
        self._peers.ask(node_id, now)
        self.effects.append(StartPush(held, node_id, heals))
