"""What several lanes share out among themselves: each takes the next frame as soon as it has sent its last."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flashckpt.lanes.layout import FRAME_BYTES
from flashckpt.types import ChunkRange

if TYPE_CHECKING:
    from collections.abc import Iterable


class Batches:
    """Any thread. A slow lane takes fewer, and what is missing after a break lies close together."""

    def __init__(self, ranges: Iterable[ChunkRange], chunk_bytes: int) -> None:
        self.at_once = max(1, FRAME_BYTES // chunk_bytes)
        self._lock = threading.Lock()  # protects the two below
        self._ranges = iter(tuple(ranges))
        self._rest: ChunkRange | None = next(self._ranges, None)

    def take(self) -> ChunkRange | None:
        """None: all were taken, or nobody wants them any more."""
        with self._lock:
            rest = self._rest
            if rest is None:
                return None
            if rest.count > self.at_once:
                self._rest = ChunkRange(rest.first + self.at_once, rest.count - self.at_once)
                return ChunkRange(rest.first, self.at_once)
            self._rest = next(self._ranges, None)
            return rest

    @property
    def is_empty(self) -> bool:
        return self._rest is None

    def stop(self) -> None:
        with self._lock:
            self._rest, self._ranges = None, iter(())
