"""The overlapped save: its copy runs in a thread beside forward and backward. One at a time; no collective in it."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from flashckpt.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)


class Overlap:
    """At most one save under way; whoever touches what it reads or writes waits for it first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: tuple[SaveHandle, Future[None]] | None = None

    @property
    def handle(self) -> SaveHandle | None:
        """Of the save that is under way."""
        if self._running is None or self._running[1].done():
            return None
        return self._running[0]

    def start(self, handle: SaveHandle, write: Callable[[], None]) -> None:
        """`write` runs in the thread; what it raises is raised by the next `settle`."""
        if self._pool is None:
            # Kept: a thread that is made anew for each save would fault its stack and allocator arena in each time.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="flashckpt-save")
        self._running = handle, self._pool.submit(write)

    def settle(self, timeout: float) -> None:
        """Returns when no save is under way. DeadlineError where it does not end; the save is lost then."""
        if self._running is None:
            return
        handle, future = self._running
        wait([future], timeout)
        if not future.done():
            handle.give_up()
            raise DeadlineError(
                f"step {handle.step}: the copy in the background did not end within {timeout:g} s",
                hint="a device that hangs, or a machine without a free core; overlap=False copies in save()",
                step=handle.step,
            )
        self._running = None
        future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=self.handle is None, cancel_futures=True)
            self._pool = None


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
