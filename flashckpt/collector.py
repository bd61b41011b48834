"""Pauses Python's cyclic garbage collector while a plan of many tensors is made.

A plan makes hundreds of thousands of small objects, which reference counts free. Every thousand of them would start a
collection, which visits every object of the training process and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Pause:
    """Counts the open pauses per thread: the save's thread and the caller's may pause it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what follows
        self._who: dict[int, int] = {}  # thread → number of its open pauses
        self._was_on = False
        self._is_paused = False  # set before the collector is switched off, cleared after it is on again
        self._watches_forks = False

    def begin(self) -> None:
        with self._lock:
            if not self._watches_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._watches_forks = True
            if not self._is_paused:
                self._was_on = gc.isenabled()
                self._is_paused = True
            thread = threading.get_ident()
            self._who[thread] = self._who.get(thread, 0) + 1
            gc.disable()

    def end(self) -> None:
        with self._lock:
            thread = threading.get_ident()
            count = self._who.pop(thread, 0)  # 0 in a child that was forked meanwhile
            if count > 1:
                self._who[thread] = count - 1
            self._resume_if_last()

    def end_all(self) -> None:
        with self._lock:
            self._who.pop(threading.get_ident(), 0)
            self._resume_if_last()

    def _resume_if_last(self) -> None:
        if not self._who and self._is_paused:
            if self._was_on:
                gc.enable()
            self._is_paused = False

    def _forget(self) -> None:
        """Ends all pauses in a forked child: the threads that paused it, and may have held the lock, do not exist
        there."""
        self._lock = threading.Lock()
        self._who = {}
        self._resume_if_last()


_pause = _Pause()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector within the block; restores its state afterwards. The block must not wait for anything."""
    try:
        _pause.begin()
        yield
    finally:
        _pause.end()


def resume_collector() -> None:
    """Ends pauses of this thread that an exception left open. Call it only while no call of flashckpt is under way."""
    _pause.end_all()
