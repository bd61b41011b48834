"""Fetches from other nodes what this node lacks for a load.

Each shard begins with its head, from the first holder that provides it. Then its portions are fetched in parallel, each
from its first source that can provide it, and the rest of it from the next one if that fails. When the caller ends the
call, for whatever reason, parts of shards are removed; complete ones stay.

Failpoints: `before_retrieve` · `mid_retrieve`, `before_fetched_seal` (move/gathering.py) · `after_retrieve` (everything
is here, the trainer does not know yet).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flashckpt.errors import (
    BusyError,
    ClosedError,
    ConflictError,
    DeadlineError,
    FencedError,
    FlashError,
    NoSpaceError,
    PeerError,
)
from flashckpt.failpoints import failpoint
from flashckpt.move.fetch import Fetching, NoSourceError
from flashckpt.move.gathering import Gathering
from flashckpt.protocol.events import Acknowledge, Fetched
from flashckpt.protocol.wire import GetOpen
from flashckpt.rpc.api import Retrieved, RetrieveFailed, RetrieveProgress
from flashckpt.types import ChunkRange, Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from flashckpt.agent.shell import Shell
    from flashckpt.move.seam import Taker
    from flashckpt.protocol.wire import GetRefused
    from flashckpt.rpc.api import RetrieveNews, ShardProblem
    from flashckpt.types import Portion, Retrieval, ShardId

_log = logging.getLogger(__name__)

_WORKERS = 8  # per retrieval: the number of reads that other nodes allow one node at a time
_MAX_RUNNING = 4  # one load of a node, and what is left of earlier ones
_NEWS_SECONDS = 0.1


class Retrieves:
    """All retrievals that run in one agent. Any thread may call it."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._lock = threading.Lock()  # protects what follows
        self._running: set[_Run] = set()
        self._closed = False

    def run(self, retrievals: Sequence[Retrieval], timeout: float) -> Iterator[RetrieveNews | None]:
        """Implements AgentApi.retrieve."""
        run = _Run(self._shell, retrievals, timeout)
        with self._lock:
            if self._closed:
                raise ClosedError("the agent is about to end")
            if len(self._running) >= _MAX_RUNNING:
                raise BusyError(f"expected at most {_MAX_RUNNING} loads per node at a time, found one more")
            self._running.add(run)
        try:
            yield from run.news()
        finally:
            run.end()
            with self._lock:
                self._running.discard(run)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for run in running:
            run.stop.set()


@dataclass(eq=False, slots=True)
class _Shard:
    """One shard that is being retrieved. Only the run's own thread changes it."""

    retrieval: Retrieval
    gathering: Gathering
    portions: tuple[Portion, ...]
    left: int = field(default=0)  # number of portions that are not here yet


class _Run:
    """One retrieve call. Its own thread keeps the state; workers fetch."""

    def __init__(self, shell: Shell, retrievals: Sequence[Retrieval], timeout: float) -> None:
        self.stop = threading.Event()
        self._shell = shell
        self._retrievals = retrievals
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="fetch")
        self._fetching = Fetching(self._ask, self.stop, self._deadline, self._count)
        self._pending: dict[Future[None], Callable[[], None]] = {}
        self._places: dict[ShardId, str] = {}
        self._lock = threading.Lock()  # protects what follows
        self._gatherings: list[Gathering] = []
        self._done_bytes = self._total_bytes = 0

    def news(self) -> Iterator[RetrieveNews | None]:
        # At once: it shows the caller that its request was accepted.
        yield self._progress()
        failpoint("before_retrieve")
        if self._shell.session_and_line()[0] is None:
            raise FencedError(f"{self._shell.options.node_id} works for no launch, or a newer one has begun elsewhere")
        # A copy that a trainer found damaged and set aside is asked for because of that: it must not count as held.
        self._shell.rescan()
        for one in self._retrievals:
            self._start(one)
        told_at = 0.0
        while self._pending:
            self._check_time()
            done, _ = concurrent.futures.wait(
                self._pending, _NEWS_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
            )
            problems = self._settle(done)
            if problems:
                self.end()  # before the caller is told, so that nothing is left when it hears of it
                yield RetrieveFailed(tuple(problems))
                return
            if time.monotonic() - told_at >= _NEWS_SECONDS:
                told_at = time.monotonic()
                yield self._progress()
        last = self._progress()
        seconds = time.monotonic() - (self._deadline - self._timeout)
        _log.info("fetched %d bytes of %d shards in %.3f s", last.done_bytes, len(self._retrievals), seconds)
        failpoint("after_retrieve")
        yield last
        yield Retrieved(tuple((one.shard, self._places[one.shard]) for one in self._retrievals))
        # IMPORTANT: the files of shards that were fetched in part live exactly as long as this call.
        while not self.stop.wait(_NEWS_SECONDS):
            yield None

    def end(self) -> None:
        """Remove all shards that are not complete, whatever happened. Workers notice with their next chunk."""
        self.stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            gatherings, self._gatherings = self._gatherings, []
        for one in gatherings:
            with contextlib.suppress(FlashError, OSError):
                one.abandon()

    # --- the state ------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        self._pending[self._pool.submit(work)] = then

    def _settle(self, done: set[Future[None]]) -> list[ShardProblem]:
        """Continue with what has succeeded. Return the problems of what has not."""
        problems = []
        for future in done:
            then = self._pending.pop(future)
            try:
                future.result()
                then()
            except NoSourceError as error:
                problems.append(error.problem)
        return problems

    def _start(self, retrieval: Retrieval) -> None:
        here = self._shell.held(retrieval.shard)
        if here is not None and here.digest == retrieval.digest:
            self._places[retrieval.shard] = ""
            return
        begun: list[_Shard] = []
        self._submit(lambda: begun.append(self._begin(retrieval)), lambda: self._fetch_portions(begun[0]))

    def _fetch_portions(self, shard: _Shard) -> None:
        shard.left = len(shard.portions)

        def one_less() -> None:
            shard.left -= 1
            if not shard.left:
                self._submit(lambda: self._finish(shard), lambda: None)

        for portion in shard.portions:
            self._submit(lambda portion=portion: self._fetching.portion(shard.gathering, portion), one_less)  # type: ignore[misc]

    def _check_time(self) -> None:
        if self.stop.is_set():
            raise ClosedError("the agent is about to end")
        if time.monotonic() < self._deadline:
            return
        lacking = [str(one.shard) for one in self._retrievals if one.shard not in self._places]
        raise DeadlineError(
            f"expected {len(self._retrievals)} shards within {self._timeout:g} s, found {len(lacking)} lacking: "
            f"{'; '.join(lacking[:4])}",
            hint="raise start_timeout if the network is slow; the agent's log says which nodes were asked",
        )

    def _progress(self) -> RetrieveProgress:
        with self._lock:
            return RetrieveProgress(self._done_bytes, self._total_bytes)

    # --- workers --------------------------------------------------------------------------------------------

    def _begin(self, retrieval: Retrieval) -> _Shard:
        """Make room for a shard and fetch its head."""
        here = self._shell.held(retrieval.shard)
        if here is not None and here.digest != retrieval.digest:
            reason = f"another content lies here under that name: {here.digest.hex()}"
            raise NoSourceError(retrieval.shard, (("", reason),))
        gathering = Gathering(
            self._shell.store,
            self._shell.options.job,
            retrieval,
            max_shard_bytes=self._shell.options.budget_bytes,
        )
        with self._lock:
            self._gatherings.append(gathering)
        if self.stop.is_set():  # end() may have been called before
            gathering.abandon()
        self._fetching.head(gathering, (node for portion in retrieval.portions for node in portion.sources))
        portions = split(retrieval, gathering.chunks)
        try:
            wanted_bytes = gathering.want(one for portion in portions for one in portion.ranges)
        except NoSpaceError:
            raise
        except FlashError as error:  # the plan does not fit the shard
            raise NoSourceError(retrieval.shard, (("", error.message),)) from error
        with self._lock:
            self._total_bytes += gathering.head_bytes + wanted_bytes
            self._done_bytes += gathering.head_bytes
        return _Shard(retrieval, gathering, portions)

    def _finish(self, shard: _Shard) -> None:
        retrieval = shard.retrieval
        try:
            name = shard.gathering.finish()
        except ConflictError as error:
            raise NoSourceError(retrieval.shard, (("", error.message),)) from error
        if not name:
            self._shell.note_sealed(retrieval.shard)
            held = Held(retrieval.shard, retrieval.digest, retrieval.size_bytes, retrieval.tag)
            if not any(isinstance(effect, Acknowledge) for effect in self._shell.feed(Fetched(held))):
                raise NoSourceError(retrieval.shard, (("", "a newer line has abandoned it meanwhile"),))
        self._places[retrieval.shard] = name

    def _ask(
        self,
        node_id: str,
        shard: ShardId,
        digest: bytes,
        ranges: tuple[ChunkRange, ...],
        taker: Taker,
        timeout: float,
    ) -> GetRefused | None:
        launch, line = self._shell.session_and_line()
        if launch is None:
            raise ClosedError("a newer launch has begun elsewhere")
        try:
            client = self._shell.peers.client(node_id)
        except ClosedError as error:  # there are no credentials
            raise PeerError(error.message, peer=node_id) from error
        get = GetOpen(self._shell.options.node_id, launch, line, shard, digest, not ranges, ranges)
        return client.get(get, taker, timeout)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes


def split(retrieval: Retrieval, chunks: int) -> tuple[Portion, ...]:
    """Return the portions of a retrieval, now that the number of chunks is known. Pure.

    For a complete shard they cover all chunks, whatever the plan says: it may have been made without the head. Chunks
    beyond the last one are dropped, and chunks in no portion are added to the last one.
    """
    if not retrieval.whole:
        return retrieval.portions
    portions = []
    covered = bytearray(chunks)
    for portion in retrieval.portions:
        kept = []
        for one in portion.ranges:
            count = min(one.count, chunks - one.first)
            if count > 0:
                kept.append(ChunkRange(one.first, count))
                covered[one.first : one.first + count] = b"\1" * count
        portions.append(replace(portion, ranges=tuple(kept)))
    rest, at = list(portions[-1].ranges), 0
    while (first := covered.find(0, at)) >= 0:
        end = covered.find(1, first)
        at = chunks if end < 0 else end
        rest.append(ChunkRange(first, at - first))
    portions[-1] = replace(portions[-1], ranges=tuple(sorted(rest, key=lambda one: one.first)))
    return tuple(portions)
