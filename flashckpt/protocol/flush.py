"""Decides which node writes which generation to disk, and when. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashckpt.protocol.events import FlushEnded, HurryFlush, Notify, NotifyFlushFailed, StartFlush, StopFlush
from flashckpt.protocol.wire import FlushFailure, FlushOrder, WantPersisted
from flashckpt.types import Level, age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from flashckpt.protocol.commit import Committing
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import Effect, FlushWanted
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.members import Duties
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.placement import Placement
    from flashckpt.protocol.releasing import Releasing
    from flashckpt.types import Generation, PersistSettings, Session


# Decisions of the persistent tier: what to flush now, who writes what, when to try again. Pure.

_RETRY_FIRST_SECONDS = 5.0
_RETRY_MOST_SECONDS = 300.0


def choose(
    settings: PersistSettings,
    *,
    newest: Generation | None,
    persisted: Generation | None,
    wanted: tuple[Generation, str] | None,
    since_step: int,
    since_seconds: float,
) -> tuple[Generation | None, str]:
    """Return the committed generation to flush now, with the reason; or None with the reason why nothing is due.

    `newest` is the newest committed one, `wanted` what was asked for, `since_step` the step that was flushed or loaded
    last, `since_seconds` how long ago that was.
    """
    if newest is None:
        return None, "nothing is committed yet"
    if wanted is not None and not is_persisted(wanted[0], persisted):
        return wanted
    if is_persisted(newest, persisted):
        return None, f"step {newest.step} is persisted"
    # A generation is due once a multiple of the interval lies behind it: the save at the multiple may have been
    # skipped.
    if settings.interval is not None and newest.step // settings.interval > since_step // settings.interval:
        return newest, f"every {settings.interval} steps"
    if settings.interval_seconds is not None and since_seconds >= settings.interval_seconds:
        return newest, f"every {settings.interval_seconds / 60:g} minutes"
    return None, f"nothing is due since step {since_step}"


def is_persisted(generation: Generation, persisted: Generation | None) -> bool:
    return persisted is not None and age_order(generation) == age_order(persisted)


def retry_delay(failures: int) -> float:
    """Return the seconds until the next attempt after `failures` failures in a row."""
    return min(_RETRY_MOST_SECONDS, _RETRY_FIRST_SECONDS * 2.0 ** min(16, max(0, failures - 1)))


def writers(
    session: Session, placement: Placement, down: Collection[str]
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], str]:
    """Return (node → ranks whose shards it writes), and why it can't be done; "" = it can.

    Each node writes the shards of its own ranks. Where it is down, the first of its buddies that is not writes them.
    """
    chosen: dict[str, list[int]] = {member.node_id: [] for member in session.members if member.node_id not in down}
    for member in session.members:
        for rank in member.ranks:
            holders = (member.node_id, *placement.buddies(rank)[: placement.replicas])
            node_id = next((node for node in holders if node in chosen), None)
            if node_id is None:
                return (), f"no node that holds the shard of rank {rank} answers: {', '.join(holders)}"
            chosen[node_id].append(rank)
    return tuple((node_id, tuple(ranks)) for node_id, ranks in chosen.items() if ranks), ""


# What an agent's core knows of the persistent tier: what is wanted, being written, on disk, and what went wrong.
#
# One node orders (`who_orders`), all write, and the flusher of the node that ordered commits. An order is state: it is
# part of every message of that node while it is in force, and a node that no longer finds it there stops.

_GRACE_SECONDS = 60.0  # beyond a flush's own timeout, until a node drops an order of which it hears nothing more


@dataclass(frozen=True, slots=True)
class Wanted:
    generation: Generation
    reason: str
    urgent: bool = False  # somebody waits for it


class Flushing:
    """The flushes of one launch, as this node knows them. No I/O, no clock of its own."""

    def __init__(self) -> None:
        self.order: FlushOrder | None = None  # in force
        self.giver = ""  # the node that gave it, whose flusher commits
        self.persisted: Generation | None = None  # the newest that is known to lie in persist_dir
        self.wanted: Wanted | None = None  # asked for, and not begun
        self.problem = ""  # of the last attempt that failed
        self.failure: FlushFailure | None = None  # of the last flush, as the node that ordered it says
        self.own_failure: FlushFailure | None = None  # of this node's part of the order in force
        self.failures = 0  # in a row
        self.counts = {"done": 0, "failed": 0}
        self.retry_at = 0.0
        self.ending = ""  # why the newest is to be flushed, if it is not: the last trainer has left
        self._owed = ""  # why the newest is to be flushed after the delay that follows a failure
        self._owed_urgent = False
        self._started = 0  # attempt for which this node's flusher was started
        self._order_ends = 0.0
        self._since_step = 0
        self._since = 0.0
        self._orders = 0

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.order is not None or self.wanted is not None

    def needs(self, generation: Generation) -> bool:
        """Return True if a flush needs the generation's shards, whatever has been committed since."""
        order, wanted = self.order, self.wanted
        return (order is not None and order.generation == generation) or (
            wanted is not None and wanted.generation == generation
        )

    # --- events ---------------------------------------------------------------------------------------------

    def stop(self) -> list[Effect]:
        """Stop the flush that is under way: the launch is over."""
        effects: list[Effect] = [StopFlush()] if self.order is not None else []
        self.order = self.wanted = None
        return effects

    def enter(self, now: float) -> list[Effect]:
        """Start with nothing for another launch."""
        effects = self.stop()
        self.problem, self.failures, self.retry_at, self._owed = "", 0, 0.0, ""
        self.failure = self.own_failure = None
        self.ending = ""
        self._since_step, self._since = 0, now
        return effects

    def loaded(self, base: Generation | None, now: float) -> None:
        self._since_step, self._since = (0 if base is None else base.step), now

    def want(self, generation: Generation, reason: str, urgent: bool = False) -> list[Effect]:
        """Note that somebody asks for a generation that is committed, or may still be."""
        if is_persisted(generation, self.persisted):
            return [Notify(generation, Level.PERSISTED)]
        if self.order is not None and self.order.generation == generation:
            return self._hurry() if urgent else []
        before = self.wanted
        urgent = urgent or (before is not None and before.generation == generation and before.urgent)
        self.wanted = Wanted(generation, reason, urgent)
        if before is None or before.generation == generation:
            return []
        if age_order(before.generation) > age_order(generation):
            before, self.wanted = self.wanted, before
        # Only one generation is kept for a flush: each takes one slot per rank.
        return [Notify(before.generation, Level.NONE, f"step {self.wanted.generation.step} is flushed instead")]

    def _hurry(self) -> list[Effect]:
        if self.order is None or self.order.urgent:
            return []
        self.order = replace(self.order, urgent=True)
        return [HurryFlush()]

    def lost(self, generation: Generation) -> None:
        """Forget the wish for a generation that is void, abandoned, or not held any more."""
        if self.wanted is not None and self.wanted.generation == generation:
            self.wanted = None

    def ended(self, event: FlushEnded, now: float, node_id: str) -> list[Effect]:
        """Note that this node's flusher ended. What it says on the node that gave the order is the outcome for all
        nodes."""
        order = self.order
        if order is None or order.attempt != event.attempt:
            return []
        if self.giver != node_id:
            if event.reason:
                self.problem = event.reason
                self.own_failure = FlushFailure(order.generation, order.attempt, event.reason)
            return []
        self.order = None
        if not event.reason:
            self.counts["done"] += 1
            self.problem, self.failures, self._owed, self.retry_at = "", 0, "", 0.0
            self.failure = None
            return self.learn_persisted(order.generation, now)
        self.counts["failed"] += 1
        self.failures += 1
        self._owed, self._owed_urgent = order.reason, order.urgent
        self.retry_at = now + retry_delay(self.failures)
        return self._note(FlushFailure(order.generation, order.attempt, event.reason))

    def failed_at(self, sender: str, failure: FlushFailure, now: float, node_id: str) -> list[Effect]:
        """Fail the flush, as the node that ordered it, because another node's part failed: the others can't complete
        it."""
        if self.giver != node_id or self.order is None or self.order.attempt != failure.attempt:
            return []
        reason = f"{sender}: {failure.reason}"
        return [StopFlush(), *self.ended(FlushEnded(failure.attempt, reason), now, node_id)]

    def _note(self, failure: FlushFailure) -> list[Effect]:
        """Note and announce the outcome of a failed flush, once."""
        if self.failure is not None and self.failure.attempt == failure.attempt:
            return []
        self.failure, self.problem = failure, failure.reason
        return [NotifyFlushFailed(failure.generation, failure.reason)]

    def learn_persisted(self, generation: Generation, now: float) -> list[Effect]:
        if is_persisted(generation, self.persisted):
            return []
        self.persisted = generation
        # On all nodes: the node that orders next counts from here.
        self._since_step, self._since = generation.step, now
        self.lost(generation)
        return [Notify(generation, Level.PERSISTED)]

    def hear(
        self,
        giver: str,
        order: FlushOrder | None,
        persisted: Generation | None,
        failure: FlushFailure | None,
        now: float,
        timeout: float,
    ) -> list[Effect]:
        """Apply what the node says whose orders are in force."""
        effects = self.learn_persisted(persisted, now) if persisted is not None else []
        if failure is not None:
            effects += self._note(failure)
        elif self.failure is not None:
            self.failure, self.problem = None, ""
        if order is not None and (self.order is None or order.attempt != self.order.attempt):
            effects += [StopFlush()] if self.order is not None else []
            self.order, self.giver, self._order_ends = order, giver, now + timeout + _GRACE_SECONDS
            self.own_failure = None
        elif order is not None and order.urgent:
            effects += self._hurry()
        elif order is None and self.order is not None:
            effects.append(StopFlush())
            self.order = None
        return effects

    def without(self, down: Collection[str], node_id: str) -> list[Effect]:
        """Withdraw an order that cannot succeed any more, so that it is given again.

        That is one that counts on a node which is down now, or that a node gave which does not order any more.
        """
        order = self.order
        if order is None:
            return []
        gone = sorted(set(down) - set(order.down))
        if not gone and self.giver == node_id:
            return []
        self.order, self.wanted = None, self.wanted or Wanted(order.generation, order.reason, order.urgent)
        self.problem = (
            f"{', '.join(gone or [self.giver])} went down while step {order.generation.step} was being flushed"
        )
        return [StopFlush()]

    # --- decisions ------------------------------------------------------------------------------------------

    def decide(
        self,
        settings: PersistSettings,
        newest: Generation | None,
        is_there: Callable[[Generation], bool],
        down: Collection[str],
        now: float,
        node_id: str,
    ) -> FlushOrder | None:
        """Return the order to give now, as the node that orders. `is_there`: True if committed and still held."""
        if self.order is not None or now < self.retry_at:
            return None
        wanted, urgent = None, bool(self.ending)
        if self.wanted is not None and is_there(self.wanted.generation):
            wanted = (self.wanted.generation, self.wanted.reason)
            urgent = urgent or self.wanted.urgent
        elif (self._owed or self.ending) and newest is not None and is_there(newest):
            wanted = (newest, self._owed or self.ending)
            urgent = urgent or self._owed_urgent
        generation, reason = choose(
            settings,
            newest=newest if newest is not None and is_there(newest) else None,
            persisted=self.persisted,
            wanted=wanted,
            since_step=self._since_step,
            since_seconds=now - self._since,
        )
        if generation is None:
            return None
        self.lost(generation)
        self._orders += 1
        token = hashlib.blake2b(f"{generation!r} {self._orders} {now!r} {node_id}".encode(), digest_size=8)
        attempt = int.from_bytes(token.digest(), "big") or 1
        self.order, self.giver = FlushOrder(generation, attempt, reason, tuple(sorted(down)), urgent), node_id
        return self.order

    def start(self, session: Session, placement: Placement, node_id: str, now: float) -> list[Effect]:
        """Start this node's part of the order, once."""
        order = self.order
        if order is None:
            return []
        ours = self.giver == node_id
        if not ours and now > self._order_ends:
            self.order = None
            reason = f"{self.giver} never said how the flush of step {order.generation.step} ended"
            return [StopFlush(), *self._note(FlushFailure(order.generation, order.attempt, reason))]
        if self._started == order.attempt:
            return []
        self._started = order.attempt
        parts, problem = writers(session, placement, order.down)
        if problem or all(node != node_id for node, _ in parts):
            return self.ended(FlushEnded(order.attempt, problem), now, node_id) if problem and ours else []
        return [StartFlush(order, parts, commits=ours)]


# Brings committed generations to the persistent tier: gives orders if that is this node's duty, and follows them
# otherwise. No I/O. `Flushing` knows the orders.


class FlushOrders:
    """Orders and follows flushes. Does nothing in a launch without persist_dir."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        duties: Duties,
        flushing: Flushing,
        releasing: Releasing,
        committing: Committing,
        outbox: Outbox,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._duties = duties
        self._flushing = flushing
        self._releasing = releasing
        self._committing = committing
        self._outbox = outbox

    @property
    def _settings(self) -> PersistSettings | None:
        session = self._current.session
        return session.persist if session is not None else None

    def go_on(self, now: float) -> None:
        """Order what is due, if that is this node's duty, and start this node's part of the order in force."""
        current, flushing = self._current, self._flushing
        session, placement = current.session, current.placement
        if session is None or session.persist is None or placement is None or current.is_fenced:
            return
        wanted = flushing.wanted.generation if flushing.wanted is not None else None
        if wanted is not None and self._ledger.is_overtaken(wanted) and not self._holdings.has_own(wanted):
            flushing.lost(wanted)
            self._outbox.add(Notify(wanted, Level.NONE, "it is not in memory any more"))
        down = self._duties.silent(now)
        if self._duties.is_orderer(now):
            self._order(session.persist, down, now)
        self._outbox.add(*flushing.start(session, placement, current.node_id, now))

    def _order(self, settings: PersistSettings, down: dict[str, tuple[float, str]], now: float) -> None:
        current, kept = self._current, self._ledger.kept
        self._outbox.add(*self._flushing.without(down, current.node_id))
        # If the coordinator is down, only other members may know of its last record.
        committed = {*self._ledger.committed, self._ledger.hearsay}
        order = self._flushing.decide(
            settings,
            kept if kept is not None and current.is_of_this_launch(kept) else None,
            lambda g: g in committed and self._holdings.has_own(g),
            down,
            now,
            current.node_id,
        )
        if order is not None:
            self._committing.announce(now)

    def want(self, event: FlushWanted, now: float) -> None:
        """Note that this node asks for a flush, and tell the node that orders."""
        if self._settings is None or self._current.is_fenced:
            return
        newest, generation, orderer = self._ledger.threshold, event.generation, self._duties.orderer(now)[0]
        if generation is None:
            self._flushing.ending = event.reason
            if newest is None or orderer == self._current.node_id:
                return
            generation = newest.generation
        if self._current.is_of_this_launch(generation):
            self._want(generation, event.reason, event.urgent, now)
            self._outbox.send(orderer, WantPersisted(generation, event.reason, event.urgent), now)

    def asked(self, generation: Generation, reason: str, urgent: bool, now: float) -> None:
        """Note that another node asks for a flush."""
        if self._current.is_of_this_launch(generation) and self._duties.is_orderer(now):
            self._want(generation, reason, urgent, now)

    def _want(self, generation: Generation, reason: str, urgent: bool, now: float) -> None:
        before = self._flushing.order
        self._outbox.add(*self._flushing.want(generation, reason, urgent))
        if self._flushing.order != before and self._duties.is_orderer(now):
            self._committing.announce(now)  # so that others hear at once that somebody waits

    def failed_at(self, sender: str, failure: FlushFailure, now: float) -> None:
        """Fail the order in force because another node's part failed."""
        effects = self._flushing.failed_at(sender, failure, now, self._current.node_id)
        self._outbox.add(*effects)
        if effects:
            self._committing.announce(now)
            self._releasing.collect()

    def ended(self, event: FlushEnded, now: float) -> None:
        """Note that this node's flusher ended, and tell the node that ordered."""
        self._outbox.add(*self._flushing.ended(event, now, self._current.node_id))
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
