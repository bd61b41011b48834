"""Carries out healing: tells the healer which kept shards lie here, and makes the copies that it orders. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import PushEnd
from flashckpt.protocol.heal import Healing
from flashckpt.protocol.verdict import Word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import Pushed
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.members import Duties, Neighbours
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.placement import Placement
    from flashckpt.protocol.replicate import Limits, Pushing, QueuedPush
    from flashckpt.protocol.wire import Answer, CopyOrder, Health, Holds, Report
    from flashckpt.types import Generation, Session, ShardId


class Copying:
    """Holds one `Healing` per session. It only ever adds copies."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        peers: Neighbours,
        duties: Duties,
        pushing: Pushing,
        outbox: Outbox,
        limits: Limits,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._peers = peers
        self._duties = duties
        self._pushing = pushing
        self._outbox = outbox
        self._limits = limits
        self._healing: Healing | None = None

    def enter(self, session: Session, placement: Placement) -> None:
        limits = self._limits
        self._healing = Healing(self._current.node_id, session, placement, limits.peer_timeout, limits.pushes_per_node)

    @property
    def health(self) -> Word | None:
        """Return the healer's last word on the kept generation."""
        return self._healing.health if self._healing is not None else None

    # --- what is kept ---------------------------------------------------------------------------------------

    def holdings(self, generation: Generation) -> dict[str, frozenset[int]]:
        """Return the ranks whose shards each member is known to have first hand.

        Without being the healer, that is this node alone; the healer knows all members that count.
        """
        mine = frozenset(shard.rank for shard in self._holdings.held if shard.generation == generation)
        known = self._healing.holdings(generation) if self._healing is not None else {}
        return {**known, self._current.node_id: mine}

    def hear_kept(self, generation: Generation, now: float) -> None:
        """Note that a member has a record of this generation.

        Only the coordinator's word licenses any release. But if the coordinator is down, nodes that missed its word
        learn in this way which generation has to be healed.
        """
        if self._needs_hearsay(now):
            self._ledger.hear_kept(generation)
        else:
            self._ledger.forget_hearsay()

    def _needs_hearsay(self, now: float) -> bool:
        """Return True if the coordinator can't tell: it does not answer, or it is this node and came back without its
        memory."""
        if self._current.is_coordinator:
            return self._ledger.threshold is None
        session = self._current.session
        return session is not None and self._duties.healer(now) != session.coordinator

    def note_commit(self, generation: Generation, reports: Mapping[int, Report], now: float) -> None:
        """Count the holders of a commit that this node has just made as the coordinator."""
        if self._healing is not None and self._ledger.kept == generation:
            self._healing.note_commit(reports, now)

    # --- as a holder ----------------------------------------------------------------------------------------

    def holds(self, now: float) -> list[Holds]:
        """Return which shards of the kept generation this node has; nothing if none is kept."""
        kept = self._ledger.kept
        if kept is None or self._healing is None:
            return []
        committed = any(record.generation == kept for record in self._ledger.records)
        return [self._healing.holds(kept, self._holdings.held.values(), committed=committed, now=now)]

    def say_holds(self, now: float) -> None:
        """Tell the healer at once that this node's shards have changed: it orders the next copies after that."""
        healer = self._duties.healer(now)
        for holds in self.holds(now) if healer != self._current.node_id else ():
            self._outbox.send(healer, holds, now)

    def take_answer(self, sender: str, answer: Answer, now: float) -> None:
        """Apply the healer's answer: its word on the kept generation, and the copies to make or to expect."""
        if answer.health is not None and answer.health.committed:
            # The healer may know of the generation from other members only, and then has no record to show.
            self.hear_kept(answer.health.generation, now)
        if self._healing is None or answer.health is None or answer.health.generation != self._ledger.kept:
            return
        self._healing.health = Word(answer.health, now, sender)
        self._healing.expect(answer.health.generation, answer.copies, now)
        self._make(answer.copies, now)

    def _make(self, copies: tuple[CopyOrder, ...], now: float) -> None:
        kept, healing = self._ledger.kept, self._healing
        mine = {shard.rank: held for shard, held in self._holdings.held.items() if shard.generation == kept}
        for copy in copies:
            source_here = copy.source == self._current.node_id and copy.target in self._peers
            held = mine.get(copy.rank) if source_here else None
            if held is None or held.digest != copy.digest:
                continue
            if healing is not None and not healing.is_made(held.shard, copy.target, now):
                self._pushing.want(held, copy.target, now, heals=True)
        self._pushing.start(now)

    def ended(self, one: QueuedPush, event: Pushed, now: float) -> None:
        """Tell the healer how a copy that it ordered ended.

        Only a refusal has to be told: if the target is down, the healer notices by itself.
        """
        if self._healing is None:
            return
        if one.acked:
            self._healing.note_made(event.shard, event.node_id, now)
            self.say_holds(now)
        elif event.end is not PushEnd.FAILED:
            self._healing.note_refusal(event.shard, event.node_id, one.problem, now)

    def is_expected(self, shard: ShardId, digest: bytes, now: float) -> bool:
        """Return True if the healer has announced this copy and its generation is still the kept one: any member may
        send it."""
        expected = self._healing is not None and self._healing.is_expected(shard, digest, now)
        return expected and shard.generation == self._ledger.kept

    # --- as the healer --------------------------------------------------------------------------------------

    def look(self, healer: str, now: float) -> list[Holds]:
        """Decide on copies if this node is the healer. Return which kept shards it has itself."""
        if self._ledger.hearsay is not None and not self._needs_hearsay(now):
            self._ledger.forget_hearsay()
        holds, healing, node_id = self.holds(now), self._healing, self._current.node_id
        if healing is None:
            return holds
        if healer != node_id:
            healing.rest()
        for one in holds if healer == node_id else ():
            healing.look(one, now)
            self._make(healing.copies_for(node_id), now)
        return holds

    def take_holds(self, sender: str, holds: Holds, now: float) -> None:
        if self._healing is not None:
            self._healing.take(sender, holds, now)
            if holds.committed:
                self.hear_kept(holds.generation, now)

    def answer_to(self, node_id: str) -> tuple[Health | None, tuple[CopyOrder, ...]]:
        """Return the healer's answer to a node that has told which shards it has."""
        return self._healing.answer_to(node_id) if self._healing is not None else (None, ())
