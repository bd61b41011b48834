"""How saves end: what is an outcome and what is raised, and how many ended how."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import (
    AgentError,
    BusyError,
    ConflictError,
    FencedError,
    LiveJobError,
    OtherRankError,
    UnsupportedValueError,
)
from flashckpt.save.handle import SaveHandle
from flashckpt.types import Level, Outcome

if TYPE_CHECKING:
    from flashckpt.config import CheckpointConfig

log = logging.getLogger(__name__)

# What a save may end in through no fault of the caller's; everything else is raised. Once ranks agree on what is to be
# saved, all that goes wrong is an outcome, except a tensor that can't be saved after all and a misuse such as a fork.
OUTCOMES = (OSError, BusyError, FencedError, OtherRankError, AgentError)
CALLERS_FAULT = (UnsupportedValueError, ConflictError, LiveJobError)


class Outcomes:
    """Of the saves of one Checkpointer."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.counts = {outcome.value: 0 for outcome in Outcome}
        self.last_problem = ""
        self.overtaken = ""  # why no save of this launch counts any more; "": none has taken the job over
        self._lost = 0  # saves that failed since

    def begin(self) -> None:
        """Another launch of this process, which has taken the job itself."""
        self.overtaken, self._lost = "", 0

    def note_overtaken(self, reason: str) -> None:
        """Record that another launch has taken the job. Says so once, loudly: training goes on in vain. Any thread."""
        if self.overtaken:
            return
        self.overtaken = self.last_problem = reason
        log.error(
            "this training has lost its job, and none of its saves will count any more: %s. End this process; if the "
            "other launch was a mistake, end that one and start this one again instead",
            reason,
        )

    def say_goodbye(self) -> None:
        """At the end, where a log line in the middle may have been missed."""
        if self.overtaken:
            log.error("%d saves failed since this training lost its job: %s", self._lost, self.overtaken)

    def skipped(self, step: int, reason: str) -> SaveHandle:
        """It was not even begun."""
        return self.ended(SaveHandle(step, None, Level.SEALED), Outcome.SKIPPED, reason)

    def failed(self, handle: SaveHandle, error: Exception) -> SaveHandle:
        """Raises it, where the configuration says so."""
        outcome = Outcome.SKIPPED if isinstance(error, BusyError) else Outcome.FAILED
        if isinstance(error, FencedError):
            self.note_overtaken(error.message)
            self._lost += 1
        log.warning("step %d not saved (%s): %s", handle.step, outcome.value, error)
        self.ended(handle, outcome, str(error), error)
        if self._config.on_save_error == "raise":
            raise error
        return handle

    def ended(self, handle: SaveHandle, outcome: Outcome, reason: str, error: Exception | None = None) -> SaveHandle:
        self.counts[outcome.value] += 1
        if reason:
            self.last_problem = reason
        handle.finish(outcome, reason, error)
        return handle
