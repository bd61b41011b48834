"""Keeps the results of flushes to persist_dir, which this node's agent tells its trainers."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass

log = logging.getLogger(__name__)

_MOST_UNHEARD = 256
_VARYING = re.compile(r"[0-9a-f]{16}|\d+")


@dataclass(frozen=True, slots=True)
class FlushEnd:
    """The end of one flush."""

    step: int
    reason: str  # why it failed; "" = it succeeded
    is_new: bool = True  # True: the flush before succeeded, or failed for another reason


class FlushNews:
    """The ends of flushes that the training has not taken yet. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what follows
        self._problem = ""  # of the last flush
        self._last = ""  # the last problem that was logged
        self._unheard: list[FlushEnd] = []
        self._to_raise: FlushEnd | None = None

    @property
    def problem(self) -> str:
        """Return why the last flush failed; "" = it succeeded, or there was none."""
        return self._problem

    def failed(self, step: int, reason: str) -> None:
        """Note a failure. Logs a warning if the reason differs from the one before."""
        with self._lock:
            is_new = alike(reason) != alike(self._problem)
            self._problem = reason
            end = FlushEnd(step, reason, is_new)
            self._add(end)
            if is_new:
                self._to_raise = end
        if is_new:
            log.warning(
                "step %d was not flushed to persist_dir: %s; it stays in memory, and the flush is tried again",
                step,
                reason,
            )

    def done(self, step: int) -> None:
        """Note that a step is persisted."""
        with self._lock:
            had, self._problem, self._to_raise = self._problem, "", None
            self._add(FlushEnd(step, ""))
        if had:
            log.warning("step %d was flushed to persist_dir: flushes succeed again", step)

    def take(self) -> list[FlushEnd]:
        """Return the flushes that have ended since the last call."""
        with self._lock:
            unheard, self._unheard = self._unheard, []
        return unheard

    def take_failure(self) -> FlushEnd | None:
        """Return the last failure, once; None if a flush has succeeded since."""
        with self._lock:
            failure, self._to_raise = self._to_raise, None
        return failure

    def _add(self, end: FlushEnd) -> None:
        self._unheard = [*self._unheard, end][-_MOST_UNHEARD:]


def alike(reason: str) -> str:
    """Return a reason without what differs from attempt to attempt: steps and names of temporary files."""
    return _VARYING.sub("#", reason)
