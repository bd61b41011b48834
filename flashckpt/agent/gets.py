"""Serves the shards of this node to other nodes.

Failpoints: `before_get` (asked, not yet answered) · `mid_get` (before each chunk, or each frame of a lane) ·
`after_get` (the last one is read).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, FlashError, InternalError
from flashckpt.failpoints import failpoint
from flashckpt.protocol.events import DeclineGet, GetAsked, Rotten, Serve
from flashckpt.protocol.wire import GetInfo, GetRefused

if TYPE_CHECKING:
    from flashckpt.agent.shell import ServedShard, Shell
    from flashckpt.protocol.wire import GetOpen
    from flashckpt.types import ChunkRange, Held, ShardId

_log = logging.getLogger(__name__)


def open_get(shell: Shell, peer: str, get: GetOpen) -> Reading | GetRefused:
    """Open the shard, if the core grants the request."""
    failpoint("before_get")
    for effect in shell.feed(GetAsked(get)):
        if isinstance(effect, DeclineGet):
            return effect.refused
        if isinstance(effect, Serve):
            return _open(shell, peer, get, effect.held)
    raise InternalError(f"no answer to a get of {get.shard}")


def _open(shell: Shell, peer: str, get: GetOpen, held: Held) -> Reading | GetRefused:
    try:
        opened = shell.open_shard(held.shard)
    except CorruptShardError as error:
        shell.feed(Rotten(held.shard, error.message))
        return GetRefused(f"the copy here is bad: {error.message}", retry=False)
    except FlashError as error:  # released or set aside at this moment
        return GetRefused(error.message, retry=False)
    except OSError as error:  # for example out of descriptors
        return GetRefused(f"{held.shard} can't be opened: {error}", retry=True)
    if opened.digest != get.digest:
        opened.close()
        return GetRefused("another content lies here under that name", retry=False)
    last = get.ranges[-1].first + get.ranges[-1].count - 1 if get.ranges else -1
    return Reading(shell, peer, opened, held.tag, last)


class Reading:
    """One shard, or parts of it, that another node reads (move.seam's Giver). Reading verifies."""

    def __init__(self, shell: Shell, peer: str, opened: ServedShard, tag: int, last_chunk: int) -> None:
        self._shell = shell
        self._peer = peer
        self._opened = opened
        self._last_chunk = last_chunk
        self.info = GetInfo(opened.size_bytes, opened.head_bytes, opened.chunk_bytes, tag)

    @property
    def head_bytes(self) -> int:
        return self._opened.head_bytes

    @property
    def chunk_bytes(self) -> int:
        return self._opened.chunk_bytes

    @property
    def chunks(self) -> int:
        return self._opened.chunks

    @property
    def shard(self) -> ShardId:
        return self._opened.shard

    def read_head(self, offset: int, limit: int) -> bytes:
        return self._opened.read_head(offset, limit)

    def read_chunk(self, index: int) -> bytes:
        failpoint("mid_get")
        data = self._opened.read_chunk(index)
        if index == self._last_chunk:
            failpoint("after_get")
        return data

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        failpoint("mid_get")
        view = self._opened.view_of(chunks)
        if chunks.first <= self._last_chunk < chunks.first + chunks.count:
            failpoint("after_get")
        return view

    def rotten(self, error: Exception) -> None:
        _log.warning("%s is damaged, found while node %r read it: %s", self.shard, self._peer, error)
        # If the shard was released meanwhile, the core does not know it any more and ignores the event.
        self._shell.feed(Rotten(self.shard, getattr(error, "message", str(error))))

    def close(self) -> None:
        self._opened.close()
