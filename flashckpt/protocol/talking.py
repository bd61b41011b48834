"""Exchanges messages with other nodes: applies them, answers them, and repeats what is not confirmed. No I/O.

Messages are state, not commands (flashckpt/protocol/wire.py): each may be lost, repeated or late without harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Reply
from flashckpt.protocol.wire import (
    Announce,
    Answer,
    Beat,
    FlushFailure,
    GiveUp,
    Holds,
    Lost,
    Report,
    WantBack,
    WantPersisted,
)

if TYPE_CHECKING:
    from flashckpt.protocol.commit import Committing
    from flashckpt.protocol.copying import Copying
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.flush import Flushing, FlushOrders
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.members import Duties, Neighbours
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.releasing import Releasing
    from flashckpt.protocol.replicate import Replicating
    from flashckpt.protocol.wire import Body, CopyOrder, Envelope, FlushOrder, Health
    from flashckpt.types import Generation


class Talking:
    """Passes every message to the part that it concerns."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        peers: Neighbours,
        duties: Duties,
        flushing: Flushing,
        releasing: Releasing,
        copying: Copying,
        committing: Committing,
        replicating: Replicating,
        flush_orders: FlushOrders,
        outbox: Outbox,
        beat: float,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._peers = peers
        self._duties = duties
        self._flushing = flushing
        self._releasing = releasing
        self._copying = copying
        self._committing = committing
        self._replicating = replicating
        self._flush_orders = flush_orders
        self._outbox = outbox
        self._beat = beat

    # --- what others say ------------------------------------------------------------------------------------

    def told(self, envelope: Envelope, now: float) -> None:
        refused, _ = self._current.why_stranger(envelope.sender, envelope.launch)
        if not refused:
            self.take(envelope.sender, envelope.body, now)
        self._releasing.collect()
        self._outbox.add(Reply(self._refusal(refused) if refused else self._answer(envelope, now)))

    def take(self, sender: str, body: Body, now: float) -> None:
        current = self._current
        match body:
            case Report() if current.is_coordinator:
                self._committing.take_report(sender, body, now)
            case GiveUp(generation) if current.is_coordinator and current.is_of_this_launch(generation):
                self._committing.take_give_up(generation, sender, now)
            case Announce(record, voids, order, persisted, failure):
                if self._is_coordinator(sender):
                    self._committing.take_news(record, voids)
                self._flush_orders.hear(sender, order, persisted, failure, now)
            case WantPersisted(generation, reason, urgent):
                self._flush_orders.asked(generation, reason, urgent, now)
            case FlushFailure():
                self._flush_orders.failed_at(sender, body, now)
            case Lost(shard) if current.is_coordinator and current.owner_of(shard) == sender:
                self._committing.take_back(shard, now)
            case Lost(shard) if current.owns(shard):
                self._replicating.lost_by(sender, shard, now)
            case WantBack(shard, digest):
                self._replicating.wanted_by(sender, shard, digest, now)
            case Holds():
                self._copying.take_holds(sender, body, now)
            case _:
                pass

    def answered(self, node_id: str, answer: Answer, now: float) -> None:
        if not answer.refused:
            if self._is_coordinator(node_id):
                self._committing.take_news(answer.record, answer.voids)
                self._ledger.note_heard(answer.voids)
            self._flush_orders.hear(node_id, answer.flush, answer.persisted, answer.failure, now)
            self._outbox.add(*self._ledger.hear_base(answer.base))
            if answer.record is not None:
                self._copying.hear_kept(answer.record.generation, now)
        if node_id == self._duties.healer(now):
            self._copying.take_answer(node_id, answer, now)
        self._peers.miss(node_id, answer.refused)
        self._releasing.collect()

    def _is_coordinator(self, node_id: str) -> bool:
        return self._current.session is not None and self._current.session.coordinator == node_id

    # --- what they hear -------------------------------------------------------------------------------------

    def _refusal(self, reason: str) -> Answer:
        return Answer(self._current.newest, self._current.line, None, (), reason)

    def _answer(self, envelope: Envelope, now: float) -> Answer:
        health: Health | None = None
        copies: tuple[CopyOrder, ...] = ()
        if isinstance(envelope.body, Holds):
            health, copies = self._copying.answer_to(envelope.sender)
        order: FlushOrder | None = None
        persisted: Generation | None = None
        failure: FlushFailure | None = None
        if self._duties.is_orderer(now):
            order, persisted = self._flushing.order, self._flushing.persisted
            failure = self._flushing.failure
        return Answer(
            self._current.newest,
            self._current.line,
            self._ledger.threshold,
            tuple(self._ledger.voids),
            flush=order,
            persisted=persisted,
            failure=failure,
            base=self._ledger.base,
            health=health,
            copies=copies,
        )

    def beat(self, healer: str, holds: list[Holds], now: float) -> None:
        """Send the messages that are due. `holds` is for the healer."""
        neighbours = self._duties.beats_to(healer, now)
        for node_id in self._peers.due(now, self._beat):
            news = [*self._news_for(node_id, now), *(holds if node_id == healer else ())]
            for body in news or ([Beat()] if node_id in neighbours else []):
                self._outbox.send(node_id, body, now)

    def _news_for(self, node_id: str, now: float) -> list[Body]:
        """Return the messages that the node gets again, because nothing shows that it has received them."""
        news: list[Body] = []
        if self._is_coordinator(node_id):
            pending = (held for held in self._holdings.own() if not self._ledger.is_settled(held.shard.generation))
            news += map(GiveUp, self._ledger.own_voids)
            news += map(self._committing.report_of, pending)
            news += map(Lost, self._holdings.sources)
        wanted = self._flushing.wanted
        if wanted is not None and node_id == self._duties.orderer(now)[0]:
            news.append(WantPersisted(wanted.generation, wanted.reason, wanted.urgent))
        failure, order = self._flushing.own_failure, self._flushing.order
        is_news = failure is not None and order is not None and order.attempt == failure.attempt
        if failure is not None and is_news and node_id == self._flushing.giver:
            news.append(failure)
        return news + self._holdings.missing_from(node_id)
