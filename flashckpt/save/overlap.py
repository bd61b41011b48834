"""The overlapped save: its copy runs in a thread beside forward and backward. One at a time; no collective in it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from flashckpt.errors import DeadlineError
from flashckpt.workers import Pending, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)


class Overlap:
    """At most one save under way; whoever touches what it reads or writes waits for it first."""

    def __init__(self) -> None:
        # Kept: a thread that is made anew for each save would fault its stack and allocator arena in each time.
        self._worker = Worker("flashckpt-save", finishes=True)
        self._running: tuple[SaveHandle, Pending[None]] | None = None

    @property
    def handle(self) -> SaveHandle | None:
        """Of the save that is under way."""
        running = self._running
        return None if running is None or running[1].done else running[0]

    def start(self, handle: SaveHandle, write: Callable[[], None]) -> None:
        """`write` runs in the thread; what it raises is raised by the next `settle`."""
        pending = Pending(write)
        try:
            self._running = handle, pending  # before it begins: an exception may come at any moment
            self._worker.hand_over(pending)
        except BaseException:
            if not pending.cancel():
                handle.give_up()  # nobody will wait for the copy before the tensors change
            raise

    def settle(self, timeout: float) -> None:
        """Returns when no save is under way. DeadlineError where it does not end; the save is lost then."""
        if self._running is None:
            return
        handle, pending = self._running
        if not pending.wait(timeout):
            handle.give_up()
            raise DeadlineError(
                f"step {handle.step}: the copy in the background did not end within {timeout:g} s",
                hint="a device that hangs, or a machine without a free core; overlap=False copies in save()",
                step=handle.step,
            )
        self._running = None
        if not pending.cancelled:
            pending.result()

    def close(self) -> None:
        self._worker.close()


def wait_until_staged(handle: SaveHandle, timeout: float) -> float:
    """Holds the caller, or its streams, while its tensors are still being copied; returns for how many seconds.

    A copy that takes longer than `timeout` is thrown away: training goes on, and what it changes from now on must
    not reach a shard.
    """
    if handle.is_copied and handle.before_pass is None:
        return 0.0
    began = time.perf_counter()
    if not handle.wait_until_copied(timeout) and handle.give_up():
        log.warning("step %d: not copied within %.1f s; the save is given up", handle.step, timeout)
    handle.let_pass()
    if not handle.is_copied and handle.queued is not None:
        handle.queued.pass_in_stream()
    held = time.perf_counter() - began
    handle.blocked_seconds += held
    return held
