"""Saver: runs the saves of one rank: prepare → copy, in save() or in a thread → seal. Local, except for the first
save."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt.errors import DeadlineError, OtherRankError, PersistError
from flashckpt.save.attempts import Attempts
from flashckpt.save.deferred import Deferrals
from flashckpt.save.handle import SaveHandle
from flashckpt.save.outcomes import CALLERS_FAULT, Outcomes, is_raised
from flashckpt.save.overlap import Overlap
from flashckpt.save.prepare import Prepared, Preparer
from flashckpt.save.prewarm import Prewarm
from flashckpt.save.snapshot import when_ready
from flashckpt.save.write import ShardWriter
from flashckpt.types import Generation, Level, Outcome, ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from flashckpt.config import Settings
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.deferred import Deferred
    from flashckpt.save.own_slots import Slots
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import SlotStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveCall:
    """Records how far one call of `save` has come, for the code that handles its failure."""

    step: int
    began: float = 0.0
    handle: SaveHandle | None = None  # None: there is no generation yet
    reads_state: bool = False  # True while the caller's own code runs


class Saver:
    """Copies state dicts into sealed shards. Calls must not overlap: the owner takes a turn for each (start/turns.py).

    The owner also claims the job before the first save.
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        group: PrivateGroup,
        store: SlotStore,
        slots: Slots,
        threads: int,
        outcomes: Outcomes,
    ) -> None:
        self._config = settings.config
        self._persists = settings.persists
        self._topology = topology
        self._group = group
        self._store = store
        self._slots = slots
        self.outcomes = outcomes
        self.overlap = Overlap()
        self.prewarming = Prewarm()
        self.writer = ShardWriter(store, slots, settings.job, self._config, threads)
        self.attempts = Attempts(settings.job, store, self.writer)
        self.preparer = Preparer(self._config, topology, group, store, self.writer, settings.job)
        self.deferrals = Deferrals(
            recheck=settings.rechecks,
            device_snapshot=self._config.device_snapshot,
            threads=threads,
            timeout=self._config.save_timeout,
        )

    # --- a save ---------------------------------------------------------------------------------------------

    def save(
        self,
        call: SaveCall,
        state_dict: Mapping[Any, Any],
        extra: Mapping[str, Any] | None,
        *,
        overlap: bool,
        defers: Callable[[str, torch.Tensor], bool | None],
        owner_of: Callable[[str, torch.Tensor], torch.Tensor | None],
        on_begin: Callable[[SaveHandle], None] | None,
        inspect: Callable[[Flat, SavePlan], None] | None,
    ) -> SaveHandle:
        """Save the state. If it raises, the owner calls `must_raise`, and `fail` if that returns False, after the
        turn."""
        self._anchor(call.step)
        # Numbered before anything that can fail on this rank alone: a failed attempt counts too.
        generation = self.attempts.next(call.step)
        handle = call.handle = SaveHandle(call.step, generation, self._highest_level, self._persists)
        try:
            call.reads_state = True
            prepared = self.preparer.prepare(state_dict, extra, generation, inspect)
            call.reads_state = False
            prepared = self.preparer.agree(prepared)
            deferred = None if overlap else self.deferrals.everything(handle, prepared.flat, prepared.plan)
        except BaseException:
            self._slots.void(generation)
            raise
        planned = time.perf_counter() - call.began
        if deferred is None:
            split = functools.partial(self.deferrals.split, defers=defers, owner_of=owner_of)
            self._begin_overlapped(handle, generation, prepared, planned, split, on_begin)
        else:
            self._write(handle, generation, prepared, planned, deferred, None)
        handle.blocked_seconds = time.perf_counter() - call.began
        return handle

    def must_raise(self, call: SaveCall, error: Exception) -> bool:
        """Return True if save() has to raise `error`: the caller caused it, or the handle already has an outcome."""
        if is_raised(error, reads_state=call.reads_state):
            return True
        return call.handle is not None and call.handle.outcome is not None

    def fail(self, call: SaveCall, error: Exception) -> SaveHandle:
        """Make `error` the outcome of the call."""
        handle = SaveHandle(call.step, None, Level.SEALED) if call.handle is None else call.handle
        return self.outcomes.failed(handle, error)

    def write_planned(self, step: int, rank: int, world: int, plan: SavePlan, flat: Flat, values: bytes) -> Generation:
        """Write what the caller has planned and has agreed on with the other ranks. Raises if it can't. Local."""
        self.attempts.check(step)
        self.attempts.anchor(step)
        generation = self.attempts.next(step)
        try:
            self.await_prewarm(self._config.save_timeout)
            self.writer.write(ShardId(generation, rank, world), plan, flat, values)
        except BaseException:
            self._slots.void(generation)
            raise
        self.outcomes.counts[Outcome.OK.value] += 1
        return generation

    def _anchor(self, step: int) -> None:
        try:
            self.attempts.anchor(step)
        except Exception:
            self.preparer.withdraw()
            raise

    def _begin_overlapped(
        self,
        handle: SaveHandle,
        generation: Generation,
        prepared: Prepared,
        planned: float,
        split: Callable[[SaveHandle, Flat, SavePlan], Deferred],
        on_begin: Callable[[SaveHandle], None] | None,
    ) -> None:
        """Start the copy in the thread. Returns once the immediate tensors are copied."""
        try:
            deferred = split(handle, prepared.flat, prepared.plan)
            handle.before_pass = deferred.look_again
            ready = when_ready(prepared.flat)
            if on_begin is not None:
                on_begin(handle)
            self.overlap.start(handle, lambda: self._write(handle, generation, prepared, planned, deferred, ready))
            deferred.wait_until_taken()
        except BaseException as error:
            # Any exception, Ctrl-C too: without the handle the caller can't wait for the copy.
            handle.give_up()
            if self.overlap.handle is not handle and handle.outcome is None:
                self._slots.void(generation)
                if not isinstance(error, Exception):
                    self.outcomes.ended(handle, Outcome.FAILED, f"interrupted: {error!r}")
            elif isinstance(error, Exception):
                # The thread ends the save, as given up. It may read the tensors until then.
                self.settle()
            raise

    def _write(
        self,
        handle: SaveHandle,
        generation: Generation,
        prepared: Prepared,
        planned: float,
        deferred: Deferred,
        ready: Mapping[torch.device, torch.Event] | None,
    ) -> None:
        """Copy and seal. Local. Also runs in the thread of an overlapped save."""
        shard = ShardId(generation, self._topology.rank, self._topology.world)
        try:
            self.await_prewarm(self._config.save_timeout)
            written = self.writer.write(
                shard, prepared.plan, prepared.flat, prepared.values, deferred=deferred, ready=ready
            )
        except BaseException as error:
            self._slots.void(generation)
            if not isinstance(error, Exception) or isinstance(error, CALLERS_FAULT):
                known = error if isinstance(error, Exception) else None
                self.outcomes.ended(handle, Outcome.FAILED, str(error), known)
                raise
            self.outcomes.failed(handle, error)
            return
        finally:
            deferred.took()
        handle.size_bytes = written.size_bytes
        handle.timings = dataclasses.replace(written.timings, plan=planned)
        handle.advance(Level.SEALED)
        self._slots.follow(handle)
        self.outcomes.ended(handle, Outcome.OK, "")

    def settle(self, timeout: float | None = None) -> None:
        """Wait until no overlapped save is under way. Raise what that save raised. Local."""
        self.overlap.settle(self._config.save_timeout + self._config.peer_timeout if timeout is None else timeout)

    # --- memory ahead of the first save ---------------------------------------------------------------------

    def prewarm(self, state_dict: Mapping[Any, Any], *, background: bool) -> None:
        """Make the slots that saves of this state need. Collective before the ranks have agreed, else local."""
        prepared = self.preparer.agree(self.preparer.prepare(state_dict, None))
        place = self.writer.geometry(prepared.plan, prepared.values)
        self.deferrals.note(prepared.flat.tensors)
        self.await_prewarm(self._config.start_timeout)
        size_bytes, rank = place.file_length_bytes, self._topology.rank
        self.writer.expect(prepared.flat)
        if background:
            self.prewarming.start(lambda: self._slots.prepare(size_bytes, rank))
        else:
            self._slots.prepare(size_bytes, rank)

    def await_prewarm(self, timeout: float) -> None:
        """Wait until no prewarm is under way. Raises DeadlineError after `timeout` seconds."""
        if not self.prewarming.wait(timeout):
            raise DeadlineError(
                f"the memory for saves was not there within {timeout:g} s",
                hint="the agent, or a machine that has no core left, is slow: see its log",
            )

    # --- after a save ---------------------------------------------------------------------------------------

    def begin_launch(self) -> None:
        """Record that this process has begun another launch."""
        self.attempts.begin()
        self.outcomes.begin()

    def mend(self, doing: str) -> None:
        """Repair what the call `doing` left when an exception ended it. May be repeated."""
        with contextlib.suppress(Exception):  # the handle has the error
            self.settle()
        self.await_prewarm(self._config.save_timeout)
        freed = self._store.take_back()
        if freed:
            log.info("freed %d slots that an exception in %s() left half written", freed, doing)

    def raise_late_failure(self, handle: SaveHandle | None) -> None:
        """With on_save_error="raise", raise what happened to earlier saves after they were sealed. Each failure is
        raised once.

        Raises OtherRankError if a save will never be replicated, and PersistError if a flush failed for a reason that
        was not raised yet. First waits until the tensors of `handle` are copied, because the caller does not get the
        handle.
        """
        if self._config.on_save_error != "raise":
            return
        given_up = self._slots.replication.take_failure()
        failure = self._slots.flushes.take_failure() if given_up is None else None
        if handle is not None and (given_up is not None or failure is not None):
            handle.wait_until_copied(self._config.save_timeout)
        if given_up is not None:
            raise OtherRankError(
                f"step {given_up.step} was saved here and will never be replicated: {given_up.reason}",
                hint="the steps before and after it are not touched; on_save_error='log' goes on without raising",
                step=given_up.step,
            )
        if failure is not None:
            raise PersistError(
                f"step {failure.step} was not brought to persist_dir: {failure.reason}",
                hint="it stays in memory, and the flush is tried again; on_save_error='log' goes on without raising",
                step=failure.step,
            )

    @property
    def _highest_level(self) -> Level:
        replicated = len(self._topology.nodes) > 1 and self._config.replicas > 0
        return Level.REPLICATED if replicated else Level.SEALED
