"""Measures what saves cost and which levels they reach, and sends events to the user's callback."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.types import Level, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.load.result import LoadResult
    from flashckpt.save.flush_news import FlushNews
    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.replication_news import ReplicationNews

log = logging.getLogger(__name__)

_REMEMBERED = 16
_LEVELS = (Level.STAGED, Level.SEALED, Level.REPLICATED, Level.PERSISTED)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one step. Sent on the training thread, at the next call to the manager."""

    # "saved", "held" (optimizer.step() had to wait), a level that was reached, "failed" (a save, its replication or a
    # flush; also once when another launch has taken the job over), "skipped", "loaded"; of replication also "lagging"
    # and "going_on", and of the step that the job stands on "at_risk", "lost" and "healed"
    kind: str
    step: int
    seconds: float = 0.0  # for "saved" and "held": of the training thread; for a level: since the save
    size_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of this rank since its manager was made."""

    saves: dict[str, int] = field(default_factory=dict)  # number by outcome
    blocked_seconds: float = 0.0  # of the training thread, in save() and at the gate, all saves together
    last_blocked_seconds: float = 0.0
    saved_bytes: int = 0
    newest_step: dict[str, int] = field(default_factory=dict)  # by level
    age_seconds: dict[str, float] = field(default_factory=dict)  # of the newest generation at each level
    load_seconds: float = 0.0
    flushes: dict[str, int] = field(default_factory=dict)  # to persist_dir: "done" and "failed"
    flush_problem: str = ""  # why the last flush failed; "" = it succeeded, or there was none
    replications: dict[str, int] = field(default_factory=dict)  # of saves with outcome "ok": "done" and "failed"
    replication_problem: str = ""  # why the oldest step that is not replicated yet is not; "" = not known, or none
    overtaken: str = ""  # why no save counts any more: another launch has taken the job over


class Recorder:
    """Follows the saves of one manager. Used by the training thread alone."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self.flush_news: FlushNews | None = None
        self.replication_news: ReplicationNews | None = None
        self._replications = {"done": 0, "failed": 0}
        self._flushes = {"done": 0, "failed": 0}
        self._recent: deque[_Followed] = deque(maxlen=_REMEMBERED)
        self._saves = {outcome.value: 0 for outcome in Outcome}
        self._blocked = 0.0
        self._bytes = 0
        self._newest: dict[Level, tuple[int, float]] = {}
        self._load_seconds = 0.0
        self._overtaken = ""

    def saved(self, handle: SaveHandle, now: float) -> None:
        self._recent.append(_Followed(handle, now))
        self._blocked += handle.blocked_seconds
        self._send(Event("saved", handle.step, handle.blocked_seconds))
        self.poll()

    def held(self, handle: SaveHandle, seconds: float) -> None:
        self._blocked += seconds
        self._send(Event("held", handle.step, seconds))

    def loaded(self, result: LoadResult) -> None:
        self._load_seconds = result.timings.total
        self._send(Event("loaded", result.step, result.timings.total, reason=result.source))

    def overtaken(self, step: int, reason: str) -> None:
        """Sends one "failed" event when another launch takes the job over, even if no save was under way."""
        if reason and not self._overtaken:
            self._send(Event("failed", step, reason=reason))
        self._overtaken = reason

    def poll(self) -> None:
        """Counts and sends what has happened in the background since the last call."""
        for end in self.flush_news.take() if self.flush_news is not None else ():
            self._flushes["failed" if end.reason else "done"] += 1
            if end.reason and end.is_new:
                self._send(Event("failed", end.step, reason=f"not flushed to persist_dir: {end.reason}"))
        for told in self.replication_news.take() if self.replication_news is not None else ():
            is_failure = told.kind == "failed"
            self._replications["failed"] += is_failure
            self._send(
                Event(told.kind, told.step, reason=f"not replicated: {told.reason}" if is_failure else told.reason)
            )
        for one in self._recent:
            handle = one.handle
            for level in _LEVELS:
                if level in handle.reached and level not in one.told:
                    one.told.add(level)
                    self._replications["done"] += level is Level.REPLICATED
                    at = handle.reached[level]
                    self._newest[level] = max(self._newest.get(level, (-1, 0.0)), (handle.step, at))
                    self._send(Event(level.name.lower(), handle.step, at - one.began, handle.size_bytes))
            if handle.outcome is not None and not one.ended:
                one.ended = True
                self._saves[handle.outcome.value] += 1
                self._bytes += handle.size_bytes
                if handle.outcome is not Outcome.OK:
                    self._send(Event(handle.outcome.value, handle.step, reason=handle.reason))

    def metrics(self, now: float) -> Metrics:
        self.poll()
        return Metrics(
            saves=dict(self._saves),
            blocked_seconds=self._blocked,
            last_blocked_seconds=self._recent[-1].handle.blocked_seconds if self._recent else 0.0,
            saved_bytes=self._bytes,
            newest_step={level.name.lower(): step for level, (step, _) in self._newest.items()},
            age_seconds={level.name.lower(): max(0.0, now - at) for level, (_, at) in self._newest.items()},
            load_seconds=self._load_seconds,
            flushes=dict(self._flushes),
            flush_problem=self.flush_news.problem if self.flush_news is not None else "",
            replications=dict(self._replications),
            replication_problem=self.replication_news.problem if self.replication_news is not None else "",
            overtaken=self._overtaken,
        )

    def _send(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event failed for %s of step %d; training goes on", event.kind, event.step)


@dataclass(slots=True)
class _Followed:
    handle: SaveHandle
    began: float
    told: set[Level] = field(default_factory=set)
    ended: bool = False
