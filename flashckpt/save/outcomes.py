"""How saves end: what is an outcome and what is raised, and how many ended how."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import (
    AgentError,
    BusyError,
    ConflictError,
    FencedError,
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
CALLERS_FAULT = (UnsupportedValueError, ConflictError)


class Outcomes:
    """Of the saves of one Checkpointer."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.counts = {outcome.value: 0 for outcome in Outcome}
        self.last_problem = ""

    def skipped(self, step: int, reason: str) -> SaveHandle:
        """It was not even begun."""
        return self.ended(SaveHandle(step, None, Level.SEALED), Outcome.SKIPPED, reason)

    def failed(self, handle: SaveHandle, error: Exception) -> SaveHandle:
        """Raises it, where the configuration says so."""
        outcome = Outcome.SKIPPED if isinstance(error, BusyError) else Outcome.FAILED
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
