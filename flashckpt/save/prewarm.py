"""Makes the memory for saves ahead, in a thread of low priority, so that the first save finds it warm."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError
from flashckpt.workers import Pending, begin_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_NICENESS = 19


class Prewarm:
    """At most one prewarm at a time. A save waits for it, because the save would have to do the same work."""

    def __init__(self) -> None:
        self._pending: Pending[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the background. Logs a failure: the save that needs the memory reports it again."""

        def run() -> None:
            # On Linux each thread has a priority of its own: this one and those that it starts give way to training.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            try:
                work()
            except (FlashError, OSError) as error:
                log.warning("memory was not made ahead, so that the first save is slower: %s", error)

        # A daemon thread: the end of the process does not wait for memory that will not be used.
        self._pending = begin_in_thread(run, "flashckpt-prewarm")

    @property
    def is_running(self) -> bool:
        return self._pending is not None and not self._pending.done

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds. Return True if it has ended."""
        return self._pending is None or self._pending.wait(timeout)
