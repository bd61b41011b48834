"""Starts pushes and takes note of how each ended. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.agent.messages import PushEnd
from flashckpt.agent.transfers import Transfers

if TYPE_CHECKING:
    from flashckpt.agent.limits import Limits
    from flashckpt.agent.messages import Pushed
    from flashckpt.agent.outbox import Outbox
    from flashckpt.agent.standing import Standing
    from flashckpt.agent.transfers import Transfer
    from flashckpt.types import Held, ShardId


class Pushing:
    """Of replicas to their buddies, of what others have lost back to them, and of copies that the healer asks for."""

    def __init__(self, standing: Standing, outbox: Outbox, limits: Limits) -> None:
        self._standing = standing
        self._outbox = outbox
        self._limits = limits
        self.transfers = Transfers()

    def want(self, held: Held, node_id: str, now: float, *, heals: bool = False) -> None:
        self.transfers.want(held, node_id, now, heals=heals)

    def drop(self, shard: ShardId) -> None:
        """There is nothing left to push."""
        self.transfers.drop(shard)

    def stop(self) -> None:
        """The launch is over."""
        self.transfers.clear()

    def start(self, now: float) -> None:
        """Those that are due."""
        if self._standing.is_fenced:
            return
        for one in self.transfers.start_due(now, self._limits.pushes_per_node):
            self._outbox.push(one.held, one.node_id, now, heals=one.heals)

    def end(self, event: Pushed, now: float) -> Transfer | None:
        """What has ended; None where it does not count any more."""
        one = self.transfers.get((event.shard, event.node_id))
        if one is None:
            return None
        one.running = False
        one.acked = event.end is PushEnd.ACKED and event.digest == one.held.digest
        if not one.acked:
            one.problem = event.reason or "acknowledged other bytes"
        # The healer asks again for what it still wants.
        if one.acked or one.heals or event.end is PushEnd.REFUSED:
            del self.transfers[event.shard, event.node_id]
        else:
            one.failed(one.problem, now, self._limits.retry_first, self._limits.retry_most)
        return one
