"""The handle of a save: the level it has reached, its outcome, and futures to wait on."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import ConfigError, DeadlineError
from flashckpt.types import Generation, Level, Outcome
from flashckpt.workers import Changed

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SaveTimings:
    """Seconds by stage: of the training thread, or of the thread beside it where the save was overlapped."""

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
        self.reached: dict[Level, float] = {}  # when it got there, in seconds since 1970
        self.blocked_seconds = 0.0  # seconds that the training thread was held, in save() and at the gate
        self.proof_seconds = 0.0  # part of blocked_seconds: version counters and checksums (save/deferred.py)
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[None] = Future()
        self.reason = ""
        self._highest = highest  # the level in memory that this launch can bring a generation to
        self._persists = persists  # whether there is a persistent tier
        self.ask_persist: Callable[[], None] | None = None  # asks for a flush, once somebody waits for it
        self.before_pass: Callable[[], None] | None = None  # called once, before the gate opens
        self.queued: Queued | None = None
        self._given_up = False  # the tensors may change before they are copied: the shard must not be sealed
        self._stopped = ""  # why it will never get further than it is
        self._level = Level.NONE
        self._outcome: Outcome | None = None
        self._changed = Changed()

    @property
    def level(self) -> Level:
        return self._level

    @property
    def highest_level(self) -> Level:
        """That its launch can bring it to."""
        return self._highest

    @property
    def outcome(self) -> Outcome | None:
        """None while the save is under way."""
        return self._outcome

    def wait(self, level: str | Level = Level.SEALED, timeout: float | None = None) -> Outcome:
        """Waits for `level` ("staged", "sealed", "replicated", "persisted") or for the save to end otherwise.

        Returns how it ended; a failed or skipped save is an outcome here, not an exception, and so is one that was
        sealed but will never reach `level` (`reason` then says why). Raises DeadlineError when `timeout` seconds
        pass, ConfigError for a level that this launch can't reach. To wait for "persisted" asks for a flush.
        """
        wanted = _parse_level(level)
        reachable = self._persists if wanted is Level.PERSISTED else wanted <= self._highest
        if not reachable and self._outcome in (None, Outcome.OK):
            raise ConfigError(
                f"level {wanted.name.lower()}: this launch brings generations to {self._highest.name.lower()} at most",
                hint="replication needs other nodes, persistence needs persist_dir and an agent",
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        if wanted is Level.PERSISTED and self._level < wanted:
            # An overlapped save can be asked for once it is sealed.
            self._changed.wait_for(lambda: self._outcome is not None, timeout)
            self.request_persist()
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
            raise DeadlineError(
                f"step {self.step}: expected level {wanted.name.lower()} within {timeout} s, "
                f"found {self._level.name.lower()}",
                step=self.step,
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
        """Whether it can be brought to persist_dir."""
        return self._persists

    def request_persist(self) -> bool:
        """Asks for a flush, without waiting. False: it is not sealed yet, or there is nobody to ask."""
        if self._outcome is not Outcome.OK or self.ask_persist is None:
            return False
        self.ask_persist()
        return True

    def has_reached(self, level: Level) -> bool:
        """Reached, or known never to be."""
        with self._changed:
            return self._level >= level or bool(self._stopped)

    def advance(self, level: Level) -> None:
        with self._changed:
            self._reach(level)
            self._changed.notify_all()
        if level >= Level.STAGED and not self.staging_completion.done():
            self.staging_completion.set_result(None)

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
        """It will never get further. Where it is beyond that already, nothing changes."""
        with self._changed:
            self._stopped = self._stopped or reason or "given up"
            self._changed.notify_all()

    def finish(self, outcome: Outcome, reason: str, error: Exception | None = None) -> None:
        """Ends the save. The futures carry `error` where it failed."""
        with self._changed:
            self._outcome, self.reason = outcome, reason
            self._changed.notify_all()
        for future in (self.staging_completion, self.upload_completion):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def __repr__(self) -> str:
        outcome = self._outcome.value if self._outcome else "under way"
        reason = f", {self.reason}" if self.reason else ""
        return f"<SaveHandle step {self.step}: {self._level.name.lower()}, {outcome}{reason}>"


def _parse_level(level: str | Level) -> Level:
    if isinstance(level, Level):
        return level
    try:
        return Level[level.upper()]
    except (KeyError, AttributeError):
        raise ConfigError(f"level: expected staged, sealed, replicated or persisted, found {level!r}") from None
