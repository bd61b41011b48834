"""Brings what is committed to the persistent tier: gives orders where that is this node's to do, and follows them where
it is not. No I/O; what is known of orders is agent/flushing.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.agent.messages import Notify
from flashckpt.types import Level
from flashckpt.wire import Persist

if TYPE_CHECKING:
    from flashckpt.agent.committing import Committing
    from flashckpt.agent.custody import Custody
    from flashckpt.agent.duties import Duties
    from flashckpt.agent.flushing import Flushing
    from flashckpt.agent.ledger import Ledger
    from flashckpt.agent.messages import FlushEnded, FlushWanted
    from flashckpt.agent.outbox import Outbox
    from flashckpt.agent.releasing import Releasing
    from flashckpt.agent.standing import Standing
    from flashckpt.types import Generation, PersistSettings
    from flashckpt.wire import FlushFailure, FlushOrder


class FlushOrders:
    """Nothing happens here while a launch has no persist_dir."""

    def __init__(
        self,
        standing: Standing,
        ledger: Ledger,
        custody: Custody,
        duties: Duties,
        flushing: Flushing,
        releasing: Releasing,
        committing: Committing,
        outbox: Outbox,
    ) -> None:
        self._standing = standing
        self._ledger = ledger
        self._custody = custody
        self._duties = duties
        self._flushing = flushing
        self._releasing = releasing
        self._committing = committing
        self._outbox = outbox

    @property
    def _settings(self) -> PersistSettings | None:
        session = self._standing.session
        return session.persist if session is not None else None

    def go_on(self, now: float) -> None:
        """Orders what is due, if that is this node's to do, and starts its part of what is ordered."""
        standing, flushing = self._standing, self._flushing
        session, placement = standing.session, standing.placement
        if session is None or session.persist is None or placement is None or standing.is_fenced:
            return
        wanted = flushing.wanted.generation if flushing.wanted is not None else None
        if wanted is not None and self._ledger.is_overtaken(wanted) and not self._custody.has_own(wanted):
            flushing.lost(wanted)
            self._outbox.add(Notify(wanted, Level.NONE, "it is not in memory any more"))
        down = self._duties.silent(now)
        if self._duties.is_orderer(now):
            self._order(session.persist, down, now)
        self._outbox.add(*flushing.start(session, placement, standing.node_id, now))

    def _order(self, settings: PersistSettings, down: dict[str, tuple[float, str]], now: float) -> None:
        standing, kept = self._standing, self._ledger.kept
        self._outbox.add(*self._flushing.without(down, standing.node_id))
        # Where the coordinator is gone, its last record may be known to others only.
        committed = {*self._ledger.committed, self._ledger.hearsay}
        order = self._flushing.decide(
            settings,
            kept if kept is not None and standing.is_of_this_launch(kept) else None,
            lambda g: g in committed and self._custody.has_own(g),
            down,
            now,
            standing.node_id,
        )
        if order is not None:
            self._committing.announce(now)

    def want(self, event: FlushWanted, now: float) -> None:
        """Somebody on this node asks for one."""
        if self._settings is None or self._standing.is_fenced:
            return
        newest, generation, orderer = self._ledger.threshold, event.generation, self._duties.orderer(now)[0]
        if generation is None:
            self._flushing.ending = event.reason
            if newest is None or orderer == self._standing.node_id:
                return
            generation = newest.generation
        if self._standing.is_of_this_launch(generation):
            self._want(generation, event.reason, event.urgent, now)
            self._outbox.send(orderer, Persist(generation, event.reason, event.urgent), now)

    def asked(self, generation: Generation, reason: str, urgent: bool, now: float) -> None:
        """Another node asks for one."""
        if self._standing.is_of_this_launch(generation) and self._duties.is_orderer(now):
            self._want(generation, reason, urgent, now)

    def _want(self, generation: Generation, reason: str, urgent: bool, now: float) -> None:
        before = self._flushing.order
        self._outbox.add(*self._flushing.want(generation, reason, urgent))
        if self._flushing.order != before and self._duties.is_orderer(now):
            self._committing.announce(now)  # that somebody waits for it now

    def failed_at(self, sender: str, failure: FlushFailure, now: float) -> None:
        """Another node's part of the order in force failed."""
        effects = self._flushing.failed_at(sender, failure, now, self._standing.node_id)
        self._outbox.add(*effects)
        if effects:
            self._committing.announce(now)
            self._releasing.collect()

    def ended(self, event: FlushEnded, now: float) -> None:
        """This node's flusher is done."""
        self._outbox.add(*self._flushing.ended(event, now, self._standing.node_id))
        failure = self._flushing.own_failure
        if failure is not None and failure.attempt == event.attempt:
            self._outbox.send(self._flushing.giver, failure, now)
        if self._duties.is_orderer(now):
            self._committing.announce(now)
        self._releasing.collect()

    def hear(
        self,
        giver: str,
        order: FlushOrder | None,
        persisted: Generation | None,
        failure: FlushFailure | None,
        now: float,
    ) -> None:
        settings = self._settings
        if settings is None or giver != self._duties.orderer(now)[0]:
            return
        if order is not None:
            self._flushing.lost(order.generation)
        self._outbox.add(*self._flushing.hear(giver, order, persisted, failure, now, settings.timeout))
        self._releasing.collect()
