"""Checkpointer: saves any state dict to the cluster's memory and loads it back. Reads as the list of its stages."""

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
    """Shows the state of a Checkpointer at one moment, for people and monitors."""

    job: str
    step: int | None  # the newest complete generation on this node
    generations: tuple[tuple[Generation, str, str], ...]  # each with its state and reason, newest first
    saves: dict[str, int]  # outcome → number of saves
    last_problem: str
    store: StoreStatus
    device_copies: dict[str, str]  # device type → "registered", "ring" or "plain" (devices/copier.py)


P = ParamSpec("P")


def _given_up_on_error(
    save: Callable[Concatenate[Checkpointer, P], SaveHandle],
) -> Callable[Concatenate[Checkpointer, P], SaveHandle]:
    """Give the save up if the call raises, because a caller without a handle can't wait for the copy."""

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
    """Saves state dicts to the memory of the cluster and loads them back. Make one on every rank, in a `with` block.

    Args:
        config: the settings. Default: `CheckpointConfig()`.
        process_group: the ranks that save together. Default: all ranks. Without `torch.distributed`: this process.

    Collective calls are the constructor, `load`, `load_path`, `start_fresh`, `prewarm` and the first `save`. They use a
    private process group. All later saves are local. No two calls of `save` and of the collective methods may overlap:
    the second one raises ConflictError.

    An exception at any moment, such as Ctrl-C or an alarm, leaves the Checkpointer usable or closed. If it ended a
    collective call that other ranks continued, the next collective call raises ConflictError: make a new Checkpointer
    on all ranks.
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
        owner_of: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None,
        on_begin: Callable[[SaveHandle], None] | None = None,
        inspect: Callable[[Flat, SavePlan], None] | None = None,
    ) -> SaveHandle:
        """Copies the state to this node's memory. Once this returns, the tensors may be changed.

        Every rank has to call it with the same step. With `overlap`, deferred tensors may not be changed yet.

        Args:
            step: the number of the step. It must not go down within a launch.
            state_dict: nested dicts and lists of tensors and values, and objects with a `state_dict()`.
            extra: further values of this rank. They come back as `LoadResult.extra`.
            overlap: copy deferred tensors in a thread, after this has returned. They may be changed once
                `handle.wait("staged")` has returned. Other tensors and all values are copied before this returns. The
                next call waits for the copy.
            defers: `defers(key, tensor)` returns True if the tensor may be deferred, False if not, and None if it may
                be deferred as long as it is large and has not changed since the last save. Default: all tensors may.
            owner_of: `owner_of(key, tensor)` returns the parameter that the tensor is an alias of, or None. The version
                counter of the parameter is then compared too.
            on_begin: called with the handle before an overlapped copy begins.
            inspect: called with the flattened state and the plan before anything is copied. It refuses the state by
                raising.

        Returns:
            The handle of the save. It tells the level and the outcome.

        Raises:
            StructureError, UnsupportedValueError: the state can't be saved. The first save calls each `state_dict()`
                twice. If the second call gives other keys, kinds, shapes or dtypes, no load could fill them:
                StructureError.
            ConfigError, ConflictError, ClosedError, LiveJobError, AmbiguousHistoryError: the call is wrong, for example
                because the step goes down.
            Errors of the caller's own code: raised while the state was read.
            FlashError: any other error, but only if `config.on_save_error` is "raise". Failures of earlier saves that
                became known since then are raised too (OtherRankError, PersistError). By default an error is the
                outcome of the handle, "failed" or "skipped".

        A caller that can't wait for an overlapped copy calls `handle.give_up()` before it changes the tensors. The copy
        is then thrown away. If a deferred tensor changes too early without that and the change is found, the shard is
        not sealed, the reason names the tensor, and later saves copy it before they return.
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
        """Check that all ranks save this step, and claim the job. Collective for the first saves, then local."""
        internals = self._internals
        if internals.claim.is_held and not internals.saver.preparer.is_collective:
            internals.group.roll.note_step(step)
        else:
            internals.group.meet("save", f"step {step}", self.config.save_timeout, step=step)
        if not internals.claim.is_held:
            # Needed before the first save of a launch that has loaded nothing, because that save takes the agents over.
            internals.claim.take(take_over=False)

    def prewarm(self, state_dict: Mapping[Any, Any], *, background: bool = False) -> None:
        """Makes the memory for the first save in advance: allocates, maps and touches the slots. Collective.

        Args:
            state_dict: a state of the same structure and size as those that will be saved.
            background: return as soon as it is known that the memory suffices. A thread of low priority makes the
                slots. A save that needs the slots before they are ready waits for it.

        Raises:
            NoSpaceError: the node does not have enough memory for what its ranks are going to save. The message has the
                figures.
            LiveJobError: trainers of another launch still run.
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
        """Fills the state dict in place from the newest usable generation, or from that of `step`. Collective.

        Args:
            state_dict: the state dict to fill. Its tensors are overwritten.
            step: the step to load. None: the newest one.
            keys: load only the keys with these prefixes.
            strict: if False, keys may be missing in the state dict or in the checkpoint.
            cast: convert dtypes.
            allow_fresh: if nothing is usable and no tensor was written to, return None instead of raising
                UnusableError.
            read_only: change nothing, in memory or on disk, for example for an evaluation beside the training. Default:
                `config.load_only`.
            take_over: take the job over even if trainers of another launch are alive.
            history: name of the history to load, or of an abandoned one to go back to.
            screen: called with what was found, before any tensor is read. It returns a function that says which keys to
                load, or raises if the generation must not be loaded.

        Returns:
            What was loaded, and from where. None if the job has never saved anything, if `allow_fresh` applies, or if
                FLASHCKPT_DISABLE is set.

        Raises:
            UnusableError: generations exist, but none is usable. The message has the reason for each.
            NotFoundError: there is no such `step` or `history`.
            MissingKeyError, StructureError: the state dict does not fit the checkpoint.
            AmbiguousHistoryError: there are two histories, and neither continues the other. The message names both.
                Nothing was changed.
            LiveJobError: trainers of another launch are alive on one of this launch's nodes. Raised on all ranks. Not
                raised if `take_over` is set or the load is read-only.

        A load takes the job over, unless it is read-only: generations that other launches saved above the loaded step
        are abandoned, and those launches can't save any more. A load that finds nothing changes nothing until the first
        save.

        With `step` and either `keys` or `strict=False`, a generation that lacks shards can be loaded too: the tensors
        and values that are complete are loaded.
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
        """Fills the state dict from the checkpoint at `path`. Collective.

        Args:
            path: a checkpoint of flashckpt, of this job or another, a plain DCP checkpoint, or a Hugging Face model.
                The tensors of a Hugging Face model are found below `model` and are converted to the dtypes of the state
                dict.
            state_dict: the state dict to fill. Its tensors are overwritten.
            strict: if False, keys may be missing in the state dict or in the checkpoint.
            cast: convert dtypes.
            only_hf: refuse anything but a Hugging Face model.
            screen: as for `load`.

        Raises:
            NotFoundError: there is no checkpoint at `path`.
            UnusableError: the checkpoint can't be used.
            IncompatibleError: `only_hf` is set and the checkpoint is not a Hugging Face model.

        It does not take the job over. If the job itself has saved something, call `load` or `start_fresh` before the
        next save.
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
        """Abandons everything that earlier launches saved. Later saves reuse its memory. Collective.

        Args:
            take_over: take the job over even if trainers of another launch are alive.

        Raises:
            LiveJobError: trainers of another launch are alive, and `take_over` is not set.
            ConfigError: `config.load_only` is set.
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
        """Asks this node's agent to flush the newest committed generation, or that of `step`, to persist_dir. Local.

        Returns at once, with the generation that will be flushed. All nodes write their parts in the background, even
        if only one rank asks. `handle.wait("persisted")` asks and waits.

        Raises:
            NotFoundError: there is no such generation in memory, or no longer.
            ConfigError: there is no persist_dir, or no agent.
        """
        self._internals.check_enabled()
        return self._internals.slots.flush(step)

    def status(self) -> CheckpointerStatus:
        """Returns the state at this moment. Local."""
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
        """Ends the use of the memory. Sealed shards stay there.

        Args:
            timeout: seconds to wait for a copy that is under way and for the agent, both together. Default:
                `config.save_timeout`. What has not ended by then ends by itself, and a warning is logged.

        It may be called twice. If an exception ended it, call it again to finish it.
        """
        self._internals.close(timeout)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with unmasked(kind):
            self.close()

    @property
    def job(self) -> str:
        """Returns the name of the run, also if the environment or the ranks chose it."""
        return self._internals.settings.job

    @property
    def overtaken(self) -> str:
        """Returns why no save of this launch counts any more, or "" if no other launch has taken the job over."""
        return self._internals.outcomes.overtaken


def internals_of(checkpointer: Checkpointer) -> Internals:
    """Return the internals of a Checkpointer. For flashckpt itself and its tests: other programs must not rely on
    them."""
    return checkpointer._internals


def _defers_all(_key: str, _tensor: torch.Tensor) -> bool:
    return True


def _owned_by_nobody(_key: str, _tensor: torch.Tensor) -> None:
    return None
