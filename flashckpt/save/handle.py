"""The handle of a save: its level, its outcome, and futures to wait on."""

from __future__ import annotations

import contextlib
import time
import weakref
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import ConfigError, DeadlineError, FlashError, PersistError
from flashckpt.types import Generation, Level, Outcome
from flashckpt.workers import Changed, begin_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SaveTimings:
    """Seconds per stage, of the thread that copied: the training thread, or the save's own if it was overlapped."""

    plan: float = 0.0
    claim: float = 0.0
    copy: float = 0.0
    seal: float = 0.0

    @property
    def total(self) -> float:
        return self.plan + self.claim + self.copy + self.seal


class Queued(Protocol):
    """Copies that are queued on devices. Streams wait for them; the host need not."""

    def pass_in_stream(self) -> None:
        """Make this thread's current streams wait for the copies. Work queued afterwards may change the tensors."""


class SaveHandle:
    """One save. Levels only rise; the outcome is set once."""

    def __init__(self, step: int, generation: Generation | None, highest: Level, persists: bool = False) -> None:
        self.step = step
        self.generation = generation
        self.size_bytes = 0
        self.timings = SaveTimings()
        self.reached: dict[Level, float] = {}  # level → when it was reached, in seconds since 1970
        self.blocked_seconds = 0.0  # seconds that the training thread was held, in save() and at the gate
        self.proof_seconds = 0.0  # part of blocked_seconds: version counters and checksums (save/deferred.py)
        self.staging_completion: Future[None] = Future()
        self.reason = ""
        self._highest = highest  # the highest level in memory that generations of this launch can reach
        self._persists = persists  # whether there is a persistent tier
        self.ask_persist: Callable[[bool], None] | None = None  # asks for a flush; True: a caller waits for it
        self.flush_problem: Callable[[], str] = str  # why the last flush failed; "" = it succeeded, or there was none
        self.replication_problem: Callable[[], str] = str  # why the save is not replicated yet; "" = not known
        self.before_pass: Callable[[], None] | None = None  # called once, before the gate opens
        self.queued: Queued | None = None
        self._upload: weakref.ref[UploadCompletion] | None = None
        self._upload_is_wanted = False  # a caller waits for `upload_completion`
        self._error: Exception | None = None  # the error that ended the save
        self._given_up = False  # the tensors may change before they are copied: the shard must not be sealed
        self._stopped = ""  # why the save will never reach a higher level
        self._level = Level.NONE
        self._outcome: Outcome | None = None
        self._changed = Changed()

    @property
    def level(self) -> Level:
        return self._level

    @property
    def highest_level(self) -> Level:
        """The highest level in memory that the save can reach in its launch."""
        return self._highest

    @property
    def outcome(self) -> Outcome | None:
        """None while the save is under way."""
        return self._outcome

    def wait(self, level: str | Level = Level.SEALED, timeout: float | None = None) -> Outcome:
        """Waits for `level` ("staged", "sealed", "replicated", "persisted") or for the save to end otherwise.

        Returns how it ended. A failed or skipped save is an outcome here, not an exception, and so is one that was
        sealed but will never reach `level` (`reason` then says why). Raises DeadlineError after `timeout` seconds, and
        ConfigError for a level that this launch can't reach. Waiting for "persisted" asks for a flush.
        """
        wanted = _parse_level(level)
        reachable = self._persists if wanted is Level.PERSISTED else wanted <= self._highest
        if not reachable and self._outcome in (None, Outcome.OK):
            raise ConfigError(
                f"level {wanted.name.lower()}: generations of this launch reach {self._highest.name.lower()} at most",
                hint="replication needs other nodes, persistence needs persist_dir and an agent",
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        if wanted is Level.PERSISTED and self._level < wanted:
            # A flush of an overlapped save can be asked for once it is sealed.
            self._changed.wait_for(lambda: self._outcome is not None, timeout)
            self.request_persist(urgent=True)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = self._changed.wait_for(
            lambda: self._level >= wanted or bool(self._stopped) or self._outcome not in (None, Outcome.OK),
            left,
        )
        with self._changed:
            if ended and self._level < wanted and self._outcome in (None, Outcome.OK):
                self.reason = self._stopped
                return Outcome.FAILED
        if ended:
            self.before_pass = None  # a caller that has waited may change tensors without the gate
        if not ended:
            problem = self.flush_problem() if wanted is Level.PERSISTED else ""
            why = f"; the last flush failed: {problem}" if problem else ""
            if not problem and self._level < Level.REPLICATED <= wanted:
                problem = self.replication_problem()
                why = f": {problem}" if problem else ""
            raise DeadlineError(
                f"step {self.step}: expected level {wanted.name.lower()} within {timeout} s, "
                f"found {self._level.name.lower()}{why}",
                step=self.step,
                problem=problem,
            )
        return self._outcome or Outcome.OK

    def wait_until_copied(self, timeout: float) -> bool:
        """Return True once tensors may be changed: STAGED, ended, or all copies `queued`. False after `timeout`."""
        return self._changed.wait_for(lambda: self.is_copied or self.queued is not None, timeout)

    def queue(self, queued: Queued) -> None:
        """Record that only copies queued on devices still read tensors. Wakes callers at the gate."""
        with self._changed:
            self.queued = queued
            self._changed.notify_all()

    @property
    def is_copied(self) -> bool:
        return self._level >= Level.STAGED or self._outcome is not None

    @property
    def persists(self) -> bool:
        """True if the save can be flushed to persist_dir."""
        return self._persists

    def request_persist(self, *, urgent: bool = False) -> bool:
        """Asks for a flush, without waiting. Returns False if the save is not sealed yet, or there is no agent to ask.

        An urgent flush does not give way to the training.
        """
        if self._outcome is not Outcome.OK or self.ask_persist is None:
            return False
        self.ask_persist(urgent)
        return True

    def has_reached(self, level: Level) -> bool:
        """Return True if the save has reached `level`, or will never reach it."""
        with self._changed:
            return self._level >= level or bool(self._stopped)

    def advance(self, level: Level) -> None:
        with self._changed:
            self._reach(level)
            self._changed.notify_all()
        if level >= Level.STAGED and not self.staging_completion.done():
            self.staging_completion.set_result(None)
        self._settle_upload()

    @property
    def upload_completion(self) -> Future[None]:
        """Done once the save is persisted. See `UploadCompletion`."""
        with self._changed:
            upload = self._upload() if self._upload is not None else None
            if upload is None or upload.done():  # a flush that failed has ended it; a later one may succeed
                upload = UploadCompletion(self)
                self._upload = weakref.ref(upload)
        self._settle_upload()
        return upload

    def _settle_upload(self) -> None:
        """Complete `upload_completion` once the save has reached its highest level, or will never reach it."""
        upload = self._upload() if self._upload is not None else None
        if upload is None:
            return
        with self._changed:
            goal = Level.PERSISTED if self._persists else self._highest
            failed = self._outcome not in (None, Outcome.OK)
            done = failed or (self._outcome is Outcome.OK and self._level >= goal)
            stopped, error = self._stopped, self._error
        if done:
            _complete(upload, error)
        elif stopped:
            reason = f"step {self.step} did not reach a higher level than {self._level.name.lower()}: {stopped}"
            _complete(upload, PersistError(reason, step=self.step))
        if upload.done():
            _awaited.discard(upload)

    def _reach(self, level: Level) -> None:
        now = time.time()
        for passed in range(self._level + 1, level + 1):
            self.reached[Level(passed)] = now
        self._level = max(self._level, level)

    def stage(self) -> bool:
        """Record that the copy is made. False: the save was given up before, so the copy must be thrown away."""
        with self._changed:
            if self._given_up:
                return False
            self._reach(Level.STAGED)
            self._changed.notify_all()
        if not self.staging_completion.done():
            self.staging_completion.set_result(None)
        return True

    def give_up(self) -> bool:
        """Give the save up before the caller changes its tensors. False: they are copied, or the save has ended."""
        with self._changed:
            if self._level >= Level.STAGED or self._outcome is not None:
                return False
            self._given_up = True
            return True

    @property
    def is_given_up(self) -> bool:
        return self._given_up

    def let_pass(self) -> None:
        """Call `before_pass`, once, before the gate opens. Not if the save was given up."""
        look, self.before_pass = self.before_pass, None
        if look is not None and not self._given_up:
            look()

    def stop(self, reason: str) -> None:
        """Record why the save will never reach a higher level than it has."""
        with self._changed:
            self._stopped = self._stopped or reason or "given up"
            self._changed.notify_all()
        self._settle_upload()

    def finish(self, outcome: Outcome, reason: str, error: Exception | None = None) -> None:
        """Ends the save. If it failed, the futures carry `error`."""
        with self._changed:
            self._outcome, self.reason, self._error = outcome, reason, error
            self._changed.notify_all()
        _complete(self.staging_completion, error)
        self._settle_upload()
        if outcome is Outcome.OK and self._upload_is_wanted:
            self.want_upload()

    def flush_failed(self, reason: str) -> None:
        """Complete `upload_completion`, if a caller waits for it, with a failed flush. The flush is still tried
        again."""
        upload = self._upload() if self._upload is not None else None
        if upload is not None and self._upload_is_wanted and self._level < Level.PERSISTED:
            hint = 'handle.wait("persisted") waits for the next attempts'
            _complete(upload, PersistError(f"step {self.step}: {reason}", hint=hint, step=self.step))
            _awaited.discard(upload)

    def want_upload(self) -> None:
        """Ask for a flush because a caller waits for `upload_completion`, as `wait("persisted")` does. Does not
        wait."""
        self._upload_is_wanted = True
        if self._persists and self._outcome is Outcome.OK and self._level < Level.PERSISTED and not self._stopped:
            begin_in_thread(self._ask_for_upload, "flashckpt-upload")

    def _ask_for_upload(self) -> None:
        try:
            self.request_persist(urgent=True)
        except (FlashError, OSError) as error:
            self.stop(f"no flush could be asked for: {error}")

    def __repr__(self) -> str:
        outcome = self._outcome.value if self._outcome else "under way"
        reason = f", {self.reason}" if self.reason else ""
        return f"<SaveHandle step {self.step}: {self._level.name.lower()}, {outcome}{reason}>"


class UploadCompletion(Future[None]):
    """Done once the save is persisted; without persist_dir, once it has reached its highest level in memory.

    Carries a PersistError if it never will be. Waiting for it, or adding a callback, asks for a flush: without that, a
    step that is not due would never be flushed.
    """

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle  # has only a weak reference to this future

    def result(self, timeout: float | None = None) -> None:
        self._want()
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._want()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        super().add_done_callback(fn)
        self._want()

    def _want(self) -> None:
        if not self.done():
            # IMPORTANT: a callback is called even if the caller keeps neither this future nor the handle.
            _awaited.add(self)
            self._handle.want_upload()
            if self.done():
                _awaited.discard(self)


_awaited: set[UploadCompletion] = set()


def _complete(future: Future[None], error: Exception | None) -> None:
    """Complete a future, unless it is done already."""
    with contextlib.suppress(InvalidStateError):
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _parse_level(level: str | Level) -> Level:
    if isinstance(level, Level):
        return level
    try:
        return Level[level.upper()]
    except (KeyError, AttributeError):
        raise ConfigError(f"level: expected staged, sealed, replicated or persisted, found {level!r}") from None
