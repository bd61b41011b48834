"""Keeps the progress of replication, which this node's agent tells its trainers."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from flashckpt.protocol.verdict import Change, ChangeKind
from flashckpt.save.flush_news import alike

log = logging.getLogger(__name__)

_MOST_UNHEARD = 256


@dataclass(frozen=True, slots=True)
class Heard:
    """One event for the training. "failed": the step will never be replicated; else the name of a `ChangeKind`."""

    kind: str
    step: int
    reason: str


class ReplicationNews:
    """The events that the training has not taken yet. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what follows
        self._problem = ""
        self._warned = ""  # why replication lags, as it was logged last
        self._standing: Change | None = None  # the last change of the kept generation, unless it is healed
        self._unheard: list[Heard] = []
        self._to_raise: Heard | None = None

    @property
    def problem(self) -> str:
        """Return why the oldest step that is not replicated yet is not; "" = not known, or there is none."""
        return self._problem

    def changed(self, change: Change) -> None:
        """Note a change. Logs one warning per change, however often the agent repeats it."""
        kind, step, reason = change.kind, change.generation.step, change.reason
        with self._lock:
            match kind:
                case ChangeKind.WAITING:
                    self._problem, warning = reason, ""
                case ChangeKind.LAGGING:
                    is_new = alike(reason) != alike(self._warned)
                    self._problem = self._warned = reason
                    warning = f"is not replicated yet: {reason}; it is tried again" if is_new else ""
                case ChangeKind.GOING_ON:
                    warning = "does not wait for other nodes any more: replication goes on" if self._warned else ""
                    reason, self._problem, self._warned = warning, "", ""
                case _:
                    warning = reason if change != self._standing else ""
                    self._standing = None if kind is ChangeKind.HEALED else change
            if warning:
                self._add(Heard(kind.value, step, reason))
        if warning:
            log.warning("step %d: %s", step, warning)

    def given_up(self, step: int, reason: str) -> None:
        """Note that a step that was saved here will never be replicated."""
        with self._lock:
            self._to_raise = Heard("failed", step, reason)
            self._add(self._to_raise)
        log.warning(
            "step %d was saved here, but will never be replicated: %s; the steps before and after it are not affected",
            step,
            reason,
        )

    def take(self) -> list[Heard]:
        """Return the events since the last call."""
        with self._lock:
            unheard, self._unheard = self._unheard, []
        return unheard

    def take_failure(self) -> Heard | None:
        """Return the last step that was given up, once."""
        with self._lock:
            failure, self._to_raise = self._to_raise, None
        return failure

    def _add(self, told: Heard) -> None:
        self._unheard = [*self._unheard, told][-_MOST_UNHEARD:]
