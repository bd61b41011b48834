"""The memory for saves, made ahead in a thread that gets what training leaves: the first save finds it warm."""

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
    """At most one at a time. Whoever is about to write into a slot waits for it: it does the same work."""

    def __init__(self) -> None:
        self._pending: Pending[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """`work` runs in the background. That it fails is logged: the save that needs the memory says so again."""

        def run() -> None:
            # On Linux a priority is the thread's own; it and the threads it starts give way to forward and backward.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            try:
                work()
            except (FlashError, OSError) as error:
                log.warning("no memory was made ahead: %s", error)

        # A daemon: the end of the process does not wait for memory that nobody will write to.
        self._pending = begin_in_thread(run, "flashckpt-prewarm")

    @property
    def is_running(self) -> bool:
        return self._pending is not None and not self._pending.done

    def wait(self, timeout: float) -> bool:
        """Whether it has ended, within `timeout` seconds."""
        return self._pending is None or self._pending.wait(timeout)
