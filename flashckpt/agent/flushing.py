"""What an agent's core knows of the persistent tier: what is wanted, being written, on disk, and what went wrong.

One node orders (`who_orders`), all write, and the flusher of the one that ordered commits. An order is state: it stands
in every message of that node for as long as it holds, and a node that no longer finds it there stops.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashckpt.agent.flush_policy import choose, is_persisted, retry_delay, writers
from flashckpt.agent.messages import FlushEnded, HurryFlush, Notify, NotifyFlushFailed, StartFlush, StopFlush
from flashckpt.types import Level, age_order
from flashckpt.wire import FlushFailure, FlushOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from flashckpt.agent.messages import Effect
    from flashckpt.placement import Placement
    from flashckpt.types import Generation, PersistSettings, Session

_GRACE_SECONDS = 60.0  # beyond a flush's own timeout, until a node lets go of what was never spoken of again


@dataclass(frozen=True, slots=True)
class Wanted:
    generation: Generation
    reason: str
    urgent: bool = False  # somebody waits for it


class Flushing:
    """Part of the core: no I/O, no clock of its own."""

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
        self.ending = ""  # why the newest is to be flushed whenever it is not: nobody works here any more
        self._owed = ""  # why the newest is to be flushed once a failure has been waited out
        self._owed_urgent = False
        self._started = 0  # attempt that this node's flusher was started for
        self._order_ends = 0.0
        self._since_step = 0
        self._since = 0.0
        self._orders = 0

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.order is not None or self.wanted is not None

    def needs(self, generation: Generation) -> bool:
        """Its shards stay, whatever has been committed since."""
        order, wanted = self.order, self.wanted
        return (order is not None and order.generation == generation) or (
            wanted is not None and wanted.generation == generation
        )

    # --- events ---------------------------------------------------------------------------------------------

    def stop(self) -> list[Effect]:
        """The launch is over, and with it what it has ordered."""
        effects: list[Effect] = [StopFlush()] if self.order is not None else []
        self.order = self.wanted = None
        return effects

    def enter(self, now: float) -> list[Effect]:
        """Another launch."""
        effects = self.stop()
        self.problem, self.failures, self.retry_at, self._owed = "", 0, 0.0, ""
        self.failure = self.own_failure = None
        self.ending = ""
        self._since_step, self._since = 0, now
        return effects

    def loaded(self, base: Generation | None, now: float) -> None:
        self._since_step, self._since = (0 if base is None else base.step), now

    def want(self, generation: Generation, reason: str, urgent: bool = False) -> list[Effect]:
        """Somebody asks for a generation that is committed, or may still be."""
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
        # One at a time is kept for a flush: each takes a slot of every rank.
        return [Notify(before.generation, Level.NONE, f"step {self.wanted.generation.step} is flushed instead")]

    def _hurry(self) -> list[Effect]:
        if self.order is None or self.order.urgent:
            return []
        self.order = replace(self.order, urgent=True)
        return [HurryFlush()]

    def lost(self, generation: Generation) -> None:
        """It was given up, abandoned, or is not held any more."""
        if self.wanted is not None and self.wanted.generation == generation:
            self.wanted = None

    def ended(self, event: FlushEnded, now: float, node_id: str) -> list[Effect]:
        """This node's flusher is done. The outcome at the node that ordered is everybody's."""
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
        """Another node's part failed: as the one that ordered, don't wait for the others to find that out."""
        if self.giver != node_id or self.order is None or self.order.attempt != failure.attempt:
            return []
        reason = f"{sender}: {failure.reason}"
        return [StopFlush(), *self.ended(FlushEnded(failure.attempt, reason), now, node_id)]

    def _note(self, failure: FlushFailure) -> list[Effect]:
        """The outcome of the last flush, once."""
        if self.failure is not None and self.failure.attempt == failure.attempt:
            return []
        self.failure, self.problem = failure, failure.reason
        return [NotifyFlushFailed(failure.generation, failure.reason)]

    def learn_persisted(self, generation: Generation, now: float) -> list[Effect]:
        if is_persisted(generation, self.persisted):
            return []
        self.persisted = generation
        # On all nodes: whoever orders next counts from here.
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
        """What the node says whose orders count."""
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
        """As the one that orders: an order that counts on a node which is down now, or that another one gave which
        orders no longer, is given once more."""
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
        """As the one that orders: the order to give now. `is_there`: committed, and still held."""
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
        """This node's part of the order, once."""
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
