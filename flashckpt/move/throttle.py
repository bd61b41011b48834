"""Limits the bandwidth of replication, so that training's own traffic keeps its share of the network."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

# How much may be sent at once after a pause. Small: otherwise the burst after a save would be the complete push.
_BURST_SECONDS = 0.05


class Throttle:
    """A token bucket that all pushes of a node share. None or 0 = no limit.

    A caller that takes more than there is waits until the debt is paid, so that a chunk larger than the bucket passes
    too. Later callers wait longer: nobody is overtaken, and the sum keeps the limit.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_second is not None and not 0 <= bytes_per_second < float("inf"):
            raise ConfigError(f"bytes_per_second: expected 0 or more, found {bytes_per_second}")
        self.bytes_per_second = bytes_per_second or None
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        # When the debt is paid. More than the burst in the past counts as a full bucket.
        self._paid_until = clock() - _BURST_SECONDS

    def take(self, size_bytes: int) -> float:
        """Wait until that many bytes may be sent. Return the seconds waited."""
        if size_bytes < 0:
            raise ConfigError(f"size_bytes: expected 0 or more, found {size_bytes}")
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - _BURST_SECONDS) + size_bytes / self.bytes_per_second
            wait = self._paid_until - now
        if wait <= 0:
            return 0.0
        self._sleep(wait)
        return wait
