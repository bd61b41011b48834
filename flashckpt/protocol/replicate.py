"""Pushes replicas of this node's shards to its buddies, and asks for lost shards back. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import NoSpaceError
from flashckpt.protocol.events import PushEnd
from flashckpt.protocol.holdings import held_order
from flashckpt.protocol.wire import Lost, WantBack

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.protocol.commit import Committing
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import Pushed
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.types import Generation, Held, ShardId


# The intervals and limits of an agent.


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    beat: float = 1.0  # between two messages to the same node
    retry_first: float = 0.1  # before a failed push is tried again; doubles
    retry_most: float = 5.0
    peer_timeout: float = 10.0  # after so long without a message a node counts as down
    pushes_per_node: int = 2  # at one time


# Pushes that are due or under way, and when each is tried again. No I/O.

_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class QueuedPush:
    """The push of one shard to one node: queued, running or ended."""

    held: Held
    node_id: str
    heals: bool = False  # ordered by the healer, which orders it again: one try
    running: bool = False
    acked: bool = False  # it ended, and the node has exactly these bytes
    failures: int = 0
    next_at: float = 0.0
    problem: str = ""
    refused: bool = False  # the problem is what the node answered
    short_since: float | None = None  # since then the node has had no room for it, at every try

    def failed(self, reason: str, now: float, first: float, most: float) -> None:
        """Note a failure and delay the next try, longer each time."""
        self.failures += 1
        self.problem = reason
        is_short = NoSpaceError.code in reason
        self.short_since = (now if self.short_since is None else self.short_since) if is_short else None
        self.next_at = now + min(first * 2 ** min(self.failures - 1, _MOST_DOUBLINGS), most)


class PushQueue(dict["tuple[ShardId, str]", QueuedPush]):
    """The pushes of this node, by shard and target node."""

    def want(self, held: Held, node_id: str, now: float, *, heals: bool = False) -> None:
        one = self.setdefault((held.shard, node_id), QueuedPush(held, node_id, heals=heals, next_at=now))
        one.heals = one.heals and heals

    def start_due(self, now: float, per_node: int) -> list[QueuedPush]:
        """Start the pushes that are due, and return them; at most `per_node` run to one node at a time."""
        running: dict[str, int] = {}
        for one in self.values():
            running[one.node_id] = running.get(one.node_id, 0) + one.running
        started = []
        # The oldest first: its commit is what frees memory. Copies for the healer must not delay a commit.
        for one in sorted(self.values(), key=lambda one: (one.heals, held_order(one.held))):
            if not one.running and now >= one.next_at and running[one.node_id] < per_node:
                one.running = True
                running[one.node_id] += 1
                started.append(one)
        return started

    def drop(self, shard: ShardId) -> None:
        for key in [key for key in self if key[0] == shard]:
            del self[key]

    def drop_generations(self, generations: Collection[Generation]) -> None:
        for key in [key for key in self if key[0].generation in generations]:
            del self[key]

    def of(self, shard: ShardId) -> list[QueuedPush]:
        return [one for one in self.values() if one.held.shard == shard]


# Starts pushes and notes how each ended. No I/O.


class Pushing:
    """Pushes replicas to their buddies, shards back to owners that lost them, and the copies that the healer orders."""

    def __init__(self, current: CurrentLaunch, outbox: Outbox, limits: Limits) -> None:
        self._current = current
        self._outbox = outbox
        self._limits = limits
        self.transfers = PushQueue()

    def want(self, held: Held, node_id: str, now: float, *, heals: bool = False) -> None:
        self.transfers.want(held, node_id, now, heals=heals)

    def drop(self, shard: ShardId) -> None:
        """Drop all pushes of a shard that is not held any more."""
        self.transfers.drop(shard)

    def stop(self) -> None:
        """Drop all pushes: the launch is over."""
        self.transfers.clear()

    def start(self, now: float) -> None:
        """Start the pushes that are due."""
        if self._current.is_fenced:
            return
        for one in self.transfers.start_due(now, self._limits.pushes_per_node):
            self._outbox.push(one.held, one.node_id, now, heals=one.heals)

    def end(self, event: Pushed, now: float) -> QueuedPush | None:
        """Note the end of a push. Return it; None if it does not count any more."""
        one = self.transfers.get((event.shard, event.node_id))
        if one is None:
            return None
        one.running = False
        one.acked = event.end is PushEnd.ACKED and event.digest == one.held.digest
        if not one.acked:
            one.problem = event.reason or "acknowledged other bytes"
            one.refused = event.end is not PushEnd.FAILED
        # The healer orders again what it still wants.
        if one.acked or one.heals or event.end is PushEnd.REFUSED:
            del self.transfers[event.shard, event.node_id]
        else:
            one.failed(one.problem, now, self._limits.retry_first, self._limits.retry_most)
        return one


# Brings the shards of this node's ranks to their buddies, and back if they are lost. No I/O.


class Replicating:
    """Replicates as an owner; as a holder, pushes back what an owner has lost."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        pushing: Pushing,
        committing: Committing,
        outbox: Outbox,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._pushing = pushing
        self._committing = committing
        self._outbox = outbox

    def consider(self, held: Held, now: float) -> None:
        """Start what a held shard of this node's ranks needs: pushes to its buddies, and its report."""
        shard, holdings = held.shard, self._holdings
        if not self._current.owns(shard):
            return
        if holdings.is_split(held):
            # This also holds for shards found at a start: the previous agent may have died between seeing this and
            # releasing them.
            reason = f"ranks of {self._current.node_id} disagree on which plain tensors they share"
            self._committing.give_up(shard.generation, reason, now)
        # Report it even if it is void or lies on no other node yet: the report tells how far the rank has got.
        if shard.generation in self._ledger.voids:
            self._committing.tell(Lost(shard), now)
            return
        self._committing.report(held, now)
        for node_id in self._current.buddies(shard.rank):
            if node_id not in holdings.acks.get(shard, ()):
                self._pushing.want(held, node_id, now)
        self._pushing.start(now)

    def acked(self, one: QueuedPush, now: float) -> None:
        """Note that a node has acknowledged a copy, and report the shard once enough have."""
        shard = one.held.shard
        if self._current.owns(shard) and self._holdings.acknowledge(shard, one.node_id) >= self._current.replicas:
            self._committing.report(one.held, now)

    # --- lost shards ----------------------------------------------------------------------------------------

    def lost(self, held: Held, now: float) -> None:
        """Ask for a shard back that this node has lost."""
        shard, holdings = held.shard, self._holdings
        self._pushing.drop(shard)
        owner = self._current.owner_of(shard)
        if owner is None or self._ledger.is_beside(shard.generation):
            return
        if owner != self._current.node_id:
            holdings.want_back(held)
            self._outbox.send(owner, Lost(shard), now)
            return
        sources = holdings.want_own_back(held)
        # Reports promise the copy on the shard's own node too: one is missing now.
        self._committing.tell(Lost(shard), now)
        for node_id in sorted(sources) if shard in holdings.wanted else ():
            self._outbox.send(node_id, WantBack(shard, held.digest), now)
        self._give_up_if_stranded(shard, now)

    def lost_by(self, node_id: str, shard: ShardId, now: float) -> None:
        """Note that another node does not have a shard of this node's ranks, and replicate it again or give it up."""
        self._holdings.not_with(shard, node_id)
        held = self._holdings.held.get(shard)
        if held is not None:
            self.consider(held, now)
        else:
            self._give_up_if_stranded(shard, now)

    def wanted_by(self, node_id: str, shard: ShardId, digest: bytes, now: float) -> None:
        """Push a shard back to its owner, or tell it that this node does not have it."""
        held = self._holdings.held.get(shard)
        if held is not None and held.digest == digest:
            self._pushing.want(held, node_id, now)
            self._pushing.start(now)
        else:
            self._outbox.send(node_id, Lost(shard), now)

    def _give_up_if_stranded(self, shard: ShardId, now: float) -> None:
        """Give a generation up if nobody can give back this shard of it, unless it is complete already."""
        if self._holdings.is_stranded(shard):
            self._committing.ask_to_give_up(shard.generation, now)
