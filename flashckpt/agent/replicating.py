"""Sees to it that the shards of this node's ranks lie where they should, and come back where they are lost. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.wire import Lost, Want

if TYPE_CHECKING:
    from flashckpt.agent.committing import Committing
    from flashckpt.agent.custody import Custody
    from flashckpt.agent.ledger import Ledger
    from flashckpt.agent.outbox import Outbox
    from flashckpt.agent.pushing import Pushing
    from flashckpt.agent.standing import Standing
    from flashckpt.agent.transfers import Transfer
    from flashckpt.types import Held, ShardId


class Replicating:
    """An owner's part, and a holder's: a holder pushes back what its owner has lost."""

    def __init__(
        self,
        standing: Standing,
        ledger: Ledger,
        custody: Custody,
        pushing: Pushing,
        committing: Committing,
        outbox: Outbox,
    ) -> None:
        self._standing = standing
        self._ledger = ledger
        self._custody = custody
        self._pushing = pushing
        self._committing = committing
        self._outbox = outbox

    def consider(self, held: Held, now: float) -> None:
        """Starts what a held shard needs: pushes to its buddies, and its report."""
        shard, custody = held.shard, self._custody
        if not self._standing.owns(shard):
            return
        if custody.is_split(held):
            # Also what is found at a start: the agent before may have died between seeing this and dropping it.
            reason = f"ranks of {self._standing.node_id} disagree on which plain tensors they share"
            self._committing.give_up(shard.generation, reason, now)
        # Even of what is void, or lies on no other node yet: it tells how far the rank has got.
        if shard.generation in self._ledger.voids:
            self._committing.tell(Lost(shard), now)
            return
        self._committing.report(held, now)
        for node_id in self._standing.buddies(shard.rank):
            if node_id not in custody.acks.get(shard, ()):
                self._pushing.want(held, node_id, now)
        self._pushing.start(now)

    def acked(self, one: Transfer, now: float) -> None:
        """A node has it."""
        shard = one.held.shard
        if self._standing.owns(shard) and self._custody.acknowledge(shard, one.node_id) >= self._standing.replicas:
            self._committing.report(one.held, now)

    # --- lost shards ----------------------------------------------------------------------------------------

    def lost(self, held: Held, now: float) -> None:
        """This node's copy is gone."""
        shard, custody = held.shard, self._custody
        self._pushing.drop(shard)
        owner = self._standing.owner_of(shard)
        if owner is None or self._ledger.is_beside(shard.generation):
            return
        if owner != self._standing.node_id:
            custody.want_back(held)
            self._outbox.send(owner, Lost(shard), now)
            return
        sources = custody.want_own_back(held)
        # Not on its own node: that is one copy less than a report promises.
        self._committing.tell(Lost(shard), now)
        for node_id in sorted(sources) if shard in custody.wanted else ():
            self._outbox.send(node_id, Want(shard, held.digest), now)
        self._give_up_if_stranded(shard, now)

    def lost_by(self, node_id: str, shard: ShardId, now: float) -> None:
        """Another node does not have a shard of this node's ranks."""
        self._custody.not_with(shard, node_id)
        held = self._custody.held.get(shard)
        if held is not None:
            self.consider(held, now)
        else:
            self._give_up_if_stranded(shard, now)

    def wanted_by(self, node_id: str, shard: ShardId, digest: bytes, now: float) -> None:
        """Another node wants its own shard back."""
        held = self._custody.held.get(shard)
        if held is not None and held.digest == digest:
            self._pushing.want(held, node_id, now)
            self._pushing.start(now)
        else:
            self._outbox.send(node_id, Lost(shard), now)

    def _give_up_if_stranded(self, shard: ShardId, now: float) -> None:
        """Nobody can give it back: its generation can't be completed, if it is not complete already."""
        if self._custody.is_stranded(shard):
            self._committing.ask_to_give_up(shard.generation, now)
