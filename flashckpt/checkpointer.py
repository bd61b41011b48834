"""Checkpointer: save any state dict to the memory of the cluster and load it back. Reads as the list of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from flashckpt.collector import resume_collector
from flashckpt.config import CheckpointConfig, Settings, resolve
from flashckpt.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    OtherRankError,
    PersistError,
    UnusableError,
)
from flashckpt.load.context import LoadContext
from flashckpt.load.disk.restore import load_newest, remember_line, take_disk_inventory
from flashckpt.load.readback import read_back
from flashckpt.load.recover import Recovery, Request
from flashckpt.protocol.line import begun
from flashckpt.save.attempts import Attempts, check_step_to_load
from flashckpt.save.deferred import Deferrals
from flashckpt.save.handle import SaveHandle
from flashckpt.save.outcomes import CALLERS_FAULT, Outcomes, is_raised
from flashckpt.save.overlap import Overlap
from flashckpt.save.prepare import Prepared, Preparer, check_mapping
from flashckpt.save.prewarm import Prewarm
from flashckpt.save.retention import GenerationState
from flashckpt.save.snapshot import when_ready
from flashckpt.save.write import ShardWriter
from flashckpt.start.claim import refuse_beside_live, refuse_beside_live_here
from flashckpt.start.closing import Parts, unmasked
from flashckpt.start.opening import open_all
from flashckpt.start.take_over import highest_epoch, put_line, take_over
from flashckpt.start.turns import Turn, Turns
from flashckpt.store.owner import Owner
from flashckpt.types import Generation, Launch, Level, Outcome, Session, ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence

    import torch
    import torch.distributed as dist

    from flashckpt.load.disk.restore import DiskInventory
    from flashckpt.load.histories import Pick
    from flashckpt.load.recover import Found
    from flashckpt.load.result import LoadResult
    from flashckpt.protocol.line import Line
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.deferred import Deferred
    from flashckpt.save.flush_news import FlushNews
    from flashckpt.save.plan import SavePlan
    from flashckpt.save.replication_news import ReplicationNews
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import SlotStore, StoreStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointerStatus:
    """A moment's view, for people and monitors."""

    job: str
    step: int | None  # the newest complete generation on this node
    generations: tuple[tuple[Generation, str, str], ...]  # with state and reason, newest first
    saves: dict[str, int]  # how many ended how
    last_problem: str
    store: StoreStatus
    device_copies: dict[str, str]  # device type → "registered", "ring" or "plain" (devices/copier.py)


@dataclass(frozen=True, slots=True)
class DcpOrigin:
    """A trainer as seen from a process that DCP spawned for it."""

    settings: Settings
    launch: Launch
    topology: Topology
    session: Session | None  # None where there is no agent
    process: str  # of the trainer


P = ParamSpec("P")


def _given_up_on_error(
    save: Callable[Concatenate[Checkpointer, P], SaveHandle],
) -> Callable[Concatenate[Checkpointer, P], SaveHandle]:
    """Give the save up if the call raises: a caller without a handle can't wait for the copy."""

    @functools.wraps(save)
    def call(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> SaveHandle:
        before = self._overlap.handle
        try:
            handle = save(self, *args, **kwargs)
        except BaseException:
            begun = self._overlap.handle
            if begun is not None and begun is not before:
                begun.give_up()
            raise
        if self.raises_late_failures:
            self.raise_late_failure(handle)
        return handle

    return call


class Checkpointer:
    """Saves and loads state dicts. Make one on every rank; a context manager.

    Start, `load`, `start_fresh`, `prewarm` and the first `save` are collective over a private group; all later
    saves are local. Nothing here is thread-safe against itself: overlapping calls raise ConflictError.

    An exception at any moment, as from Ctrl-C or an alarm, leaves it usable or closed. If it ended a collective call
    that other ranks went on with, the next collective call raises ConflictError: make a new Checkpointer on all ranks.
    """

    def __init__(
        self, config: CheckpointConfig | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.config = config or CheckpointConfig()
        self._settings = resolve(self.config)
        self._turns = Turns(*self._weakly())
        self._closed = self._all_closed = False
        self.raises_late_failures = True  # from save(), with on_save_error="raise"; a manager does it itself
        self._parts: Parts | None = None  # None: FLASHCKPT_DISABLE is set
        self._dropped: weakref.finalize[[], Checkpointer] | None = None
        self._outcomes = Outcomes(self.config)
        self._overlap = Overlap()
        self._prewarm = Prewarm()
        if self._settings.disabled:
            log.warning("FLASHCKPT_DISABLE is set: nothing is saved or loaded")
            return
        undo = contextlib.ExitStack()
        try:
            self._open(process_group, undo)
        except BaseException:
            self._closed = self._all_closed = True
            undo.close()
            resume_collector()
            raise

    def _open(self, process_group: dist.ProcessGroup | None, undo: contextlib.ExitStack) -> None:
        opened = open_all(self._settings, process_group, undo)
        self._settings, self._group, self._store = opened.settings, opened.group, opened.store
        self._outcomes.belong_to(f"job {opened.settings.job!r}, rank {opened.topology.rank}")
        self._topology, self._threads = opened.topology, opened.threads
        self._slots, self._memory = opened.slots, opened.memory
        self._claims = False  # whether this launch may take the agents over: no other one is alive, or it was told to
        self._slots.on_overtaken = self._outcomes.note_overtaken
        self._disk_epoch = 0  # the highest that a load saw in persist_dir
        self._writer = ShardWriter(self._store, self._slots, self._settings.job, self.config, self._threads)
        self._writer.on_claimed = self._weakly_remember()
        self._attempts = Attempts(self._settings.job, self._store, self._writer)
        self._preparer = Preparer(
            self.config, self._topology, self._group, self._store, self._writer, self._settings.job
        )
        self._deferrals = Deferrals(
            recheck=self._settings.rechecks,
            device_snapshot=self.config.device_snapshot,
            threads=self._threads,
            timeout=self.config.save_timeout,
        )
        job, parts = self._settings.job, (self._group, self._slots, self._writer, self._store)
        self._parts = Parts(job, *parts, self._overlap, self._prewarm)
        self._dropped = weakref.finalize(self, self._parts.drop)
        self._dropped.atexit = False  # then the process ends, and the agent notices that

    def _weakly(self) -> tuple[Callable[[Turn], None], Callable[[], None]]:
        """What puts calls in order. Without a cycle, so that a Checkpointer that is dropped goes at once."""
        me = weakref.ref(self)

        def mend(broken: Turn) -> None:
            if (this := me()) is not None:
                this._mend(broken)

        def begin() -> None:
            if (this := me()) is not None:
                this._begin()

        return mend, begin

    def _weakly_remember(self) -> Callable[[Line], None]:
        me = weakref.ref(self)

        def remember(line: Line) -> None:
            if (this := me()) is not None:
                this._remember_line(line)

        return remember

    # --- save -----------------------------------------------------------------------------------------------

    @_given_up_on_error
    def save(
        self,
        step: int,
        state_dict: Mapping[Any, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        overlap: bool = False,
        defers: Callable[[str, torch.Tensor], bool | None] | None = None,
        owner_of: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        on_begin: Callable[[SaveHandle], None] | None = None,
        inspect: Callable[[Flat, SavePlan], None] | None = None,
    ) -> SaveHandle:
        """Copies the state to this node's memory. Once this returns the tensors may be mutated.

        Every rank has to call it with the same step. What the state dict or the call itself is to blame for (a value
        that can't be saved, a step that goes down) is raised, as is what the state's own code raises. Everything else
        ends in `handle.outcome == "failed"`, or raises a FlashError if `config.on_save_error` is "raise".

        With `overlap` the copy runs in a thread, and tensors may be mutated once `handle.wait("staged")` has returned;
        other values are taken here and now. The next call waits for it. Whoever can't wait any longer calls
        `handle.give_up()` before it mutates them: then the copy is thrown away. If a tensor changes before that and the
        change is found, the shard is not sealed, the reason names the tensor, and later saves copy it before they
        return. `defers(key, tensor)` returns True if a tensor may be deferred, or None if it may be as long as it is
        large and has not changed since the last save. Without `defers`, all tensors may. `owner_of(tensor)` returns the
        parameter that a tensor is an alias of, if any: its version counter is compared too. `on_begin` gets the handle
        before the copy begins. `inspect` gets the flattened state before that and refuses it by raising.

        The first save calls each `state_dict()` twice: if the second call gives other keys, kinds, shapes or dtypes, no
        load could fill them, and it raises StructureError.
        """
        handle: SaveHandle | None = None
        reads_state = False
        try:
            with self._alone("save"):
                if self._settings.disabled:
                    return self._outcomes.skipped(step, "FLASHCKPT_DISABLE is set")
                if self.config.load_only:
                    return self._outcomes.skipped(step, "load_only is set")
                self._attempts.check(step)
                began = time.perf_counter()
                if self._claims and not self._preparer.is_collective:
                    self._group.roll.note_step(step)
                else:
                    self._group.meet("save", f"step {step}", self.config.save_timeout, step=step)
                if not self._claims:
                    # Before the first save of a launch that has loaded nothing: it would take the agents over.
                    self._refuse_beside_live()
                    self._claims = True
                self._anchor(step)
                # Before anything that can fail on this rank alone: an attempt counts also where it comes to nothing.
                generation = self._attempts.next(step)
                handle = SaveHandle(step, generation, self._highest_level, self.persists)
                try:
                    reads_state = True
                    prepared = self._preparer.prepare(state_dict, extra, generation, inspect)
                    reads_state = False
                    prepared = self._preparer.agree(prepared)
                    deferred = None if overlap else self._deferrals.everything(handle, prepared.flat, prepared.plan)
                except BaseException:
                    self._slots.void(generation)
                    raise
                planned = time.perf_counter() - began
                if deferred is None:
                    split = functools.partial(
                        self._deferrals.split, defers=defers or _defers_all, owner_of=owner_of or _owned_by_nobody
                    )
                    self._begin_overlapped(handle, generation, prepared, planned, split, on_begin)
                else:
                    self._write(handle, generation, prepared, planned, deferred, None)
                handle.blocked_seconds = time.perf_counter() - began
                return handle
        except Exception as error:
            if is_raised(error, reads_state=reads_state) or (handle is not None and handle.outcome is not None):
                raise
            if handle is None:
                handle = SaveHandle(step, None, Level.SEALED)
            return self._outcomes.failed(handle, error)

    def _anchor(self, step: int) -> None:
        try:
            self._attempts.anchor(step)
        except Exception:
            self._preparer.withdraw()
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
        """Starts the copy in the thread. Returns once the immediate tensors are copied."""
        try:
            deferred = split(handle, prepared.flat, prepared.plan)
            handle.before_pass = deferred.look_again
            ready = when_ready(prepared.flat)
            if on_begin is not None:
                on_begin(handle)
            self._overlap.start(handle, lambda: self._write(handle, generation, prepared, planned, deferred, ready))
            deferred.wait_until_taken()
        except BaseException as error:
            # Any exception, Ctrl-C too: without the handle the caller can't wait for the copy.
            handle.give_up()
            if self._overlap.handle is not handle and handle.outcome is None:
                self._slots.void(generation)
                if not isinstance(error, Exception):
                    self._outcomes.ended(handle, Outcome.FAILED, f"interrupted: {error!r}")
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
        """The part of a save that moves bytes. Local; also in the thread of an overlapped save."""
        shard = ShardId(generation, self._topology.rank, self._topology.world)
        try:
            self._finish_prewarm(self.config.save_timeout)
            written = self._writer.write(
                shard, prepared.plan, prepared.flat, prepared.values, deferred=deferred, ready=ready
            )
        except BaseException as error:
            self._slots.void(generation)
            if not isinstance(error, Exception) or isinstance(error, CALLERS_FAULT):
                known = error if isinstance(error, Exception) else None
                self._outcomes.ended(handle, Outcome.FAILED, str(error), known)
                raise
            self._outcomes.failed(handle, error)
            return
        finally:
            deferred.took()
        handle.size_bytes = written.size_bytes
        handle.timings = dataclasses.replace(written.timings, plan=planned)
        handle.advance(Level.SEALED)
        self._slots.follow(handle)
        self._outcomes.ended(handle, Outcome.OK, "")

    def settle(self, timeout: float | None = None) -> None:
        """Returns when no overlapped save is under way; raises what it raised. Local."""
        self._overlap.settle(self.config.save_timeout + self.config.peer_timeout if timeout is None else timeout)

    def prewarm(self, state_dict: Mapping[Any, Any], *, background: bool = False) -> None:
        """Allocates, maps and faults the slots ahead of the first save. Collective.

        Raises NoSpaceError, with figures, where the node's memory can't hold what the ranks are going to save. With
        `background` it returns once that is known, and a thread of low priority goes on; a save that comes
        meanwhile waits for it where it would do the same work.
        """
        with self._alone("prewarm"):
            if self._settings.disabled:
                return
            if not self._claims or not self._preparer.is_agreed:
                self._group.meet("prewarm", "", self.config.save_timeout)
            if not self._claims:
                self._refuse_beside_live()
            prepared = self._preparer.agree(self._preparer.prepare(state_dict, None))
            place = self._writer.geometry(prepared.plan, prepared.values)
            self._deferrals.note(prepared.flat.tensors)
            self._finish_prewarm(self.config.start_timeout)
            size_bytes, rank = place.file_length_bytes, self._topology.rank
            self._writer.expect(prepared.flat)
            if background:
                self._prewarm.start(lambda: self._slots.prepare(size_bytes, rank))
            else:
                self._slots.prepare(size_bytes, rank)

    def _finish_prewarm(self, timeout: float) -> None:
        if not self._prewarm.wait(timeout):
            raise DeadlineError(
                f"the memory for saves was not there within {timeout:g} s",
                hint="the agent, or a machine that has no core left, is slow: see its log",
            )

    # --- load -----------------------------------------------------------------------------------------------

    def load(
        self,
        state_dict: MutableMapping[Any, Any],
        step: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        allow_fresh: bool = False,
        read_only: bool | None = None,
        take_over: bool = False,
        history: str | None = None,
        screen: Callable[[Found], Callable[[str], bool]] | None = None,
    ) -> LoadResult | None:
        """Fills the state dict, in place, from the newest usable generation (or that of `step`). Collective.

        None means that the job has never saved anything. Where something exists but nothing is usable it raises
        UnusableError with the reason for each generation, unless `allow_fresh` and no tensor was written to. `keys`
        restricts the load to keys with these prefixes; `strict=False` lets keys be missing on either side; `cast`
        converts dtypes. With `step` and `keys` or `strict=False`, what is whole of a generation that lacks shards is
        loaded, too. `screen` is called with what was found before any tensor is read: it raises where that must not be
        loaded, or says which keys to load.

        A load takes the job over: what other launches saved above the loaded step is abandoned from then on, and they
        can't save any more. A load that finds nothing changes nothing until the first save. If there are two histories
        of which none goes on from the other, it raises AmbiguousHistoryError, which names both, and changes nothing.
        `history` is the name of the one to take, or of an abandoned one to go back to. Where trainers of another launch
        are alive on one of its nodes it raises LiveJobError on all ranks, unless `take_over`. `read_only=True` (an
        evaluation beside the training, say) changes nothing, in memory or on disk; by default it is `config.load_only`.
        """
        with self._alone("load"):
            read_only = self.reads_only(read_only, take_over)
            if isinstance(keys, str):
                raise ConfigError(f"keys: expected a sequence of prefixes, found the string {keys!r}", hint="keys=[…]")
            check_step_to_load(step)
            check_mapping("state dict", state_dict)
            if self._settings.disabled:
                return None
            self._deferrals.forget_frozen()
            began = time.perf_counter()
            self._group.meet("load", "newest" if step is None else f"step {step}", self.config.start_timeout)
            context = self.context()
            on_disk = self._look_at_disk()
            if not read_only:
                self._claim(take_over=take_over)
                self._renew_launch()
            recovery = Recovery(context)
            request = Request(
                step=step,
                keys=None if keys is None else tuple(keys),
                strict=strict,
                cast=cast,
                screen=screen,
            )
            with recovery:
                inventory = recovery.take_inventory()
                inventoried = time.perf_counter()
                recovery.pick_history(inventory, step, history, on_disk.whole, on_disk.lines)
                given_up: Pick | None = None
                try:
                    persist_dir = self.config.persist_dir
                    try:
                        result = load_newest(recovery, context, inventory, on_disk, persist_dir, state_dict, request)
                    except (UnusableError, NotFoundError) as error:
                        result = recovery.load_parts(error, inventory, state_dict, request)
                except UnusableError as error:
                    if not allow_fresh:
                        raise
                    recovery.refuse_if_touched(error)
                    log.warning("nothing usable; allow_fresh: starting anew")
                    result, given_up = None, recovery.anew(inventory, on_disk.whole, on_disk.lines)
                finally:
                    if not read_only:
                        recovery.keep_losses()
                if result is None and inventory.quarantined and not allow_fresh:
                    raise UnusableError(
                        f"job {self._settings.job!r}: nothing but {inventory.quarantined} quarantined shards exist"
                    )
                if result is None:
                    if not read_only:
                        self._begin_anew(given_up, recovery.present)
                    return None
                if not read_only:
                    line = recovery.line_for(self._slots.launch, result.generation)
                    self._put_line(line, result.generation, recovery.present)
                timings = dataclasses.replace(result.timings, inventory=inventoried - began)
                log.info("loaded %s from %s in %.3f s", result.generation, result.source, timings.total)
                return dataclasses.replace(result, timings=timings)

    def load_path(
        self,
        path: str,
        state_dict: MutableMapping[Any, Any],
        *,
        strict: bool = True,
        cast: bool = False,
        only_hf: bool = False,
        screen: Callable[[Found], Callable[[str], bool]] | None = None,
    ) -> LoadResult:
        """Fills the state dict from the checkpoint at `path`, this job's or another's, ours or plain DCP's, or from a
        Hugging Face model, whose tensors are found below `model` (`only_hf` refuses anything else). Collective.

        Nothing is taken over: where the job itself has saved something, it has to be loaded, or given up by
        `start_fresh`, before the next save. NotFoundError where there is no checkpoint.
        """
        with self._alone("load_path"):
            self._check_enabled()
            from flashckpt.load.disk.elsewhere import load_path

            self._group.meet("load_path", path, self.config.start_timeout)
            self._deferrals.forget_frozen()
            request = Request(strict=strict, cast=cast, screen=screen)
            context = self.context()
            with Recovery(context) as recovery:
                return load_path(recovery, context, path, state_dict, request, only_hf=only_hf)

    def reads_only(self, read_only: bool | None, take_over: bool) -> bool:
        """Whether a load with these arguments leaves the job as it is."""
        chosen = self.config.load_only if read_only is None else read_only
        if chosen and take_over:
            why = "config.load_only" if read_only is None else "read_only=True"
            raise ConfigError(f"load: expected {why} or take_over=True, found both", hint="leave one of them out")
        return chosen

    def start_fresh(self, *, take_over: bool = False) -> None:
        """Abandons everything that earlier launches saved. Collective. Their memory is reused by later saves.

        Raises LiveJobError beside live trainers of another launch, unless `take_over`.
        """
        with self._alone("start_fresh"):
            if not self._settings.disabled:
                self._refuse_to_write("start_fresh")
                self._group.meet("start_fresh", "", self.config.start_timeout)
                self._claim(take_over=take_over)
                self._renew_launch()
                on_disk = self._look_at_disk()
                with Recovery(self.context()) as recovery:
                    inventory = recovery.take_inventory()
                    given_up = recovery.anew(inventory, on_disk.whole, on_disk.lines)
                self._put_line(self._begin_anew(given_up, recovery.present), None, recovery.present)

    def flush(self, step: int | None = None) -> Generation:
        """Asks this node's agent to bring the newest committed generation (or that of `step`) to persist_dir.

        Returns at once, with what will be flushed: all nodes write their part in the background, whoever asks.
        `handle.wait("persisted")` asks and waits. NotFoundError where it is not in memory (any more).
        """
        self._check_enabled()
        return self._slots.flush(step)

    @property
    def flush_news(self) -> FlushNews | None:
        """What became of flushes. None where checkpointing is disabled."""
        return None if self._settings.disabled else self._slots.flushes

    @property
    def replication_news(self) -> ReplicationNews | None:
        """How replication goes on. None where checkpointing is disabled."""
        return None if self._settings.disabled else self._slots.replication

    def raise_late_failure(self, handle: SaveHandle | None) -> None:
        """With on_save_error="raise": raise what befell earlier saves after they were sealed, each once.

        OtherRankError if one will never be replicated; PersistError if a flush failed for a reason that was not raised
        yet. Waits first until the tensors of `handle` are copied, because the caller does not get it.
        """
        if self.config.on_save_error != "raise" or self._settings.disabled:
            return
        given_up = self._slots.replication.take_failure()
        failure = self._slots.flushes.take_failure() if given_up is None else None
        if handle is not None and (given_up is not None or failure is not None):
            handle.wait_until_copied(self.config.save_timeout)
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

    # --- for flashckpt.dcp ----------------------------------------------------------------------------------

    def origin(self) -> DcpOrigin:
        """What a process that DCP spawns needs to write in this one's name."""
        self._check_enabled()
        return DcpOrigin(
            self._settings, self._writer.launch, self._topology, self._slots.session, Owner.current().identity
        )

    def write_for_dcp(self, step: int, rank: int, world: int, plan: SavePlan, flat: Flat, values: bytes) -> Generation:
        """Writes what DCP planned; raises where it can't. Local: DCP has agreed with the other ranks already."""
        with self._alone("write_data"):
            self._attempts.check(step)
            self._attempts.anchor(step)
            generation = self._attempts.next(step)
            try:
                self._finish_prewarm(self.config.save_timeout)
                self._writer.write(ShardId(generation, rank, world), plan, flat, values)
            except BaseException:
                self._slots.void(generation)
                raise
            self._outcomes.counts[Outcome.OK.value] += 1
            return generation

    @property
    def overtaken(self) -> str:
        """Why no save of this launch counts any more. "": no other launch has taken the job over."""
        return self._outcomes.overtaken

    @property
    def is_on_one_node(self) -> bool:
        return len(self._topology.nodes) == 1

    def context(self, *, alone: bool = False) -> LoadContext:
        """What a load stands on; `alone`: without the other ranks, from this node's memory."""
        self._check_enabled()
        # Less than the group waits: what goes wrong is told by whoever knows it, not found out by a silence.
        timeout = 0.9 * self.config.start_timeout
        options: dict[str, Any] = {
            "job": self._settings.job,
            "verify": self._settings.verifies,
            "threads": self._threads,
            "timeout": timeout,
            "warns": self.config.same_on_ranks == "check",
        }
        if alone:
            return LoadContext.alone(self._topology, self._store, self._memory, **options)
        return LoadContext.together(self._topology, self._group, self._store, self._memory, **options)

    def settle_for_dcp(self) -> None:
        """Waits for ranks of this node that are still sealing what this one has sealed: a quick rank would miss it."""
        self._check_enabled()
        self._writer.wait_until_settled(self._topology.node_ranks)

    def claim_for_dcp(self, *, again: bool = False) -> None:
        """Raises LiveJobError where another launch has live trainers on this node. Local: DCP tells the other ranks."""
        self._check_enabled()
        self._refuse_to_write("save")
        if again or not self._claims:
            refuse_beside_live_here(self._topology, self._slots, self._settings.job)
            self._claims = True

    def take_over_for_dcp(self, *, take_over: bool) -> Launch:
        """As load() does before it looks at anything. Collective."""
        self._check_enabled()
        self._claim(take_over=take_over)
        self._renew_launch()
        return self._writer.launch

    def loaded_by_dcp(self, recovery: Recovery, generation: Generation, launch: Launch | None) -> None:
        """DCP filled the tensors; `launch` is the one that all ranks agreed to go on with, None if only some load."""
        self._deferrals.forget_frozen()
        if launch is not None:
            self._claims = True
            self._slots.enter(launch)
            self._attempts.begin()
            self._outcomes.begin()
            self._attempts.follow(generation)
            if self._topology.is_leader:
                line = recovery.line_for(launch, generation)
                self._slots.put_line(line.compacted(recovery.present), generation)

    # --- the rest -------------------------------------------------------------------------------------------

    def status(self) -> CheckpointerStatus:
        self._check_enabled()
        listed = self._attempts.judged()
        complete = [g.step for g, v in listed if v.state is GenerationState.COMPLETE]
        return CheckpointerStatus(
            job=self._settings.job,
            step=complete[0] if complete else None,
            generations=tuple((g, v.state.value, v.reason) for g, v in listed),
            saves=dict(self._outcomes.counts),
            last_problem=self._outcomes.last_problem,
            store=self._store.status(),
            device_copies=self._writer.device_copies,
        )

    def close(self, timeout: float | None = None) -> None:
        """Ends the use of the store; what is sealed stays.

        Waits at most `timeout` seconds in all (default save_timeout) for a copy that is under way and for the agent.
        What has not ended by then ends by itself, and a warning is logged. May be called twice; if an exception ended
        it, call it again to finish it.
        """
        self._closed = True
        if self._all_closed:
            return
        if self._parts is not None:
            missed = None if self._parts.is_forked else self._group.roll.missed()
            if missed is not None:
                log.error("job %r, rank %d of %d: %s", self.job, self._topology.rank, self._topology.world, missed.why)
            self._parts.close(self.config.save_timeout if timeout is None else timeout)
            if not self._parts.is_forked:
                self._outcomes.say_goodbye()
        self._all_closed = True
        if self._dropped is not None:
            self._dropped.detach()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with unmasked(kind):
            self.close()

    @property
    def job(self) -> str:
        return self._settings.job

    @property
    def store(self) -> SlotStore:
        self._check_enabled()
        return self._store

    @property
    def topology(self) -> Topology:
        self._check_enabled()
        return self._topology

    @property
    def launch_name(self) -> tuple[str, int]:
        """A name that all ranks of this launch share and no other launch has, and how many they are."""
        return f"{self.job}/{self._writer.launch.nonce:016x}", self._topology.world

    def read_back(self, handle: SaveHandle) -> int:
        """Reads this rank's shard of a sealed save and checks every byte; returns how many there are."""
        with self._alone("read_back"):
            self._check_enabled()
            if handle.generation is None:
                raise NotFoundError(f"step {handle.step}: {handle.reason or 'was not saved'}", step=handle.step)
            shard = ShardId(handle.generation, self._topology.rank, self._topology.world)
            return read_back(self._store, shard, self._settings.job, self._threads)

    @property
    def group(self) -> PrivateGroup:
        """For what its owner has to agree on at a load; collective."""
        self._check_enabled()
        return self._group

    @property
    def disabled(self) -> bool:
        return self._settings.disabled

    @property
    def is_busy(self) -> bool:
        """Return True if a call is under way, in this thread or another."""
        return self._turns.is_busy

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def persists(self) -> bool:
        """Return True if somebody writes to persist_dir."""
        return self.config.persist_dir is not None and self._settings.uses_agent

    @property
    def _highest_level(self) -> Level:
        replicated = len(self._topology.nodes) > 1 and self.config.replicas > 0
        return Level.REPLICATED if replicated else Level.SEALED

    def _check_enabled(self) -> None:
        self._check_open()
        if self._settings.disabled:
            raise ClosedError("disabled by FLASHCKPT_DISABLE", hint="unset FLASHCKPT_DISABLE")

    def _refuse_to_write(self, doing: str) -> None:
        if self.config.load_only:
            raise ConfigError(
                f"{doing}: expected a job that may be written to, found load_only=True",
                hint="leave load_only out of CheckpointConfig",
            )

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child: it belongs to the parent, and can only be closed."""
        return self._parts is not None and self._parts.is_forked

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this Checkpointer was closed")
        if self.is_forked:
            raise ConflictError(
                f"this Checkpointer belongs to the process that made it, but its fork {os.getpid()} used it",
                hint="make a Checkpointer of its own in the child",
            )

    def _alone(self, doing: str) -> Turn:
        self._check_open()
        if not self._settings.disabled:
            self._group.refuse_if_replaced(doing)
        return self._turns.take(doing, 0 if self._settings.disabled else self._group.rounds)

    def _begin(self) -> None:
        resume_collector()  # an exception may have ended a call before it resumed it
        self.settle()

    def _mend(self, broken: Turn) -> None:
        """Put in order what a call left half done that an exception ended, at any instruction. May be repeated."""
        if self._settings.disabled:
            return
        if not broken.has_failed:
            self._group.leave(broken.doing, broken.since)
        with contextlib.suppress(Exception):  # its handle tells
            self.settle()
        self._finish_prewarm(self.config.save_timeout)
        freed = self._store.take_back()
        if freed:
            log.info("freed %d slots that an exception in %s() left half written", freed, broken.doing)

    def _claim(self, *, take_over: bool) -> None:
        """Before the agents are taken over. Asked again at each load: another launch may have overtaken this one."""
        if not take_over:
            self._refuse_beside_live()
        self._claims = True

    def _refuse_beside_live(self) -> None:
        """Collective."""
        refuse_beside_live(self._group, self._topology, self._slots, self._settings.job)

    def _renew_launch(self) -> None:
        """Collective."""
        take_over(self._group, self._topology, self._slots, highest_epoch(self._store, self._disk_epoch))
        self._attempts.begin()
        self._outcomes.begin()

    def _look_at_disk(self) -> DiskInventory:
        """Collective."""
        found = take_disk_inventory(
            self.context(),
            self.config.persist_dir,
            self.config.start_timeout,
            overwrite=self.config.persist_overwrite,
        )
        self._disk_epoch = max(self._disk_epoch, found.highest_epoch)
        return found

    def _begin_anew(self, given_up: Pick | None, present: Collection[Launch]) -> Line:
        """Return the line that the first save of this launch claims. `given_up`: what a person said to leave behind."""
        if self._topology.is_leader:
            self._store.forget_persisted()  # whoever starts anew does not miss what lay in persist_dir
        line = begun(self._slots.launch) if given_up is None else given_up.line_for(self._slots.launch, None)
        self._writer.due_line = line.compacted(present)
        self._attempts.follow(None)
        return line

    def _put_line(self, line: Line, base: Generation | None, present: Collection[Launch]) -> None:
        """Collective."""
        put_line(self._group, self._topology, self._slots, line.compacted(present), base)
        self._attempts.follow(base)
        self._remember_line(line)

    def _remember_line(self, line: Line) -> None:
        """For the day when all memory is gone."""
        if line.listed and self.config.persist_dir is not None and self._topology.rank == 0:
            remember_line(self.config.persist_dir, self._settings.job, line, self.config.save_timeout)


def _defers_all(_key: str, _tensor: torch.Tensor) -> bool:
    return True


def _owned_by_nobody(_tensor: torch.Tensor) -> None:
    return None
