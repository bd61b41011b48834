"""Runs an agent's decisions: a state machine without I/O, threads, clock or randomness.

`handle(event, now)` takes one event and returns the effects, in order. The agent's shell and the simulator drive it;
both must carry out the effects of one list in order, and one list before the next event.

What it guarantees (docs/protocol.md): a shard is reported only while enough other nodes hold it verified; a record is
written only when every rank's shard is reported, by the coordinator of the launch, once; a copy that was acknowledged
is released only when its generation is abandoned, void, or followed by a record of the same launch; and nothing of an
older launch has any effect once a newer one was seen. Healing (protocol/heal.py) only ever adds copies.

Each event is passed to the parts that it concerns. A part owns its state, reads that of the parts it was given, and
puts its decisions into the outbox. In the order in which they build on each other: current (the launch), peers, duties
(which node does what for all), ledger (what is decided), holdings (where shards lie), flushing, pushing; releasing,
copying (heals), committing, replicating; granting (slots), flush_orders, talking (messages).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashckpt.protocol.admit import answer_get, answer_put
from flashckpt.protocol.commit import Committing
from flashckpt.protocol.copying import Copying
from flashckpt.protocol.current_launch import CurrentLaunch, overtaken_by
from flashckpt.protocol.events import (
    Acknowledge,
    Answered,
    Begun,
    Effect,
    Event,
    Fetched,
    FlushEnded,
    FlushWanted,
    GaveUp,
    GetAsked,
    Gone,
    KeepSession,
    LeaseEnded,
    LinePut,
    Moved,
    Notify,
    Pushed,
    PushEnd,
    PutAsked,
    Quarantine,
    Received,
    RefuseFenced,
    Rotten,
    ShardSealed,
    SlotWanted,
    Started,
    Tick,
    Told,
    Unreachable,
    WantDropped,
)
from flashckpt.protocol.flush import Flushing, FlushOrders
from flashckpt.protocol.granting import Granting
from flashckpt.protocol.holdings import Holdings
from flashckpt.protocol.ledger import Ledger
from flashckpt.protocol.line import launch_of
from flashckpt.protocol.members import Duties, Neighbours
from flashckpt.protocol.outbox import Outbox
from flashckpt.protocol.releasing import Releasing
from flashckpt.protocol.replicate import Limits, Pushing, Replicating
from flashckpt.protocol.talking import Talking
from flashckpt.types import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.protocol.line import Line
    from flashckpt.protocol.placement import Placement
    from flashckpt.protocol.verdict import Word
    from flashckpt.protocol.wire import Report
    from flashckpt.types import Generation, Held, Launch, Record, Session, ShardId


class AgentCore:
    """One node's agent without its I/O. Other modules only read its public attributes."""

    def __init__(self, node_id: str, limits: Limits | None = None, wall_offset: float = 0.0) -> None:
        """`wall_offset`: wall clock minus `now`, for times shown to people."""
        self.node_id = node_id
        self.limits = limits = limits or Limits()
        patience = limits.peer_timeout
        self.current = current = CurrentLaunch(node_id)
        self.peers = peers = Neighbours()
        self.outbox = outbox = Outbox(current, peers)
        self.duties = duties = Duties(current, peers, patience)
        self.ledger = ledger = Ledger(current)
        self.holdings = holdings = Holdings(current)
        self.flushing = flushing = Flushing()
        self.pushing = pushing = Pushing(current, outbox, limits)
        known = (current, ledger, holdings)
        self.releasing = releasing = Releasing(*known, pushing.transfers, flushing, outbox)
        self.copying = copying = Copying(*known, peers, duties, pushing, outbox, limits)
        self.committing = committing = Committing(
            *known, peers, flushing, releasing, copying, outbox, patience=patience, wall_offset=wall_offset
        )
        self.replicating = replicating = Replicating(*known, pushing, committing, outbox)
        self.granting = Granting(*known, pushing.transfers, releasing, outbox)
        self.flush_orders = orders = FlushOrders(*known, duties, flushing, releasing, committing, outbox)
        self.talking = Talking(
            *known, peers, duties, flushing, releasing, copying, committing, replicating, orders, outbox, limits.beat
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.outbox.begin()
        _HANDLERS[type(event)](self, event, now)
        self.flush_orders.go_on(now)
        self.granting.serve(now)
        return self.outbox.effects

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        return self.current.session

    @property
    def placement(self) -> Placement | None:
        return self.current.placement

    @property
    def line(self) -> Line | None:
        """The line in force."""
        return self.current.line

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.current.lines

    @property
    def newest(self) -> Launch | None:
        return self.current.newest

    @property
    def is_fenced(self) -> bool:
        return self.current.is_fenced

    @property
    def is_coordinator(self) -> bool:
        return self.current.is_coordinator

    @property
    def coordinator(self) -> str:
        """The coordinator's node id; "" without a launch."""
        return self.session.coordinator if self.session is not None else ""

    @property
    def replicas(self) -> int:
        return self.current.replicas

    @property
    def records(self) -> tuple[Record, ...]:
        return self.ledger.records

    @property
    def threshold(self) -> Record | None:
        return self.ledger.threshold

    @property
    def kept(self) -> Generation | None:
        return self.ledger.kept

    @property
    def base(self) -> Generation | None:
        return self.ledger.base

    @property
    def voids(self) -> dict[Generation, str]:
        return self.ledger.voids

    @property
    def held(self) -> dict[ShardId, Held]:
        return self.holdings.held

    @property
    def acks(self) -> dict[ShardId, set[str]]:
        return self.holdings.acks

    @property
    def health(self) -> Word | None:
        return self.copying.health

    def silent(self, now: float) -> dict[str, tuple[float, str]]:
        return self.duties.silent(now)

    def healer(self, now: float) -> str:
        return self.duties.healer(now)

    def orderer(self, now: float) -> tuple[str, str]:
        return self.duties.orderer(now)

    def is_settled(self, generation: Generation) -> bool:
        return self.ledger.is_settled(generation)

    def owns(self, shard: ShardId) -> bool:
        return self.current.owns(shard)

    def backlog(self) -> list[tuple[Held, str, bool, str]]:
        """Pushes that are not done: what, to whom, whether it runs, what went wrong last."""
        return [(one.held, one.node_id, one.running, one.problem) for one in self.pushing.transfers.values()]

    def reported(self, generation: Generation) -> dict[int, Report]:
        """As the coordinator: what is known of the ranks of a generation."""
        return self.committing.ballot.reports(generation)

    # --- launches -------------------------------------------------------------------------------------------

    def _on_started(self, event: Started, now: float) -> None:
        self.holdings.start(event.held)
        self.current.start(event.lines)
        self.ledger.start(event.records)
        if event.session is not None:
            self._enter(event.session, now, event.base)
        self.releasing.collect()

    def _on_begun(self, event: Begun, now: float) -> None:
        session, before = event.session, self.session
        refused = self.current.why_not_begin(session)
        if refused:
            self.outbox.add(RefuseFenced(None, refused))
        elif session != before:
            self.outbox.add(KeepSession(session))
            if before is not None:
                self._notify_fenced(before, overtaken_by(session.launch, before.launch))
            self._enter(session, now)
            self.releasing.collect()

    def _enter(self, session: Session, now: float, base: Generation | None = None) -> None:
        placement = self.current.enter(session)
        self.ledger.enter(base)
        self.copying.enter(session, placement)
        self.committing.enter()
        self.pushing.stop()
        self.holdings.enter()
        self.outbox.add(*self.flushing.enter(now))
        self.peers.enter((member for member in session.members if member.node_id != self.node_id), now)
        for held in self.holdings.all_held():
            self.replicating.consider(held, now)

    def _on_line_put(self, event: LinePut, now: float) -> None:
        if self.current.is_older(event.launch):
            self.outbox.add(RefuseFenced(None, self.current.why_fenced(event.launch)))
            return
        # Before the line is adopted: what was loaded must not be taken for something that the line abandons.
        self.outbox.add(*self.ledger.keep_base(event.base))
        self.flushing.loaded(event.base, now)
        self._learn(event.launch, event.line)
        self.releasing.collect()

    def _learn(self, launch: Launch | None, line: Line | None) -> None:
        """Adopt a newer launch or line. If it ends the present launch, stop that and tell its trainers."""
        was_fenced = self.is_fenced
        adopted = self.current.learn(launch, line)
        if adopted:
            self.current.forget({launch_of(shard.generation) for shard in self.held})
            self.outbox.add(*adopted)
        if self.session is not None and self.is_fenced and not was_fenced:
            self.pushing.stop()
            self.committing.stop()
            self.outbox.add(*self.flushing.stop())
            self._notify_fenced(self.session, self.current.why_fenced(self.session.launch))

    def _notify_fenced(self, session: Session, reason: str) -> None:
        """Tell trainers of an ended launch that its generations will never reach the levels they wait for."""
        for generation in {s.generation for s in self.held if launch_of(s.generation) == session.launch}:
            if not self.ledger.is_overtaken(generation):
                self.outbox.add(Notify(generation, Level.NONE, reason))

    # --- trainers of this node ------------------------------------------------------------------------------

    def _on_slot_wanted(self, event: SlotWanted, now: float) -> None:
        for shard in self.granting.ask(event):
            reason = f"rank {shard.rank} went on to step {event.shard.generation.step}"
            self.committing.give_up(shard.generation, reason, now)

    def _on_want_dropped(self, event: WantDropped, now: float) -> None:
        self.granting.drop(event.request_id)

    def _on_gave_up(self, event: GaveUp, now: float) -> None:
        self.granting.gave_up(event.generation, event.rank)
        if not self.holdings.has_from(event.generation, event.rank):  # else it has delivered
            self.committing.give_up(event.generation, f"rank {event.rank} gave it up", now)

    def _on_lease_ended(self, event: LeaseEnded, now: float) -> None:
        for shard in self.granting.end(event.lease_id):
            self.committing.give_up(shard.generation, f"rank {shard.rank} ended while it was writing", now)

    # --- shards in this node's memory -----------------------------------------------------------------------

    def _on_sealed(self, event: ShardSealed, now: float) -> None:
        self.granting.sealed(event.held.shard)
        if event.held.shard not in self.held:
            self.holdings.add(event.held)
            self.replicating.consider(event.held, now)
            self.releasing.collect()

    def _on_fetched(self, event: Fetched, now: float) -> None:
        self._on_sealed(ShardSealed(event.held), now)
        # A line or another launch that came during the transfer may have made the copy needless.
        if event.held.shard in self.held:
            self.outbox.add(Acknowledge())

    def _on_rotten(self, event: Rotten, now: float) -> None:
        held = self.holdings.lose(event.shard)
        if held is not None:
            self.outbox.add(Quarantine(event.shard, event.reason))
            self.replicating.lost(held, now)

    def _on_gone(self, event: Gone, now: float) -> None:
        held = self.holdings.lose(event.shard)
        if held is not None:
            self.replicating.lost(held, now)

    def _on_flush_wanted(self, event: FlushWanted, now: float) -> None:
        self.flush_orders.want(event, now)

    def _on_flush_ended(self, event: FlushEnded, now: float) -> None:
        self.flush_orders.ended(event, now)

    # --- time -----------------------------------------------------------------------------------------------

    def _on_tick(self, event: Tick, now: float) -> None:
        if self.session is None or self.is_fenced:
            return
        self.pushing.start(now)
        healer = self.duties.healer(now)
        holds = self.copying.look(healer, now)
        self.talking.beat(healer, holds, now)

    # --- other nodes ----------------------------------------------------------------------------------------

    def _meet(self, node_id: str, launch: Launch | None, line: Line | None, now: float) -> None:
        """Record that the node is alive, then apply the launch and line that it reports."""
        self.peers.hear(node_id, now)
        self._learn(launch, line)

    def _on_told(self, event: Told, now: float) -> None:
        envelope = event.envelope
        self._meet(envelope.sender, envelope.launch, envelope.line, now)
        self.talking.told(envelope, now)

    def _on_answered(self, event: Answered, now: float) -> None:
        self._meet(event.node_id, event.answer.launch, event.answer.line, now)
        self.talking.answered(event.node_id, event.answer, now)

    def _on_unreachable(self, event: Unreachable, now: float) -> None:
        self.peers.miss(event.node_id, event.reason)

    def _on_moved(self, event: Moved, now: float) -> None:
        self.peers.move(event.node_id, event.address)

    def _on_put_asked(self, event: PutAsked, now: float) -> None:
        put = event.put
        self._meet(put.sender, put.launch, put.line, now)
        self.releasing.collect()
        expected = self.copying.is_expected(put.shard, put.digest, now)
        spare = self.releasing.is_only_flushed
        self.outbox.add(answer_put(put, self.current, self.ledger, self.holdings, expected=expected, is_spare=spare))

    def _on_received(self, event: Received, now: float) -> None:
        self.peers.hear(event.sender, now)
        shard, current = event.held.shard, self.current
        asked_for = self.holdings.add(event.held)
        # A line, a record or another launch that came during the transfer may have made the copy needless: then it does
        # not count.
        self.releasing.collect()
        counts = asked_for or current.is_of_this_launch(shard.generation) or shard.generation == self.kept
        is_present = self.session is not None and self.session.launch == event.launch and not self.is_fenced
        if shard in self.held and is_present and counts:
            self.outbox.add(Acknowledge())
            self.replicating.consider(event.held, now)
            if shard.generation == self.kept:
                self.copying.say_holds(now)

    def _on_get_asked(self, event: GetAsked, now: float) -> None:
        self._meet(event.get.sender, event.get.launch, event.get.line, now)
        self.releasing.collect()
        self.outbox.add(answer_get(event.get, self.current, self.holdings))

    def _on_pushed(self, event: Pushed, now: float) -> None:
        if event.end is not PushEnd.FAILED:
            self.peers.hear(event.node_id, now)
        self._learn(event.launch, event.line)
        # After `_meet`: what was learned there may have ended all pushes of this launch.
        one = self.pushing.end(event, now)
        if one is None:
            self.releasing.collect()
            return
        if event.end is PushEnd.FAILED:
            self.peers.miss(event.node_id, event.reason)
        if one.acked:
            self.replicating.acked(one, now)
        if one.heals:
            self.copying.ended(one, event, now)
        self.releasing.collect()
        self.pushing.start(now)


_HANDLERS: dict[type, Callable[[AgentCore, Any, float], None]] = {
    Started: AgentCore._on_started,
    Begun: AgentCore._on_begun,
    LinePut: AgentCore._on_line_put,
    SlotWanted: AgentCore._on_slot_wanted,
    WantDropped: AgentCore._on_want_dropped,
    ShardSealed: AgentCore._on_sealed,
    GaveUp: AgentCore._on_gave_up,
    LeaseEnded: AgentCore._on_lease_ended,
    Rotten: AgentCore._on_rotten,
    Gone: AgentCore._on_gone,
    FlushWanted: AgentCore._on_flush_wanted,
    FlushEnded: AgentCore._on_flush_ended,
    Tick: AgentCore._on_tick,
    Told: AgentCore._on_told,
    Answered: AgentCore._on_answered,
    Unreachable: AgentCore._on_unreachable,
    PutAsked: AgentCore._on_put_asked,
    Received: AgentCore._on_received,
    GetAsked: AgentCore._on_get_asked,
    Fetched: AgentCore._on_fetched,
    Pushed: AgentCore._on_pushed,
    Moved: AgentCore._on_moved,
}
