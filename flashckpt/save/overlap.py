"""Runs the copy of an overlapped save in a thread beside forward and backward. One at a time, without collectives."""

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
    """Runs at most one save. Call `settle` before you change what it reads, or use what it writes."""

    def __init__(self) -> None:
        # One thread for all saves: a new one per save would take page faults for its stack and allocator arena each
        # time.
        self._worker = Worker("flashckpt-save", finishes=True)
        self._running: tuple[SaveHandle, Pending[None]] | None = None

    @property
    def handle(self) -> SaveHandle | None:
        """Return the handle of the save that is under way, or None."""
        running = self._running
        return None if running is None or running[1].done else running[0]

    def start(self, handle: SaveHandle, write: Callable[[], None]) -> None:
        """Run `write` in the thread. The next `settle` raises what it raises."""
        pending = Pending(write)
        try:
            self._running = handle, pending  # set before the call begins: an exception may come at any moment
            self._worker.hand_over(pending)
        except BaseException:
            if not pending.cancel():
                handle.give_up()  # nothing will wait for the copy before the tensors change
            raise

    def settle(self, timeout: float) -> None:
        """Return when no save is under way. If it takes longer than `timeout`, give it up and raise DeadlineError."""
        if self._running is None:
            return
        handle, pending = self._running
        if not pending.wait(timeout):
            handle.give_up()
            raise DeadlineError(
                f"step {handle.step}: the copy in the background did not end within {timeout:g} s",
                hint="look for a device that hangs or a machine without a free core; overlap=False copies in save()",
                step=handle.step,
            )
        self._running = None
        if not pending.cancelled:
            pending.result()

    def close(self) -> None:
        self._worker.close()


def wait_until_staged(handle: SaveHandle, timeout: float) -> float:
    """Hold the caller, or its streams, while its tensors are still being copied. Returns the seconds it was held.

    A copy that takes longer than `timeout` is thrown away: training goes on, and its changes must not reach a shard.
    """
    if handle.is_copied and handle.before_pass is None:
        return 0.0
    began = time.perf_counter()
    if not handle.wait_until_copied(timeout) and handle.give_up():
        log.warning("step %d: not copied within %.1f s: the save fails and training goes on", handle.step, timeout)
    handle.let_pass()
    if not handle.is_copied and handle.queued is not None:
        handle.queued.pass_in_stream()
    held = time.perf_counter() - began
    handle.blocked_seconds += held
    return held
