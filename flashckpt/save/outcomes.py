"""Decides which errors of a save are raised and which are outcomes, and counts the outcomes."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import weakref
from typing import TYPE_CHECKING

from flashckpt.errors import (
    AmbiguousHistoryError,
    BusyError,
    ClosedError,
    ConfigError,
    ConflictError,
    FencedError,
    FlashError,
    InternalError,
    LiveJobError,
    NoSpaceError,
    StorageError,
    StructureError,
    UnsupportedValueError,
)
from flashckpt.save.handle import SaveHandle
from flashckpt.types import Level, Outcome

if TYPE_CHECKING:
    from flashckpt.config import CheckpointConfig

log = logging.getLogger(__name__)

# Errors that save() always raises: for a state that can't be saved, and for wrong calls (a wrong step, two calls at
# once, a fork, a closed object, a history that was not loaded). It also raises what the caller's own code raises while
# its state is read. All other errors are outcomes.
CALLERS_FAULT = (
    UnsupportedValueError,
    StructureError,
    ConfigError,
    ConflictError,
    ClosedError,
    AmbiguousHistoryError,
    LiveJobError,
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


def as_flash_error(error: Exception) -> FlashError:
    """Return `error` if it is a FlashError, else a FlashError with `error` as its cause."""
    if isinstance(error, FlashError):
        return error
    found = f"{type(error).__name__}: {error}"
    mapped: FlashError
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        mapped = NoSpaceError(f"the save needs memory that this node does not have: {found}")
    elif isinstance(error, OSError):
        mapped = StorageError(f"the memory directory, or a file in it, could not be used: {found}")
    else:
        mapped = InternalError(f"the save failed unexpectedly: {found}")
    mapped.__cause__ = error
    return mapped


def is_raised(error: Exception, *, reads_state: bool) -> bool:
    """Return True if the caller is to blame, so that save() raises. `reads_state`: raised while the state was read."""
    if isinstance(error, CALLERS_FAULT):
        return True
    # Not a FlashError: it comes from the exchange that follows the failure, as another rank's error or a deadline.
    return reads_state and not isinstance(error, (FlashError, MemoryError))


class Outcomes:
    """The outcomes of one Checkpointer's saves."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.counts = {outcome.value: 0 for outcome in Outcome}
        self.last_problem = ""
        self._whose, self._pid = "", 0  # the process that saves; a fork of it reports nothing
        self._newest: int | None = None  # the newest step that was saved
        self._in_vain = 0  # number of saves since then that failed or were skipped
        self._has_told = False
        self.overtaken = ""  # why no save of this launch counts any more; "": no launch has taken the job over
        self._lost = 0  # number of saves that failed since then

    def belong_to(self, whose: str) -> None:
        """Note whose saves these are, for messages. From now on the end of the process logs how they ended."""
        self._whose, self._pid = whose, os.getpid()
        if not _living:
            atexit.register(_tell_all)
        _living.add(self)

    def tell_end(self) -> None:
        """Log an error, once, if the last saves failed."""
        _living.discard(self)
        if self._has_told or not self._in_vain or self._pid != os.getpid():
            return
        self._has_told = True
        tried = sum(self.counts.values())
        if self._newest is None:
            log.error(
                "%s: NO CHECKPOINT WAS SAVED: %d of %d saves failed. The last reason: %s",
                self._whose,
                self._in_vain,
                tried,
                self.last_problem,
            )
        elif self.counts[Outcome.FAILED.value] or self._config.on_busy == "wait":
            log.error(
                "%s: the last %d of %d saves failed; the newest that was saved is step %d. The last reason: %s",
                self._whose,
                self._in_vain,
                tried,
                self._newest,
                self.last_problem,
            )

    def begin(self) -> None:
        """Forget that the job was overtaken: this process has taken it over with another launch."""
        self.overtaken, self._lost = "", 0

    def note_overtaken(self, reason: str) -> None:
        """Record that another launch has taken the job. Logs an error once, because training goes on in vain. Any
        thread."""
        if self.overtaken:
            return
        self.overtaken = self.last_problem = reason
        log.error(
            "this training has lost its job, and none of its saves will count any more: %s. End this process; if the "
            "other launch was a mistake, end that one and start this one again instead",
            reason,
        )

    def say_goodbye(self) -> None:
        """Log again, at the end of the process, that saves failed: earlier log lines may have been missed."""
        if not self.overtaken:
            self.tell_end()
        elif not self._has_told:
            self._has_told = True
            log.error("%d saves failed since this training lost its job: %s", self._lost, self.overtaken)

    def skipped(self, step: int, reason: str) -> SaveHandle:
        """Count a save that was skipped before it began."""
        return self.ended(SaveHandle(step, None, Level.SEALED), Outcome.SKIPPED, reason)

    def failed(self, handle: SaveHandle, error: Exception) -> SaveHandle:
        """Count a save that failed. Raises its error, as a FlashError, if the configuration says so."""
        known = as_flash_error(error)
        outcome = Outcome.SKIPPED if isinstance(known, BusyError) else Outcome.FAILED
        unexpected = isinstance(known, InternalError)
        if isinstance(known, FencedError):
            self.note_overtaken(known.message)
            self._lost += 1
        log.warning(
            "step %d not saved (%s): %s", handle.step, outcome.value, known, exc_info=error if unexpected else None
        )
        self.ended(handle, outcome, str(known), known)
        if self._config.on_save_error == "raise":
            raise known
        return handle

    def ended(self, handle: SaveHandle, outcome: Outcome, reason: str, error: Exception | None = None) -> SaveHandle:
        self.counts[outcome.value] += 1
        if outcome is Outcome.OK:
            self._newest, self._in_vain = handle.step, 0
        elif handle.generation is not None or outcome is Outcome.FAILED:  # else saving is disabled
            self._in_vain += 1
        if reason:
            self.last_problem = reason
        handle.finish(outcome, reason, error)
        return handle


_living: weakref.WeakSet[Outcomes] = weakref.WeakSet()


def _tell_all() -> None:
    for outcomes in list(_living):
        outcomes.say_goodbye()
