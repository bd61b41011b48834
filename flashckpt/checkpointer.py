"""Checkpointer: save any state dict to the memory of the cluster and load it back. Reads as the list of its stages."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from flashckpt.config import CheckpointConfig, resolve
from flashckpt.errors import ConfigError, NotFoundError, UnusableError
from flashckpt.load.disk.restore import load_newest
from flashckpt.load.recover import Recovery, Request
from flashckpt.save.attempts import check_step_to_load
from flashckpt.save.prepare import check_mapping
from flashckpt.save.retention import GenerationState
from flashckpt.save.saver import SaveCall
from flashckpt.start.closing import unmasked
from flashckpt.start.internals import Internals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    import torch
    import torch.distributed as dist

    from flashckpt.load.histories import Pick
    from flashckpt.load.recover import Found
    from flashckpt.load.result import LoadResult
    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import StoreStatus
    from flashckpt.types import Generation

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


P = ParamSpec("P")


def _given_up_on_error(
    save: Callable[Concatenate[Checkpointer, P], SaveHandle],
) -> Callable[Concatenate[Checkpointer, P], SaveHandle]:
    """Give the save up if the call raises: a caller without a handle can't wait for the copy."""

    @functools.wraps(save)
    def call(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> SaveHandle:
        internals = internals_of(self)
        if internals.disabled:
            return save(self, *args, **kwargs)
        overlap = internals.saver.overlap
        before = overlap.handle
        try:
            handle = save(self, *args, **kwargs)
        except BaseException:
            begun = overlap.handle
            if begun is not None and begun is not before:
                begun.give_up()
            raise
        if internals.raises_late_failures:
            internals.raise_late_failure(handle)
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
        self._internals = Internals(resolve(self.config), process_group)

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
        internals = self._internals
        call = SaveCall(step)
        try:
            with internals.turn("save"):
                why_not = internals.settings.why_no_saves
                if why_not:
                    return internals.outcomes.skipped(step, why_not)
                internals.saver.attempts.check(step)
                call.began = time.perf_counter()
                self._meet_before_save(step)
                return internals.saver.save(
                    call,
                    state_dict,
                    extra,
                    overlap=overlap,
                    defers=defers or _defers_all,
                    owner_of=owner_of or _owned_by_nobody,
                    on_begin=on_begin,
                    inspect=inspect,
                )
        except Exception as error:
            if internals.disabled or internals.saver.must_raise(call, error):
                raise
            return internals.saver.fail(call, error)

    def _meet_before_save(self, step: int) -> None:
        """See that all ranks save this step, and claim the job. Collective at the first saves, then local."""
        internals = self._internals
        if internals.claim.is_held and not internals.saver.preparer.is_collective:
            internals.group.roll.note_step(step)
        else:
            internals.group.meet("save", f"step {step}", self.config.save_timeout, step=step)
        if not internals.claim.is_held:
            # Before the first save of a launch that has loaded nothing: it would take the agents over.
            internals.claim.take(take_over=False)

    def prewarm(self, state_dict: Mapping[Any, Any], *, background: bool = False) -> None:
        """Allocates, maps and faults the slots ahead of the first save. Collective.

        Raises NoSpaceError, with figures, where the node's memory can't hold what the ranks are going to save. With
        `background` it returns once that is known, and a thread of low priority goes on; a save that comes
        meanwhile waits for it where it would do the same work.
        """
        internals = self._internals
        with internals.turn("prewarm"):
            if internals.disabled:
                return
            if not internals.claim.is_held or not internals.saver.preparer.is_agreed:
                internals.group.meet("prewarm", "", self.config.save_timeout)
            if not internals.claim.is_held:
                internals.claim.refuse_beside_live()
            internals.saver.prewarm(state_dict, background=background)

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
        internals = self._internals
        with internals.turn("load"):
            read_only = internals.reads_only(read_only, take_over)
            if isinstance(keys, str):
                raise ConfigError(f"keys: expected a sequence of prefixes, found the string {keys!r}", hint="keys=[…]")
            check_step_to_load(step)
            check_mapping("state dict", state_dict)
            if internals.disabled:
                return None
            internals.saver.deferrals.forget_frozen()
            began = time.perf_counter()
            internals.group.meet("load", "newest" if step is None else f"step {step}", self.config.start_timeout)
            context = internals.context()
            on_disk = internals.claim.look_at_disk(context)
            if not read_only:
                internals.claim.take(take_over=take_over)
                internals.claim.renew_launch()
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
                        f"job {self.job!r}: nothing but {inventory.quarantined} quarantined shards exist"
                    )
                if result is None:
                    if not read_only:
                        internals.claim.begin_anew(given_up, recovery.present)
                    return None
                if not read_only:
                    line = recovery.line_for(internals.slots.launch, result.generation)
                    internals.claim.put_line(line, result.generation, recovery.present)
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
        internals = self._internals
        with internals.turn("load_path"):
            internals.check_enabled()
            from flashckpt.load.disk.elsewhere import load_path

            internals.group.meet("load_path", path, self.config.start_timeout)
            internals.saver.deferrals.forget_frozen()
            request = Request(strict=strict, cast=cast, screen=screen)
            context = internals.context()
            with Recovery(context) as recovery:
                return load_path(recovery, context, path, state_dict, request, only_hf=only_hf)

    def start_fresh(self, *, take_over: bool = False) -> None:
        """Abandons everything that earlier launches saved. Collective. Their memory is reused by later saves.

        Raises LiveJobError beside live trainers of another launch, unless `take_over`.
        """
        internals = self._internals
        with internals.turn("start_fresh"):
            if not internals.disabled:
                internals.refuse_to_write("start_fresh")
                internals.group.meet("start_fresh", "", self.config.start_timeout)
                internals.claim.take(take_over=take_over)
                internals.claim.renew_launch()
                context = internals.context()
                on_disk = internals.claim.look_at_disk(context)
                with Recovery(context) as recovery:
                    inventory = recovery.take_inventory()
                    given_up = recovery.anew(inventory, on_disk.whole, on_disk.lines)
                line = internals.claim.begin_anew(given_up, recovery.present)
                internals.claim.put_line(line, None, recovery.present)

    # --- the rest -------------------------------------------------------------------------------------------

    def flush(self, step: int | None = None) -> Generation:
        """Asks this node's agent to bring the newest committed generation (or that of `step`) to persist_dir.

        Returns at once, with what will be flushed: all nodes write their part in the background, whoever asks.
        `handle.wait("persisted")` asks and waits. NotFoundError where it is not in memory (any more).
        """
        self._internals.check_enabled()
        return self._internals.slots.flush(step)

    def status(self) -> CheckpointerStatus:
        """Returns a view of this moment. Local."""
        internals = self._internals
        internals.check_enabled()
        listed = internals.saver.attempts.judged()
        complete = [g.step for g, v in listed if v.state is GenerationState.COMPLETE]
        return CheckpointerStatus(
            job=self.job,
            step=complete[0] if complete else None,
            generations=tuple((g, v.state.value, v.reason) for g, v in listed),
            saves=dict(internals.outcomes.counts),
            last_problem=internals.outcomes.last_problem,
            store=internals.store.status(),
            device_copies=internals.saver.writer.device_copies,
        )

    def close(self, timeout: float | None = None) -> None:
        """Ends the use of the store; what is sealed stays.

        Waits at most `timeout` seconds in all (default save_timeout) for a copy that is under way and for the agent.
        What has not ended by then ends by itself, and a warning is logged. May be called twice; if an exception ended
        it, call it again to finish it.
        """
        self._internals.close(timeout)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with unmasked(kind):
            self.close()

    @property
    def job(self) -> str:
        """The name of the run, also where the environment or the ranks chose it."""
        return self._internals.settings.job

    @property
    def overtaken(self) -> str:
        """Why no save of this launch counts any more. "": no other launch has taken the job over."""
        return self._internals.outcomes.overtaken


def internals_of(checkpointer: Checkpointer) -> Internals:
    """Return what lies behind the doors. For flashckpt itself and its tests; other programs must not rely on it."""
    return checkpointer._internals


def _defers_all(_key: str, _tensor: torch.Tensor) -> bool:
    return True


def _owned_by_nobody(_tensor: torch.Tensor) -> None:
    return None
