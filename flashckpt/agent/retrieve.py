"""Fetches from other nodes what this node lacks for a load.

Each shard begins with its head, from whichever of its holders gives it; then its portions come in parallel, each from
its first source that can give it, and the rest of it from the next one where that fails. What is fetched in part goes
when the caller ends the call, for whatever reason; what is whole stays.

Failpoints: `before_retrieve` · `mid_retrieve`, `before_fetched_seal` (transport/gathering.py) · `after_retrieve` (all
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

from flashckpt.agent.messages import Acknowledge, Fetched
from flashckpt.agent.sources import Sources
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
from flashckpt.format.refuse import corrupt
from flashckpt.rpc.api import Retrieved, RetrieveFailed, RetrieveProgress, ShardProblem
from flashckpt.transport.gathering import Gathering
from flashckpt.types import ChunkRange, Held
from flashckpt.wire import GetOpen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from flashckpt.agent.shell import Shell
    from flashckpt.rpc.api import RetrieveNews, Taker
    from flashckpt.transport.gathering import HeadReader
    from flashckpt.types import Portion, Retrieval, ShardId
    from flashckpt.wire import GetInfo, GetRefused

_log = logging.getLogger(__name__)

_WORKERS = 8  # of one retrieval; what other nodes let one node read at a time
_MAX_RUNNING = 4  # one load of a node, and what is left of those before it
_NEWS_SECONDS = 0.1
_MAX_GET_RANGES = 1024  # of one request; a portion with more asks again


class _CannotBeHadError(Exception):
    """No source of a part of a shard is left."""

    def __init__(self, shard: ShardId, reasons: tuple[tuple[str, str], ...]) -> None:
        super().__init__(f"{shard}: no source is left")
        self.problem = ShardProblem(shard, reasons)


class Retrieves:
    """All that run in one agent. Any thread."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._lock = threading.Lock()  # protects what follows
        self._running: set[_Run] = set()
        self._closed = False

    def run(self, retrievals: Sequence[Retrieval], timeout: float) -> Iterator[RetrieveNews | None]:
        """As AgentApi.retrieve."""
        run = _Run(self._shell, retrievals, timeout)
        with self._lock:
            if self._closed:
                raise ClosedError("the agent is about to end")
            if len(self._running) >= _MAX_RUNNING:
                raise BusyError(f"expected at most {_MAX_RUNNING} loads of a node at a time, found one more")
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
    """One that is under way. Only the run's own thread changes it."""

    retrieval: Retrieval
    gathering: Gathering
    portions: tuple[Portion, ...]
    left: int = field(default=0)  # portions that are not here yet


class _Run:
    """One call. Its own thread keeps the books; workers fetch."""

    def __init__(self, shell: Shell, retrievals: Sequence[Retrieval], timeout: float) -> None:
        self.stop = threading.Event()
        self._shell = shell
        self._retrievals = retrievals
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="fetch")
        self._pending: dict[Future[None], Callable[[], None]] = {}
        self._places: dict[ShardId, str] = {}
        self._lock = threading.Lock()  # protects what follows
        self._gatherings: list[Gathering] = []
        self._done_bytes = self._total_bytes = 0

    def news(self) -> Iterator[RetrieveNews | None]:
        # At once: from here on the caller knows that its request was taken.
        yield self._progress()
        failpoint("before_retrieve")
        if self._shell.standing_of_session()[0] is None:
            raise FencedError(f"{self._shell.options.node_id} works for no launch, or a newer one has begun elsewhere")
        # A copy that a trainer found bad and set aside is asked for because of that: it must not count as held.
        self._shell.look_around()
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
                self.end()  # before it is told, so that nothing is left when the caller hears of it
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
        # IMPORTANT: the files of what was fetched in part live exactly as long as this call.
        while not self.stop.wait(_NEWS_SECONDS):
            yield None

    def end(self) -> None:
        """Whatever happened: nothing is left but whole shards. Workers notice with their next chunk."""
        self.stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            gatherings, self._gatherings = self._gatherings, []
        for one in gatherings:
            with contextlib.suppress(FlashError, OSError):
                one.abandon()

    # --- the books ------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        self._pending[self._pool.submit(work)] = then

    def _settle(self, done: set[Future[None]]) -> list[ShardProblem]:
        """Goes on where something has ended well; the problems of what has not."""
        problems = []
        for future in done:
            then = self._pending.pop(future)
            try:
                future.result()
                then()
            except _CannotBeHadError as error:
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
            self._submit(lambda portion=portion: self._fetch(shard.gathering, portion), one_less)  # type: ignore[misc]

    def _check_time(self) -> None:
        if self.stop.is_set():
            raise ClosedError("the agent is about to end")
        if time.monotonic() < self._deadline:
            return
        lacking = [str(one.shard) for one in self._retrievals if one.shard not in self._places]
        raise DeadlineError(
            f"expected {len(self._retrievals)} shards within {self._timeout:g} s, found {len(lacking)} lacking: "
            f"{'; '.join(lacking[:4])}",
            hint="raise start_timeout where the network is slow; the agent's log says who was asked",
        )

    def _progress(self) -> RetrieveProgress:
        with self._lock:
            return RetrieveProgress(self._done_bytes, self._total_bytes)

    # --- workers --------------------------------------------------------------------------------------------

    def _begin(self, retrieval: Retrieval) -> _Shard:
        """Room, and the head."""
        here = self._shell.held(retrieval.shard)
        if here is not None and here.digest != retrieval.digest:
            reason = f"another content lies here under that name: {here.digest.hex()}"
            raise _CannotBeHadError(retrieval.shard, (("", reason),))
        gathering = Gathering(
            self._shell.store,
            self._shell.options.job,
            retrieval,
            max_shard_bytes=self._shell.options.budget_bytes,
        )
        with self._lock:
            self._gatherings.append(gathering)
        if self.stop.is_set():  # end() may have come before
            gathering.abandon()
        self._fetch_head(gathering, retrieval)
        portions = split(retrieval, gathering.chunks)
        try:
            wanted_bytes = gathering.want(one for portion in portions for one in portion.ranges)
        except NoSpaceError:
            raise
        except FlashError as error:  # a plan that does not fit the shard
            raise _CannotBeHadError(retrieval.shard, (("", error.message),)) from error
        with self._lock:
            self._total_bytes += gathering.head_bytes + wanted_bytes
            self._done_bytes += gathering.head_bytes
        return _Shard(retrieval, gathering, portions)

    def _fetch_head(self, gathering: Gathering, retrieval: Retrieval) -> None:
        sources = self._sources(node for portion in retrieval.portions for node in portion.sources)
        while not gathering.chunk_bytes:
            node_id = self._next(sources, gathering)
            reader = gathering.read_head()
            with contextlib.closing(reader):
                self._get(sources, node_id, gathering, (), _HeadTaker(reader, self.stop))

    def _fetch(self, gathering: Gathering, portion: Portion) -> None:
        sources = self._sources(iter(portion.sources))
        taker = _ChunkTaker(gathering, self.stop, self._count)
        while missing := gathering.missing(portion.ranges):
            node_id = self._next(sources, gathering)
            self._get(sources, node_id, gathering, missing[:_MAX_GET_RANGES], taker)

    def _finish(self, shard: _Shard) -> None:
        retrieval = shard.retrieval
        try:
            name = shard.gathering.finish()
        except ConflictError as error:
            raise _CannotBeHadError(retrieval.shard, (("", error.message),)) from error
        if not name:
            self._shell.note_sealed(retrieval.shard)
            held = Held(retrieval.shard, retrieval.digest, retrieval.size_bytes, retrieval.tag)
            if not any(isinstance(effect, Acknowledge) for effect in self._shell.feed(Fetched(held))):
                raise _CannotBeHadError(retrieval.shard, (("", "a newer fence has killed it meanwhile"),))
        self._places[retrieval.shard] = name

    def _sources(self, node_ids: Iterator[str]) -> Sources:
        return Sources(dict.fromkeys(node_ids))

    def _next(self, sources: Sources, gathering: Gathering) -> str:
        """Whom to ask now; waits where all that are left were asked before."""
        node_id, pause = sources.next()
        if node_id is None:
            raise _CannotBeHadError(gathering.shard, sources.reasons)
        self.stop.wait(min(pause, max(0.0, self._deadline - time.monotonic())))
        _raise_if_set(self.stop)
        return node_id

    def _get(
        self,
        sources: Sources,
        node_id: str,
        gathering: Gathering,
        ranges: tuple[ChunkRange, ...],
        taker: Taker,
    ) -> None:
        try:
            refused = self._ask(node_id, gathering, ranges, taker)
        except (NoSpaceError, ClosedError):
            raise  # ours
        except FlashError as error:
            _log.info("%s from %s: %s", gathering.shard, node_id, error.message)
            sources.failed(node_id, error.message, passing=isinstance(error, PeerError))
        else:
            if refused is not None:
                _log.info("%s from %s: refused: %s", gathering.shard, node_id, refused.reason)
                sources.refused(node_id, refused.reason, retry=refused.retry)

    def _ask(
        self, node_id: str, gathering: Gathering, ranges: tuple[ChunkRange, ...], taker: Taker
    ) -> GetRefused | None:
        options = self._shell.options
        launch, fence = self._shell.standing_of_session()
        if launch is None:
            raise ClosedError("a newer launch has begun elsewhere")
        try:
            client = self._shell.peers.client(node_id)
        except ClosedError as error:  # no credentials
            raise PeerError(error.message, peer=node_id) from error
        get = GetOpen(options.node_id, launch, fence, gathering.shard, gathering.digest, not ranges, ranges)
        return client.get(get, taker, max(0.1, self._deadline - time.monotonic()))

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes


def split(retrieval: Retrieval, chunks: int) -> tuple[Portion, ...]:
    """The portions of a retrieval, now that the number of chunks is known. Pure.

    Of a whole shard that is all of them, whatever the plan says: it may have been made without the head. What is
    beyond the last chunk goes, and what no portion has goes to the last one.
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


def _raise_if_set(stop: threading.Event) -> None:
    if stop.is_set():
        raise ClosedError("nobody waits for it any more")


class _HeadTaker:
    def __init__(self, reader: HeadReader, stop: threading.Event) -> None:
        self._reader = reader
        self._stop = stop

    def opened(self, info: GetInfo) -> None:
        self._reader.expect(info.size_bytes, info.head_bytes, info.tag)

    def put_head(self, offset: int, data: bytes | memoryview) -> None:
        _raise_if_set(self._stop)
        self._reader.put(offset, data)

    def room_for(self, first: int, size_bytes: int) -> None:
        raise PeerError(f"expected the head alone, found chunk {first}")

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        raise PeerError(f"expected the head alone, found chunk {first}")


class _ChunkTaker:
    def __init__(self, gathering: Gathering, stop: threading.Event, count: Callable[[int], None]) -> None:
        self._gathering = gathering
        self._stop = stop
        self._count = count

    def opened(self, info: GetInfo) -> None:
        expected = (self._gathering.size_bytes, self._gathering.head_bytes, self._gathering.chunk_bytes)
        found = (info.size_bytes, info.head_bytes, info.chunk_bytes)
        if found != expected:
            corrupt(str(self._gathering.shard), f"sizes of shard, head and chunks {expected}", f"{found}")

    def put_head(self, offset: int, data: bytes | memoryview) -> None:
        raise PeerError(f"expected chunks alone, found a piece of the head at {offset}")

    def room_for(self, first: int, size_bytes: int) -> AbstractContextManager[memoryview] | None:
        _raise_if_set(self._stop)
        place = self._gathering.room_for(first, size_bytes)
        return None if place is None else self._counted(place, size_bytes)

    @contextlib.contextmanager
    def _counted(self, place: AbstractContextManager[memoryview], size_bytes: int) -> Iterator[memoryview]:
        with place as room:
            yield room
        self._count(size_bytes)

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        _raise_if_set(self._stop)
        self._gathering.put_chunks(first, data)
        self._count(len(data))
