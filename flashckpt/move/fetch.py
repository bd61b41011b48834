"""Fetches the head and the chunks of a shard from its holders, one after the other until one provides them.

Used by both sides that keep the bytes: the agent, in its node's memory (agent/retrieve.py), and a rank, in its tensors
(load/fetch_into_tensors.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import ClosedError, FlashError, NoSpaceError, PeerError
from flashckpt.format.refuse import corrupt
from flashckpt.move.gathering import TakesHead
from flashckpt.rpc.api import ShardProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashckpt.move.gathering import HeadReader
    from flashckpt.move.seam import Taker
    from flashckpt.protocol.wire import GetInfo, GetRefused
    from flashckpt.types import ChunkRange, Portion, ShardId

    Ask = Callable[[str, ShardId, bytes, tuple[ChunkRange, ...], Taker, float], GetRefused | None]

_log = logging.getLogger(__name__)


# Which holder to ask next for a part of a shard. Pure.

# A holder whose connection broke is asked once more, after all others: its agent may be back within a second.
_TRIES_BROKEN = 2
_TRIES_BUSY = 6  # of a holder that was busy
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0


class Sources:
    """The holders of one part, in the order to ask them. One that fails moves to the end, or is dropped."""

    def __init__(self, node_ids: Iterable[str]) -> None:
        self._left = list(node_ids)
        self._failures: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """The last failure of each holder that failed."""
        return tuple(self._reasons.items())

    def next(self) -> tuple[str | None, float]:
        """Return the holder to ask, and the seconds to wait first. None: no holder is left."""
        if not self._left:
            return None, 0.0
        failures = self._failures.get(self._left[0], 0)
        pause = min(_FIRST_PAUSE * 2 ** (failures - 1), _LONGEST_PAUSE) if failures else 0.0
        return self._left[0], pause

    def failed(self, node_id: str, reason: str, *, passing: bool) -> None:
        """Note a failed request. `passing`: the connection broke; otherwise the bytes were wrong."""
        self._drop(node_id, reason, _TRIES_BROKEN if passing else 1)

    def refused(self, node_id: str, reason: str, *, retry: bool) -> None:
        self._drop(node_id, reason, _TRIES_BUSY if retry else 1)

    def _drop(self, node_id: str, reason: str, tries: int) -> None:
        self._reasons[node_id] = reason
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        self._left.remove(node_id)
        if self._failures[node_id] < tries:
            self._left.append(node_id)


_MAX_GET_RANGES = 1024  # per request; a portion with more asks again


class NoSourceError(Exception):
    """No source of a part of a shard is left."""

    def __init__(self, shard: ShardId, reasons: tuple[tuple[str, str], ...]) -> None:
        super().__init__(f"{shard}: no source is left")
        self.problem = ShardProblem(shard, reasons)


class FetchTarget(TakesHead, Protocol):
    """A shard, or parts of it, that is being fetched. Any thread may call it. It refuses what does not match its
    checksum."""

    @property
    def head_bytes(self) -> int: ...

    @property
    def chunk_bytes(self) -> int:
        """0 until the head is known."""

    def read_head(self) -> HeadReader:
        """Return a reader for one attempt to fetch the head from one holder."""

    def missing(self, ranges: Iterable[ChunkRange]) -> tuple[ChunkRange, ...]:
        """Return which of these chunks have not arrived yet."""

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool: ...

    def put_chunks(self, first: int, data: bytes | memoryview) -> None: ...


class Stop(Protocol):
    """The part of threading.Event that is used here."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Fetching:
    """Makes all requests of one retrieval. Any thread may call it."""

    def __init__(self, ask: Ask, stop: Stop, deadline: float, count: Callable[[int], None]) -> None:
        """`stop`: set when nobody waits for the retrieval any more. `count` is called with the bytes of chunks that
        have arrived."""
        self._ask = ask
        self._stop = stop
        self._deadline = deadline
        self._count = count

    def head(self, target: FetchTarget, node_ids: Iterable[str]) -> None:
        """Fetch the head. Raise NoSourceError if none of these nodes provides it."""
        sources = Sources(dict.fromkeys(node_ids))
        while not target.chunk_bytes:
            node_id = self._next(sources, target)
            with contextlib.closing(target.read_head()) as reader:
                self._get(sources, node_id, target, (), _HeadTaker(reader, self._stop))

    def portion(self, target: FetchTarget, portion: Portion) -> None:
        """Fetch the portion's chunks, from the next source if one fails. Raise NoSourceError after the last one."""
        sources = Sources(dict.fromkeys(portion.sources))
        taker = _ChunkTaker(target, self._stop, self._count)
        while missing := target.missing(portion.ranges):
            node_id = self._next(sources, target)
            self._get(sources, node_id, target, missing[:_MAX_GET_RANGES], taker)

    def _next(self, sources: Sources, target: FetchTarget) -> str:
        """Return the holder to ask now. Wait first if it has failed before."""
        node_id, pause = sources.next()
        if node_id is None:
            raise NoSourceError(target.shard, sources.reasons)
        self._stop.wait(min(pause, max(0.0, self._deadline - time.monotonic())))
        _raise_if_set(self._stop)
        return node_id

    def _get(
        self, sources: Sources, node_id: str, target: FetchTarget, ranges: tuple[ChunkRange, ...], taker: Taker
    ) -> None:
        left = max(0.1, self._deadline - time.monotonic())
        try:
            refused = self._ask(node_id, target.shard, target.digest, ranges, taker, left)
        except (NoSpaceError, ClosedError):
            raise  # they are about this node, not about the holder
        except FlashError as error:
            _log.info("%s from %s: %s", target.shard, node_id, error.message)
            sources.failed(node_id, error.message, passing=isinstance(error, PeerError))
        else:
            if refused is not None:
                _log.info("%s from %s: refused: %s", target.shard, node_id, refused.reason)
                sources.refused(node_id, refused.reason, retry=refused.retry)


def _raise_if_set(stop: Stop) -> None:
    if stop.is_set():
        raise ClosedError("the retrieval was stopped: nobody waits for it any more")


class _HeadTaker:
    def __init__(self, reader: HeadReader, stop: Stop) -> None:
        self._reader = reader
        self._stop = stop

    def opened(self, info: GetInfo) -> None:
        self._reader.expect(info.size_bytes, info.head_bytes, info.tag)

    def put_head(self, offset: int, data: bytes | memoryview) -> None:
        _raise_if_set(self._stop)
        self._reader.put(offset, data)

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        raise PeerError(f"expected the head alone, found chunk {first}")

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        raise PeerError(f"expected the head alone, found chunk {first}")


class _ChunkTaker:
    def __init__(self, target: FetchTarget, stop: Stop, count: Callable[[int], None]) -> None:
        self._target = target
        self._stop = stop
        self._count = count

    def opened(self, info: GetInfo) -> None:
        expected = (self._target.size_bytes, self._target.head_bytes, self._target.chunk_bytes)
        found = (info.size_bytes, info.head_bytes, info.chunk_bytes)
        if found != expected:
            corrupt(str(self._target.shard), f"sizes of shard, head and chunks {expected}", f"{found}")

    def put_head(self, offset: int, data: bytes | memoryview) -> None:
        raise PeerError(f"expected chunks alone, found a piece of the head at {offset}")

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        _raise_if_set(self._stop)
        taken = self._target.receive(first, size_bytes, fd, scratch)
        if taken:
            self._count(size_bytes)
        return taken

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        _raise_if_set(self._stop)
        self._target.put_chunks(first, data)
        self._count(len(data))
