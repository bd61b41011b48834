"""Verifies held shards, slowly: a damaged copy has to be found while there is a good one."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, FlashError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashckpt.agent.shard_files import ServedShard
    from flashckpt.types import ShardId

_log = logging.getLogger(__name__)

_SLICE_BYTES = 16 << 20  # per step: a few milliseconds


class Scrubber:
    """Verifies all shards once every `interval` seconds, a slice per step."""

    def __init__(
        self, open_shard: Callable[[ShardId], ServedShard], interval: float, on_passed: Callable[[ShardId], None]
    ) -> None:
        """`on_passed` is called for each shard of which every chunk was right."""
        self._open_shard = open_shard
        self._interval = interval
        self._on_passed = on_passed
        self._todo: list[ShardId] = []
        self._reading: tuple[ShardId, ServedShard, int] | None = None
        self._next_pass: float | None = None
        self.passes = 0
        self.found = 0

    def step(self, shards: Iterable[ShardId], now: float) -> tuple[ShardId, str] | None:
        """Verify a slice. Return the shard with the reason if it is damaged."""
        if self._next_pass is None:
            self._next_pass = now + self._interval
        if self._reading is None and not self._todo:
            if now < self._next_pass:
                return None
            self._next_pass = now + self._interval
            self._todo = list(shards)
            self.passes += 1
        if self._reading is None and self._todo:
            shard = self._todo.pop()
            try:
                self._reading = shard, self._open_shard(shard), 0
            except CorruptShardError as error:
                self.found += 1
                return shard, error.message
            except FlashError as error:
                _log.debug("%s is not there to be verified: %s", shard, error)
                return None
        return self._read_on()

    def close(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None

    def _read_on(self) -> tuple[ShardId, str] | None:
        if self._reading is None:
            return None
        shard, outgoing, chunk = self._reading
        end = min(outgoing.chunks, chunk + max(1, _SLICE_BYTES // outgoing.chunk_bytes))
        problem, failed = None, False
        try:
            for index in range(chunk, end):
                outgoing.read_chunk(index)
        except CorruptShardError as error:
            # If the shard was released and its slot written anew during the read, its name is gone, and it is not
            # damaged.
            if self._still_there(shard):
                self.found += 1
                problem = shard, error.message
            end, failed = outgoing.chunks, True
        if end < outgoing.chunks:
            self._reading = shard, outgoing, end
        else:
            self.close()
            if problem is None and not failed:
                self._on_passed(shard)
        return problem

    def _still_there(self, shard: ShardId) -> bool:
        with contextlib.suppress(FlashError):
            self._open_shard(shard).close()
            return True
        return False
