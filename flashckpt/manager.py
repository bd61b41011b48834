"""CheckpointManager: saves and loads the whole training state in one object. `save` and `load` read as the list of
their stages."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time
import weakref
from typing import TYPE_CHECKING, Any

from flashckpt.checkpointer import Checkpointer, internals_of
from flashckpt.config import CheckpointConfig
from flashckpt.errors import ClosedError, ConfigError, ConflictError, FlashError, LiveJobError
from flashckpt.save.attempts import check_step_to_load
from flashckpt.start.closing import unmasked
from flashckpt.training.assemble import DATALOADER, KNOWN, MODEL, TrainingState
from flashckpt.training.cooldown import Cooldown
from flashckpt.training.files import persisted_steps, write_file
from flashckpt.training.gate import OptimizerGate
from flashckpt.training.hooks import Hooks
from flashckpt.training.metrics import Event, Metrics, Recorder
from flashckpt.training.milestones import bring_home, prove_first
from flashckpt.training.names import Renaming
from flashckpt.training.policy import Decision, decide
from flashckpt.training.restore import LoadWish, screen, unwrap_extra, wrap_extra
from flashckpt.training.rng import restore_rng
from flashckpt.training.share import dataloader_of_rank_0
from flashckpt.training.stopping import SignalHandlers, StopBoard
from flashckpt.training.structure import Structures
from flashckpt.types import Level, Outcome
from flashckpt.workers import begin_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from flashckpt.load.result import LoadResult
    from flashckpt.save.handle import SaveHandle
    from flashckpt.training.assemble import Template
    from flashckpt.training.compat import OnMismatch

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores model, optimizers, schedulers, data loader and random numbers. Make one on every rank.

    Args:
        config: the settings. Default: `CheckpointConfig()`.
        model: the model, or a list of models (the parts of a pipeline).
        optimizer: the optimizer, or a list of them.
        lr_scheduler: the scheduler, or a list of them.
        dataloader: a data loader that has a `state_dict()`. A loader without one is not saved, and a warning is logged.
        states: further Stateful objects or mappings, by name.
        rng: whether the random numbers are saved too.
        process_group: the ranks that save together. Default: all ranks.
        save_policy: `save_policy(step)` returns True if a step is due. It replaces `config.interval`.
        keep_policy: `keep_policy(step)` returns True if a step is permanent in persist_dir.
        on_event: called with every `Event`, on the training thread.
        pre_snapshot: called before each snapshot.

    The constructor and `load` are collective. `save` is local, except the first one.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        rng: bool = True,
        process_group: dist.ProcessGroup | None = None,
        save_policy: Callable[[int], bool] | None = None,
        keep_policy: Callable[[int], bool] | None = None,
        on_event: Callable[[Event], None] | None = None,
        pre_snapshot: Callable[[], None] | None = None,
    ) -> None:
        self.config = config or CheckpointConfig()
        self._state = TrainingState(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            states=states,
            rng=rng,
        )
        self._check_names("config.exclude_from_loading", self.config.exclude_from_loading)
        if keep_policy is not None and self.config.persist_dir is None:
            raise ConfigError(
                "keep_policy: expected persist_dir too, found none",
                hint="it makes steps in persist_dir permanent: set CheckpointConfig(persist_dir=…), or leave it out",
            )
        self._policy = save_policy
        self._keep_policy = keep_policy
        self._pre_snapshot = pre_snapshot
        self._recorder = Recorder(on_event)
        self._structures = Structures(self._state.model)
        self._structures.note_new(self._state.states)
        self._handle: SaveHandle | None = None  # handle of the newest save
        self._seen: int | None = None  # the step that `save` was last called for
        self._said: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None)  # extra, compat with it
        self._loaded_step: int | None = None
        self._prewarmed = False  # prewarm() was called
        self._locked = False
        self._loading = False
        self._closed = self._all_closed = False
        self._signals: SignalHandlers | None = None
        self._pending: dict[str, Any] = {}
        self._initial: LoadResult | None = None
        self._to_flush: list[SaveHandle] = []
        self._gate = OptimizerGate(self.config.save_timeout, self._recorder.held)
        self._hooks = Hooks(self._gate)
        self._dropped = weakref.finalize(self, self._hooks.drop)
        self._dropped.atexit = False
        self._checkpointer = Checkpointer(self.config, process_group=process_group)
        self._internals = internals_of(self._checkpointer)
        self._internals.raises_late_failures = False
        self._recorder.flush_news = self._internals.flush_news
        self._recorder.replication_news = self._internals.replication_news
        try:
            self._cooldown = self._make_cooldown()
            self._gate.install()
        except BaseException:
            self.close()
            raise

    def _make_cooldown(self) -> Cooldown:
        if self._internals.disabled:
            return Cooldown(0.0, "", 0, 1)
        name, world = self._internals.launch_name
        return Cooldown(self.config.save_cooldown, name, self._internals.topology.rank, world)

    # --- save -----------------------------------------------------------------------------------------------

    def should_save(self, step: int, *, last_step: bool = False, force: bool = False) -> bool:
        """Returns True if `save` would save this step. Changes nothing, and is the same on every rank."""
        return self.decide(step, last_step=last_step, force=force).save

    def decide(
        self, step: int, *, last_step: bool = False, force: bool = False, persist: bool | None = None
    ) -> Decision:
        """Returns what `should_save` returns, and also whether the step is flushed, with the reason."""
        return decide(
            step,
            self.config,
            last_step=last_step,
            force=force,
            persist=persist,
            policy=self._policy,
            cooled=not isinstance(step, int) or self._cooldown.permits(step),
        )

    def save(
        self,
        step: int,
        *,
        last_step: bool = False,
        force: bool = False,
        persist: bool | None = None,
        permanent: bool | None = None,
        extra: Mapping[str, Any] | None = None,
        compat: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Saves `step`, which has just been finished, if it is due. Call it at every step, on every rank.

        Args:
            step: the number of the step.
            last_step: this is the last step. It is saved in any case. This then waits, at most `config.save_timeout`,
                until the save has reached its highest level in memory.
            force: save the step even if it is not due.
            persist: True: save the step even if it is not due, and flush it to persist_dir. False: do not flush it.
                None: the config decides.
            permanent: True: in persist_dir the step neither counts for `keep_latest_k` nor is removed because of it.
                This asks for the flush too, if `persist` is None. None: `keep_policy` decides.
            extra: further values. They come back as `LoadResult.extra`.
            compat: what a later `load(expect=…)` is compared with.

        Returns:
            The handle of the save. None if the step is not due.

        Raises:
            As `Checkpointer.save`. ConfigError if `persist` or `permanent` asks for a flush and nobody writes to
                persist_dir. SystemExit after the last save if a signal handler was given an `exit_code`.

        With `config.overlap` the copy continues after this returns, and `optimizer.step()` waits for it. Code that
        changes parameters in another way calls `maybe_wait_for_staging()` first.
        """
        self._check_free("save")
        stopping = self._signals is not None and self._signals.is_final(step)
        if permanent is None:
            permanent = self._keep_policy is not None and self._keep_policy(step)
        elif permanent and persist is None:
            persist = True
        self._check_persist(persist)
        decision = self.decide(step, last_step=last_step, force=force or stopping, persist=persist)
        wrapped = wrap_extra(extra, self._state.parts, compat, permanent)  # checks the arguments at every step
        self._seen, self._said = step, (extra, compat)
        self._cooldown.note(step, decision.save)
        self._poll()
        if not decision.save:
            self._prewarm_once()
            return None
        handle = self._snapshot(step, wrapped)
        if decision.persist and handle.persists and self._internals.topology.rank == 0:
            self._to_flush.append(handle)  # one rank asks for all, once the save is sealed
        if step == 1 and self.config.enable_first_step_checkpoint:
            self.maybe_wait_for_staging()
            if not self._internals.disabled:
                raises = self.config.on_save_error == "raise"
                prove_first(handle, self.config.save_timeout, self._internals.read_back, raises=raises)
        if stopping or last_step:
            self._bring_home(handle, to_disk=stopping and persist is not False)
        if stopping and self._signals is not None:
            self._signals.finish()
            if self._signals.exit_code is not None:
                raise SystemExit(self._signals.exit_code)
        if not stopping and not last_step:
            self._internals.raise_late_failure(handle)
        return handle

    def _check_persist(self, persist: bool | None) -> None:
        """Refuse to promise a flush that nobody would make."""
        if persist and not (self._internals.settings.persists or self._internals.disabled):
            found = "none" if self.config.persist_dir is None else "that nobody writes there (agent='off')"
            raise ConfigError(
                f"persist=True or permanent=True: expected persist_dir too, found {found}",
                hint="set CheckpointConfig(persist_dir=…), or leave the argument out",
            )

    def _snapshot(self, step: int, extra: Mapping[str, Any]) -> SaveHandle:
        began = time.time()
        overlap = self.config.overlaps and bool(self._state.optimizers)  # without a gate nothing holds the caller
        if self._pre_snapshot is not None:
            self._pre_snapshot()
        self.maybe_wait_for_staging()
        taken = time.perf_counter()
        with self._gate.shut():
            state = self._state.capture()
            changes = self._state.changes_only_in_step() if overlap else None
            captured = time.perf_counter() - taken
            handle = self._checkpointer.save(
                step,
                state,
                extra=extra,
                overlap=overlap,
                defers=changes,
                owner_of=None if changes is None else changes.owner_of,
                on_begin=self._gate.close_behind,
                inspect=lambda flat, plan: self._structures.check(tuple(self._state.states), flat, plan, step),
            )
        handle.blocked_seconds += captured
        self._handle = handle
        self._recorder.saved(handle, began)
        return handle

    def _bring_home(self, handle: SaveHandle, to_disk: bool = False) -> None:
        self.maybe_wait_for_staging()
        signals = self._signals if self._signals is not None and self._signals.requested else None
        bring_home(handle, self.config.save_timeout if signals is None else signals.remaining, to_disk=to_disk)
        self._poll()

    def _poll(self) -> None:
        """Handle what happened in the background since the last call."""
        self._ask_flushes()
        self._recorder.overtaken(self._seen or 0, self._checkpointer.overtaken)
        self._recorder.poll()

    def _ask_flushes(self) -> None:
        self._to_flush = [handle for handle in self._to_flush if not self._is_asked_for(handle)]

    def _is_asked_for(self, handle: SaveHandle) -> bool:
        try:
            return handle.request_persist() or handle.outcome not in (None, Outcome.OK)
        except (FlashError, OSError) as error:
            log.warning("step %d: not asked to be persisted: %s", handle.step, error)
            return True

    def prewarm(self, *, background: bool = False) -> None:
        """Makes the memory for the first save in advance. Collective. Call it once the optimizer has taken a step.

        Args:
            background: return as soon as it is known that the memory suffices, and make it in a thread.

        With `config.prewarm` the first call of `save` that does not save does this by itself, in the background.
        """
        self._check_free("prewarm")
        self.maybe_wait_for_staging()
        self._prewarmed = True
        self._checkpointer.prewarm(self._state.capture(), background=background)

    def _prewarm_once(self) -> None:
        """Prewarm at the first step that is not due: the optimizer took a step, so the state has its size. All ranks
        are here, because a save is due for all or none."""
        if self._prewarmed or not self.config.prewarm or self.config.load_only or self._internals.disabled:
            return
        try:
            self.prewarm(background=True)
        except LiveJobError:
            raise
        except (FlashError, OSError) as error:
            log.warning("no memory was made ahead of the first save, which will meet this too: %s", error)

    # --- load -----------------------------------------------------------------------------------------------

    def load(
        self,
        step: int | None = None,
        *,
        path: str | None = None,
        exclude_from_loading: Collection[str] | None = None,
        strict: bool = True,
        key_mapping: Mapping[str, str] | None = None,
        expect: Mapping[str, Any] | None = None,
        on_mismatch: OnMismatch = "raise",
        cast: bool = False,
        allow_fresh: bool = False,
        read_only: bool | None = None,
        take_over: bool = False,
        history: str | None = None,
    ) -> LoadResult | None:
        """Restores the newest usable checkpoint, or that of `step`. Collective.

        Args:
            step: the step to load. None or -1: the newest one.
            path: load the checkpoint at this path instead: one of flashckpt, of this run or another, a plain DCP
                checkpoint, or a Hugging Face model (safetensors). Of a Hugging Face model only the model is loaded,
                converted to the model's dtypes.
            exclude_from_loading: parts to leave as they are. Default: `config.exclude_from_loading`.
            strict: if False, keys and parts may be missing.
            key_mapping: names of the model → names in the checkpoint.
            expect: compared with what `save(compat=…)` declared, before any tensor is read.
            on_mismatch: what to do if `expect` differs: "raise" or "warn".
            cast: convert dtypes.
            allow_fresh: if nothing is usable and no tensor was written to, start anew instead of raising UnusableError.
            read_only: change nothing, in memory or on disk, for example for an evaluation beside the training. Default:
                `config.load_only`.
            take_over: take the job over even if trainers of another launch are alive. Their saves fail from then on.
            history: name of the history to load, or of an abandoned one to go back to.

        Returns:
            What was loaded, and from where. None if the job has never saved a checkpoint, or starts anew.

        Raises:
            As `Checkpointer.load`: UnusableError, NotFoundError, MissingKeyError, StructureError, AmbiguousHistoryError
                and LiveJobError.
            MismatchError: `expect` differs from what was declared at the save, and `on_mismatch` is "raise".
            ConfigError: the arguments are wrong, for example `path` and `step` together.

        If the job has saved nothing, `config.initial_load_path` is loaded. With `config.initial_load_model_only` that
        is still a fresh start: None is returned, and `initial_load` has the result.
        """
        self._check_free("load")
        if step != -1:
            check_step_to_load(step)
        self.maybe_wait_for_staging()
        excluded = self.config.exclude_from_loading if exclude_from_loading is None else exclude_from_loading
        self._check_names("exclude_from_loading", excluded)
        parts = tuple(part for part in self._state.parts if part not in excluded)
        kept = tuple({DATALOADER} - {*parts, *excluded})
        wish = LoadWish(parts, kept, strict, expect, on_mismatch)
        self._structures.note({n: s for n, s in self._state.states.items() if n in parts}, "when load() was called")
        template = self._state.template((*parts, *kept))
        if path is not None:
            if step is not None:
                raise ConfigError("path and step: expected one of them, found both")
            return self._load_path(path, wish, key_mapping, cast)
        with self._renamed(Renaming(key_mapping)):
            result = self._checkpointer.load(
                template.state_dict,
                _newest_if_negative(step),
                strict=strict,
                cast=cast,
                allow_fresh=allow_fresh,
                read_only=read_only,
                take_over=take_over,
                history=history,
                screen=lambda found: screen(found, wish, self._state.model, self._state.optimizer),
            )
        if result is not None:
            return self._finish_load(result, template)
        return self._load_initial(wish, key_mapping, cast)

    def _load_initial(self, wish: LoadWish, key_mapping: Mapping[str, str] | None, cast: bool) -> LoadResult | None:
        """Load what the job is to start from, if anything: it has no checkpoint of its own."""
        if self.config.initial_load_path is None or self._internals.disabled:
            return None
        model_only = self.config.initial_load_model_only
        if model_only:
            wish = dataclasses.replace(wish, parts=(MODEL,), kept=())
        path, own_mapping = self.config.initial_load_path, self.config.initial_load_key_mapping
        mapping = key_mapping if own_mapping is None else own_mapping
        self._initial = self._load_path(path, wish, mapping, cast, only_hf=self.config.initial_load_in_hf)
        if not model_only:
            return self._initial
        log.info("the model is that of %s; everything else starts anew", self.config.initial_load_path)
        self._seen = self._loaded_step = None
        return None

    def _load_path(
        self, path: str, wish: LoadWish, key_mapping: Mapping[str, str] | None, cast: bool, only_hf: bool = False
    ) -> LoadResult:
        template = self._state.template((*wish.parts, *wish.kept))
        with self._renamed(Renaming(key_mapping)):
            result = self._checkpointer.load_path(
                path,
                template.state_dict,
                strict=wish.strict,
                cast=cast,
                only_hf=only_hf,
                screen=lambda found: screen(found, wish, self._state.model, self._state.optimizer),
            )
        return self._finish_load(result, template)

    @property
    def initial_load(self) -> LoadResult | None:
        """Returns the result of loading `config.initial_load_path`, or None if `load` did not load it."""
        return self._initial

    def _finish_load(self, result: LoadResult, template: Template) -> LoadResult:
        """Restore what depends on the number of ranks that saved: the data loaders of new ranks, and the random
        numbers."""
        world = self._internals.topology.world
        if world > result.saved_world_size:
            dataloader_of_rank_0(template.dataloader, self._internals.group, result.saved_world_size)
        if template.dataloader.filled and self._state.dataloader is None:
            self._pending[DATALOADER] = template.dataloader.value
        if template.rng.filled and world == result.saved_world_size:
            restore_rng(template.rng.value)  # last: the owners' load_state_dict may have drawn numbers
        elif world != result.saved_world_size:
            log.warning(
                "step %d was saved by %d ranks, now there are %d: random numbers go on from this run's seeds",
                result.step,
                result.saved_world_size,
                world,
            )
        self._handle, self._seen, self._loaded_step = None, result.step, result.step
        extra, _ = unwrap_extra(result.extra)
        self._recorder.loaded(result)
        return dataclasses.replace(result, extra=extra)

    @contextlib.contextmanager
    def _renamed(self, renaming: Renaming) -> Iterator[None]:
        try:
            self._loading = True
            self._rename(renaming)
            yield
        finally:
            try:
                self._end_load()
            except BaseException:
                self._end_load()
                raise

    def _rename(self, renaming: Renaming) -> None:
        for owner in (self._state.model, self._state.optimizer):
            if owner is not None:
                owner.renaming = renaming

    def _end_load(self) -> None:
        """Drop what a load has prepared. May be repeated."""
        if self._loading:
            if self._state.optimizer is not None:
                self._state.optimizer.end_load()
            self._rename(Renaming())
            self._loading = False

    def apply_dataloader_state(self, dataloader: Any) -> bool:
        """Gives the state that was kept for the data loader to a loader that was made after `load`. Returns False if
        there is none."""
        return self.apply(DATALOADER, dataloader)

    def apply(self, name: str, owner: Any) -> bool:
        """Gives the state under `name` in `pending_states` to `owner`. Returns False if there is none."""
        if owner is None or not hasattr(owner, "load_state_dict"):
            self._pending.pop(name, None)
            return False
        if name == DATALOADER:
            self._state.dataloader = owner
        if name not in self._pending:
            return False
        owner.load_state_dict(self._pending.pop(name))
        return True

    @property
    def pending_states(self) -> Mapping[str, Any]:
        """Returns the states that were loaded and have no owner yet, by name."""
        return dict(self._pending)

    # --- waiting --------------------------------------------------------------------------------------------

    def maybe_wait_for_staging(self) -> float:
        """Waits until parameters may be changed. Returns the seconds that it waited. `optimizer.step()` calls it."""
        return self._gate.wait()

    def wait(self, level: str | Level | None = None, timeout: float | None = None) -> Outcome | None:
        """Waits until the newest save has reached `level`, and returns how the save ended.

        Args:
            level: "staged", "sealed", "replicated" or "persisted". Default: the highest level in memory that the save
                can reach.
            timeout: seconds. Default: `config.save_timeout`.

        Returns:
            The outcome. None if this launch has not saved yet.

        Raises:
            DeadlineError: the level was not reached within `timeout`.
        """
        self._check_open()
        self.maybe_wait_for_staging()
        if self._handle is None:
            return None
        if level is None:
            level = min(Level.REPLICATED, self._handle.highest_level)
        outcome = self._handle.wait(level, self.config.save_timeout if timeout is None else timeout)
        self._poll()
        return outcome

    def flush_pending_save(self, timeout: float | None = None) -> Outcome | None:
        """Waits as `wait()` does. Call it before the structure of the model or `requires_grad` changes."""
        return self.wait(timeout=timeout)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps saves, copies and loads out of a `with` block, in which parameters may be changed outside of
        `optimizer.step()`."""
        self._check_free("lock")
        self.maybe_wait_for_staging()
        self._internals.settle()
        try:
            self._locked = True
            yield
        finally:
            self._locked = False

    @property
    def is_pending(self) -> bool:
        """Returns True if the newest save is under way to the highest level in memory that it can reach."""
        handle = self._handle
        if handle is None or handle.outcome not in (None, Outcome.OK):
            return False
        return not handle.has_reached(min(Level.REPLICATED, handle.highest_level))

    # --- looking --------------------------------------------------------------------------------------------

    def all_steps(self) -> tuple[int, ...]:
        """Returns the steps that are complete in this node's memory or in persist_dir, ascending."""
        if self._internals.disabled:
            return ()
        complete = {g.step for g, state, _ in self._checkpointer.status().generations if state == "complete"}
        return tuple(sorted(complete | persisted_steps(self.config.persist_dir, self._checkpointer.job)))

    def latest_step(self) -> int | None:
        """Returns the newest step of `all_steps()`, or None."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def peek_saved_step(self) -> int | None:
        """Returns the step that `load` would most likely find, as far as this node knows. Never raises and changes
        nothing."""
        try:
            return self.latest_step()
        except (FlashError, OSError) as error:
            log.info("no saved step is known: %s", error)
            return None

    def write_file(self, name: str, contents: str | bytes, *, step: int | None = None, overwrite: bool = False) -> str:
        """Writes a file of the user's into persist_dir. Local: call it on one rank.

        Args:
            name: the name of the file, without a directory.
            contents: what to write.
            step: write it into the directory of this persisted step. None: beside the steps.
            overwrite: replace the file if it exists.

        Returns:
            The path or URL of the file.

        Raises:
            ExistsError: the file exists, and `overwrite` is not set.
            NotFoundError: `step` is not in persist_dir.
        """
        self._check_open()
        return write_file(self.config.persist_dir, name, contents, step=step, overwrite=overwrite)

    def metrics(self) -> Metrics:
        """Returns the figures of this rank since the manager was made."""
        self._recorder.overtaken(self._seen or 0, self._checkpointer.overtaken)
        return self._recorder.metrics(time.time())

    @property
    def checkpointer(self) -> Checkpointer:
        """Returns the Checkpointer that this manager uses."""
        return self._checkpointer

    # --- signals, end ---------------------------------------------------------------------------------------

    def install_signal_handlers(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        deadline: float = 60.0,
        exit_code: int | None = None,
    ) -> SignalHandlers:
        """Does what `flashckpt.install_signal_handlers` does. `close` restores the previous handlers."""
        self._check_open()
        if self._signals is not None:
            self._signals.restore()
        board = StopBoard(*(("", 1) if self._internals.disabled else self._internals.launch_name))
        self._signals = self._hooks.signals = SignalHandlers(signals, deadline, board, exit_code)
        return self._signals

    @property
    def stop_requested(self) -> bool:
        """Returns True if the last snapshot was taken because of a signal. The training loop should then end."""
        return self._signals is not None and self._signals.finished

    def finalize(self) -> SaveHandle | None:
        """Saves the last step that `save` was called for, if it was not saved then. Waits for the newest save and
        returns its handle."""
        self._check_free("finalize")
        handle = self._handle
        if self._seen is not None and self._seen > 0 and not self.config.load_only:
            saved = handle is not None and handle.step == self._seen and handle.outcome in (None, Outcome.OK)
            loaded = handle is None and self._loaded_step == self._seen
            if not saved and not loaded:
                handle = self.save(self._seen, last_step=True, extra=self._said[0], compat=self._said[1])
        if handle is not None:
            self._bring_home(handle)
        return handle

    def close(self) -> None:
        """Waits for a copy that is under way, and removes hooks and signal handlers.

        It takes at most `config.save_timeout`, as `Checkpointer.close` does. It may be called twice. If an exception
        ended it, call it again to finish it.
        """
        self._closed = True
        if self._all_closed:
            return
        if self._internals.is_forked:
            self._close_forked()
            return
        deadline = time.monotonic() + self.config.save_timeout
        self._end_load()
        with contextlib.suppress(Exception):  # the handle has the error
            self._internals.settle(0.5 * self.config.save_timeout)
        self._gate.remove()
        if self._signals is not None:
            self._signals.restore()
        # In a thread: if the agent is gone, the call waits for another one.
        begin_in_thread(self._ask_flushes, "flashckpt-flush").wait(0.2 * self.config.save_timeout)
        self._recorder.poll()
        self._checkpointer.close(max(0.0, deadline - time.monotonic()))
        self._all_closed = True
        self._dropped.detach()

    def _close_forked(self) -> None:
        """Close in a forked child: the hooks and handlers are its own copies, everything else belongs to the parent."""
        self._gate.remove()
        if self._signals is not None:
            self._signals.restore()
        self._checkpointer.close()
        self._all_closed = True
        self._dropped.detach()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._internals.is_forked:
                self.finalize()
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            with unmasked(kind):
                self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this CheckpointManager was closed")
        if self._internals.is_forked:
            raise ConflictError(
                "this CheckpointManager belongs to the process that made it, but its fork used it",
                hint="make a manager of its own in the child",
            )

    def _check_free(self, doing: str) -> None:
        self._check_open()
        if self._loading and not self._internals.is_busy:
            self._end_load()  # an exception interrupted the end of an earlier load
        if self._locked:
            raise ConflictError(f"{doing}() within lock()", hint="leave the `with manager.lock()` block first")

    def _check_names(self, where: str, names: Collection[str]) -> None:
        if isinstance(names, str):
            raise ConfigError(f"{where}: expected a list of names, found the string {names!r}")
        known = (*KNOWN, *self._state.states)
        for name in names:
            if name not in known:
                raise ConfigError(f"{where}: {name!r} is no part of the state", hint=f"parts: {', '.join(known)}")


def _newest_if_negative(step: int | None) -> int | None:
    return None if step == -1 else step
