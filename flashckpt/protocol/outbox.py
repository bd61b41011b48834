"""Collects the effects of one event, in order. No I/O."""

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
    """The effects of all parts of the core. A node that is sent a message owes an answer from then on."""

    def __init__(self, current: CurrentLaunch, peers: Neighbours) -> None:
        self._current = current
        self._peers = peers
        self.effects: list[Effect] = []

    def begin(self) -> None:
        """Start with no effects for another event."""
        self.effects = []

    def add(self, *effects: Effect) -> None:
        self.effects += effects

    def send(self, node_id: str, body: Body, now: float) -> None:
        """Send a message; not to this node itself, and not in the name of a launch that is over."""
        if node_id == self._current.node_id or self._current.is_fenced:
            return
        self._peers.ask(node_id, now)
        self.effects.append(Send(node_id, body))

    def push(self, held: Held, node_id: str, now: float, *, heals: bool) -> None:
        self._peers.ask(node_id, now)
        self.effects.append(StartPush(held, node_id, heals))
