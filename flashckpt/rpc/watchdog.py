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
    """One stream. Its own thread sets when a wait begins and ends; without a lock, since each is a single
    assignment."""

    __slots__ = ("_cancel", "_due", "stalled")

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._due = float("inf")
        self.stalled = False

    def expect(self, timeout: float) -> None:
        """Start a wait: the other end has this long, from now."""
        self._due = time.monotonic() + timeout

    def relax(self) -> None:
        """End the wait: the time that follows is ours."""
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
        self._state = threading.Condition()  # protects what follows
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, cancel: Callable[[], object]) -> Watched:
        watched = Watched(cancel)
        with self._state:
            self._watched.add(watched)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="flashckpt-watchdog", daemon=True)
                thread.start()  # before it is stored: the next call tries again if the process has no thread to spare
                self._thread = thread
            elif len(self._watched) == 1:
                self._state.notify_all()
        return watched

    def forget(self, watched: Watched) -> None:
        with self._state:
            self._watched.discard(watched)

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._state:
                # Asleep while there is nothing to watch: an idle agent has several of these. But not if it was closed
                # while this thread was elsewhere: nobody would wake it again.
                if not self._closed:
                    self._state.wait(self._interval if self._watched else None)
                if self._closed:
                    return
                watched = list(self._watched)
            now = time.monotonic()
            for one in watched:
                one.cancel_if_due(now)
