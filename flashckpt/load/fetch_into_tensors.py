"""Fetches chunks of shards on other nodes into this rank's tensors, without a copy in this node's memory.

On a blank node, allocating memory for a shard takes longer than receiving it. So each rank fetches what it needs by
itself, verifies each chunk while it is in the cache, and copies it to its tensors. The node keeps no copy; the agents
replicate to it afterwards, as after any loss.

Failpoints: `before_landing` · `mid_landing` (before received chunks are verified) · `after_landing`.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from flashckpt import native
from flashckpt.errors import ClosedError, DeadlineError
from flashckpt.failpoints import failpoint
from flashckpt.format.caps import CRC_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.load.fetch_by_agent import retrieve_error
from flashckpt.move.fetch import Fetching, NoSourceError
from flashckpt.move.filling import runs
from flashckpt.move.gathering import HeadReader
from flashckpt.workers import Flag, Pending, begin_in_thread, on_main_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt

    from flashckpt.load.holders import Holders
    from flashckpt.move.fetch import Ask
    from flashckpt.move.stage import HeadStage, Table
    from flashckpt.rpc.api import ShardProblem
    from flashckpt.types import ChunkRange, Portion, Retrieval, ShardId

    Pieces = npt.NDArray[np.int64]

_WORKERS = 8  # the number of reads that a holder allows one node at a time
_NEWS_SECONDS = 0.1


class TensorSink:
    """The sink for one shard whose chunks go into tensors. Threads may share it (fetch.FetchTarget,
    gathering.TakesHead)."""

    def __init__(self, job: str, retrieval: Retrieval, pieces: Pieces) -> None:
        """`pieces`: rows of (offset in the data area, address, length), as native.receive_chunks takes them.

        SAFETY: the memory behind the addresses has to stay until no thread fetches any more.
        """
        self.shard = retrieval.shard
        self.digest = retrieval.digest
        self.size_bytes = retrieval.size_bytes
        self.tag = retrieval.tag
        self.head_bytes = 0
        self.chunk_bytes = 0
        self._job = job
        self._pieces = pieces
        self._starts: list[int] = pieces[:, 0].tolist()
        self._lock = threading.Lock()  # protects what follows
        self._crcs = b""
        self._here = bytearray()

    def read_head(self) -> HeadReader:
        return HeadReader(self, self._job)

    def take_head(self, table: Table, stage: HeadStage) -> None:
        with self._lock:
            if self.chunk_bytes:
                return
            self._crcs = table.chunk_crcs
            self._here = bytearray(len(table.chunk_crcs) // CRC_BYTES)
            self.head_bytes, self.chunk_bytes = table.data_offset_bytes, table.chunk_bytes

    def missing(self, ranges: Iterable[ChunkRange]) -> tuple[ChunkRange, ...]:
        with self._lock:
            return tuple(run for one in ranges for run in runs(self._here, 0, one.first, one.first + one.count))

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        if len(scratch) < 2 * self.chunk_bytes:
            return False
        start, count = self._checked(first, size_bytes)
        failpoint("mid_landing")
        bad = native.receive_chunks(
            fd,
            start,
            size_bytes,
            self.chunk_bytes,
            self._crcs_of(first, count),
            self._touched(start, size_bytes).data,
            scratch,
        )
        self._settle(first, count, bad)
        return True

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        start, count = self._checked(first, len(data))
        failpoint("mid_landing")
        pieces = _clipped(self._touched(start, len(data)), start, len(data))
        self._settle(
            first, count, native.gather_copy(data, self.chunk_bytes, self._crcs_of(first, count), pieces.data, 1)
        )

    def _checked(self, first: int, size_bytes: int) -> tuple[int, int]:
        """Returns where in the data area these chunks begin, and how many they are."""
        chunks = len(self._here)
        start, count = first * self.chunk_bytes, max(1, -(-size_bytes // max(1, self.chunk_bytes)))
        expected = min(count * self.chunk_bytes, self.size_bytes - self.head_bytes - start)
        if not 0 <= first < first + count <= chunks or size_bytes != expected:
            corrupt(f"chunks of {self.shard}", f"{expected} bytes from {first} on, of {chunks}", f"{size_bytes} bytes")
        return start, count

    def _crcs_of(self, first: int, count: int) -> bytes:
        return self._crcs[first * CRC_BYTES : (first + count) * CRC_BYTES]

    def _touched(self, start: int, size_bytes: int) -> Pieces:
        low = max(0, bisect.bisect_right(self._starts, start) - 1)
        return self._pieces[low : bisect.bisect_left(self._starts, start + size_bytes)]

    def _settle(self, first: int, count: int, bad: Sequence[int]) -> None:
        """Marks the good chunks as received. Raises CorruptShardError if some are bad: the next holder is asked for
        them."""
        with self._lock:
            self._here[first : first + count] = bytes(index not in bad for index in range(count))
        if bad:
            corrupt(f"{self.shard}: chunk {first + bad[0]}", "the crc32c of its header", "another one")


def _clipped(pieces: Pieces, start: int, size_bytes: int) -> Pieces:
    """Returns the parts of the pieces that lie in the window, with offsets from its start."""
    begin = np.maximum(pieces[:, 0], start)
    end = np.minimum(pieces[:, 0] + pieces[:, 2], start + size_bytes)
    clipped = np.stack([begin - start, pieces[:, 1] + (begin - pieces[:, 0]), np.maximum(end - begin, 0)], axis=1)
    return clipped[clipped[:, 2] > 0]


def fetch_into_tensors(
    holders: Holders,
    job: str,
    retrievals: Sequence[Retrieval],
    pieces: Mapping[int, Pieces],
    timeout: float,
    on_progress: Callable[[int, int], None],
) -> None:
    """Fills the tensors behind `pieces` (rank whose shard it is → its pieces). When it returns, no thread writes to
    them.

    Raises RetrieveError if no holder gives a chunk, and DeadlineError after `timeout` seconds; some chunks may be in
    the tensors by then. `on_progress` as in NodeMemory.retrieve.
    """
    failpoint("before_landing")
    run = _Run(holders.ask, timeout)

    def fetch() -> None:
        try:
            run.fetch([(one, TensorSink(job, one, pieces[one.shard.rank])) for one in retrievals], on_progress)
        finally:
            run.stop.set()
            holders.close()  # ends running calls, so that the workers stop receiving
            run.join()

    if on_main_thread():
        _uninterrupted(fetch, run.stop)
    else:
        fetch()
    failpoint("after_landing")


def _uninterrupted(fetch: Callable[[], None], stop: Flag) -> None:
    """Runs the fetch in a thread, because Ctrl-C inside a thread pool or gRPC would leave a lock locked.

    SAFETY: an exception here ends the fetch, but is raised only once no thread writes into the tensors any more. That
    takes as long as closing the connections. Further exceptions in the meantime are dropped.
    """
    pending = Pending(fetch)
    try:
        begin_in_thread(pending.carry_out, "flashckpt-land")
        pending.wait(None)
    except BaseException:
        while not pending.done:
            with contextlib.suppress(BaseException):
                stop.set()
                pending.cancel()
                pending.wait(None)
        raise
    pending.result()


class _Run:
    """Hands the retrievals to workers, and tracks in this thread what is fetched and what failed."""

    def __init__(self, ask: Ask, timeout: float) -> None:
        self.stop = Flag()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._lock = threading.Lock()  # protects the sum
        self._done_bytes = 0
        self._fetching = Fetching(ask, self.stop, self._deadline, self._count)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="flashckpt-land")

    def join(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def fetch(self, sinks: Sequence[tuple[Retrieval, TensorSink]], on_progress: Callable[[int, int], None]) -> None:
        pending: dict[Future[None], tuple[TensorSink, tuple[Portion, ...]]] = {}
        for retrieval, sink in sinks:
            sources = dict.fromkeys(node for portion in retrieval.portions for node in portion.sources)
            head = self._pool.submit(self._fetching.head, sink, sources)
            pending[head] = sink, retrieval.portions
        total_bytes = 0
        problems: list[ShardProblem] = []
        lacking: set[ShardId] = {sink.shard for _, sink in sinks}
        while pending and not problems:
            if self.stop.is_set():
                raise ClosedError("the fetch into tensors was cancelled")
            if time.monotonic() > self._deadline:
                raise DeadlineError(
                    f"expected parts of {len(sinks)} shards from other nodes within {self._timeout:g} s, "
                    f"found {len(lacking)} lacking: {'; '.join(map(str, list(lacking)[:4]))}",
                    hint="raise start_timeout where the network is slow",
                )
            done, _ = concurrent.futures.wait(pending, _NEWS_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                sink, portions = pending.pop(future)
                try:
                    future.result()
                except NoSourceError as error:
                    problems.append(error.problem)
                    continue
                for portion in portions:  # none if this future was a portion
                    pending[self._pool.submit(self._fetching.portion, sink, portion)] = sink, ()
                    total_bytes += sum(one.count for one in portion.ranges) * sink.chunk_bytes
            lacking = {sink.shard for sink, _ in pending.values()}
            on_progress(min(self._done_bytes, total_bytes), total_bytes)
        if problems:
            raise retrieve_error(problems)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
