"""Cancels streams whose other end went silent: gRPC has no timeout between the messages of a stream."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_MAX_INTERVAL = 1.0


class Watched:
    """One stream. Its own thread says when a wait begins and ends; no lock, each is a single assignment."""

    __slots__ = ("_cancel", "_due", "stalled")

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._due = float("inf")
        self.stalled = False

    def expect(self, timeout: float) -> None:
        """The other end has this long, from now."""
        self._due = time.monotonic() + timeout

    def relax(self) -> None:
        """Nothing is awaited: whatever takes time now is ours."""
        self._due = float("inf")

    def cancel_if_due(self, now: float) -> None:
        if now < self._due or self.stalled:
            return
        self.stalled = True
        try:
            self._cancel()
        except Exception:
            _log.exception("a stalled stream could not be cancelled")


class Watchdog:
    """One thread for all streams of a server or a client; started by the first of them."""

    def __init__(self, timeout: float) -> None:
        self._interval = min(_MAX_INTERVAL, timeout / 4)
        self._lock = threading.Lock()  # protects the two below
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, cancel: Callable[[], object]) -> Watched:
        watched = Watched(cancel)
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flashckpt-watchdog", daemon=True)
                self._thread.start()
        return watched

    def forget(self, watched: Watched) -> None:
        with self._lock:
            self._watched.discard(watched)

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            now = time.monotonic()
            with self._lock:
                watched = list(self._watched)
            for one in watched:
                one.cancel_if_due(now)
