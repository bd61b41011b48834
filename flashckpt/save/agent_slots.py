"""The trainer's side of slots that the node's agent grants. The agent replicates what is sealed in them."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from flashckpt.errors import BusyError, ConfigError, FencedError, FlashError, NotFoundError
from flashckpt.protocol.placement import place
from flashckpt.protocol.verdict import Change
from flashckpt.rpc.api import Overtaken
from flashckpt.save.flush_news import FlushNews
from flashckpt.save.own_slots import lacking
from flashckpt.save.patience import LOOK_SECONDS, Patience
from flashckpt.save.replication_news import ReplicationNews
from flashckpt.types import Launch, Level, Session, age_order
from flashckpt.workers import Pending, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.agent.link import AgentLink
    from flashckpt.config import CheckpointConfig
    from flashckpt.protocol.line import Line
    from flashckpt.rpc.agent_client import AgentClient
    from flashckpt.rpc.api import GenerationProgress, WatchNews
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.own_slots import SlotMemory
    from flashckpt.store.slots import Sealed, Slot, SlotStore
    from flashckpt.types import Claimant, Generation, ShardId

log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0


class AgentSlots:
    """Implements Slots by calls to the node's agent, for one rank."""

    def __init__(
        self,
        store: SlotStore,
        link: AgentLink,
        session: Session,
        credentials: Bundle | None,
        config: CheckpointConfig,
    ) -> None:
        self._store = store
        self._link = link
        self._session = session
        self._credentials = credentials
        self._config = config
        self._begun: tuple[Launch, bytes] | None = None  # the launch that the agent was told of, and by which lease
        self.memory: SlotMemory | None = None
        self.flushes = FlushNews()
        self.replication = ReplicationNews()
        self.patience = Patience()
        self.on_overtaken: Callable[[str], None] = lambda reason: None
        self._told: Pending[None] | None = None  # the last message to the agent, sent in the background
        self._lock = threading.Lock()  # protects what follows: the link's thread brings news
        self._handles: weakref.WeakValueDictionary[Generation, SaveHandle] = weakref.WeakValueDictionary()
        self._saved: dict[int, Generation] = {}  # step → generation, of the last saves
        self._early: dict[Generation, GenerationProgress] = {}  # news that came before follow()
        # One thread, so that the agent hears of shards in the order in which they were sealed.
        self._teller = Worker("flashckpt-tell", finishes=True)
        link.on_progress = self._take_news

    @property
    def launch(self) -> Launch:
        return self._session.launch

    @property
    def session(self) -> Session:
        return self._session

    @property
    def hosted_ranks(self) -> tuple[int, ...]:
        session = self._session
        placement = place(session.members, session.replicas, session.strategy)
        return placement.held_by(self._link.lease.node_id)

    def enter(self, launch: Launch) -> None:
        self._session = replace(self._session, launch=launch)
        with self._lock:
            self._saved.clear()

    def claimants(self) -> tuple[Claimant, ...]:
        return self._link.call(
            lambda client, ticket, _: client.claimants(ticket), self._config.save_timeout, "asking who holds the job"
        )

    def begin(self) -> None:
        """Takes the node's agent over for this launch. Raises FencedError if a newer launch has it."""
        session, credentials = self._session, self._credentials
        if self._begun == (session.launch, self._link.lease.ticket):
            return

        def begin(client: AgentClient, ticket: bytes, _: float) -> bytes:
            client.begin(ticket, session, credentials)
            return ticket

        # Again for each lease: a restarted agent may not be able to read what its predecessor left.
        ticket = self._link.call(begin, self._config.save_timeout, "beginning the launch")
        self._begun = (session.launch, ticket)
        if self._link.claimed is None or self._link.claimed[0] != session.launch:
            self._link.claimed = session.launch, time.time()

    def acquire(self, shard: ShardId, size_bytes: int) -> Slot:
        deadline = time.monotonic() + self._config.save_timeout
        if self.memory is not None:
            self.memory.keep_only(size_bytes)
        self.begin()
        # A request for the next slot tells the agent that the save before failed, unless it was told of the shard.
        self._wait_until_told(deadline)
        slot_id = self._ask_for_slot(shard, size_bytes, deadline)
        self.patience.served()
        return self._store.attach(slot_id, size_bytes)

    def _ask_for_slot(self, shard: ShardId, size_bytes: int, deadline: float) -> int:
        """Ask every second until the agent grants a slot or waiting is useless. Log in the meantime which ranks lag."""
        began, step = time.monotonic(), shard.generation.step
        while True:
            may_wait = self._config.on_busy == "wait" and self.patience.is_left
            ask = functools.partial(_acquire, shard, size_bytes, "wait" if may_wait else "skip")
            try:
                return self._link.call(ask, max(0.1, deadline - time.monotonic()), "asking for a slot")
            except BusyError as error:
                now, reason = time.monotonic(), error.message
                in_vain = bool(error.fields.get("in_vain"))
                if may_wait and not in_vain and now < deadline and self.patience.look(step, now - began, reason):
                    continue
                if may_wait and not in_vain:  # the wait was for other ranks
                    self.patience.exhaust()
                raise BusyError(f"{reason}{self.patience.who(step)}", hint=error.hint, **error.fields) from error

    def sealed(self, sealed: Sealed) -> None:
        self._tell(
            lambda client, ticket, _: client.sealed(ticket, sealed.shard, sealed.tag, sealed.slot_id),
            "telling the agent of a sealed shard",
        )

    def void(self, generation: Generation) -> None:
        self._tell(lambda client, ticket, _: client.void(ticket, generation), "giving a generation up")

    def prepare(self, size_bytes: int, rank: int) -> None:
        # One slot more with a persistent tier: a generation that is being flushed keeps its slot.
        count = lacking(self._store, rank, self._config.slots + (self._session.persist is not None))
        if count == 0:
            return
        if self.memory is not None:
            self.memory.keep_only(size_bytes)
        self._link.call(
            lambda client, ticket, left: client.prepare(ticket, size_bytes, count, left),
            self._config.start_timeout,
            "preparing slots",
        )
        # The agent has allocated the memory and is charged for it. Mapping it, which takes as long as a copy, is done
        # here.
        self._store.map_free(size_bytes, None if self.memory is None else self.memory.pin)

    def ended_ranks(self) -> dict[int, str]:
        try:
            trainers = self._link.call(
                lambda client, ticket, _: client.trainers(ticket), _ASK_SECONDS, "asking which ranks live"
            )
        except FlashError as error:
            log.info("the agent did not say which ranks are alive: %s", error)
            return {}
        return {one.rank: one.how for one in trainers if not one.lives}

    def follow(self, handle: SaveHandle) -> None:
        if handle.generation is None:
            return
        with self._lock:
            self._handles[handle.generation] = handle
            self._saved[handle.step] = handle.generation
            while len(self._saved) > 16:
                del self._saved[next(iter(self._saved))]
            early = self._early.pop(handle.generation, None)
        handle.replication_problem = lambda: self.replication.problem
        if self._session.persist is not None:
            self._offer_flush(handle)
        if early is not None:
            _advance(handle, early)
            self._note_given_up(early)

    def _offer_flush(self, handle: SaveHandle) -> None:
        known, generation = weakref.ref(handle), handle.generation

        def ask(urgent: bool) -> None:
            try:
                self._ask_flush(generation, None, urgent=urgent)
            except NotFoundError as error:
                waiting = known()
                if waiting is not None:
                    waiting.stop(error.message)

        handle.ask_persist = ask
        handle.flush_problem = lambda: self.flushes.problem

    def flush(self, step: int | None) -> Generation:
        if self._session.persist is None:
            raise ConfigError("flush: expected persist_dir, found none", hint="set CheckpointConfig(persist_dir=…)")
        with self._lock:
            saved = self._saved.get(step) if step is not None else next(reversed(self._saved.values()), None)
        # Name the generation, because this rank's last save may not be committed yet.
        return self._ask_flush(saved, step)

    def _ask_flush(self, generation: Generation | None, step: int | None, *, urgent: bool = False) -> Generation:
        self._wait_until_told(time.monotonic() + self._config.save_timeout)
        return self._link.call(
            lambda client, _, __: client.flush(generation, step, urgent=urgent),
            self._config.save_timeout,
            "asking for a flush",
        )

    def put_line(self, line: Line, base: Generation | None) -> None:
        self.begin()
        self._link.call(
            lambda client, ticket, _: client.put_line(ticket, line, base), self._config.save_timeout, "keeping the line"
        )

    def close(self, timeout: float) -> None:
        if self._link.is_forked:
            return  # the threads and the connection are the parent's
        deadline = time.monotonic() + timeout
        self._teller.wait_idle(timeout / 2)
        self._teller.close()
        self._link.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            handle.stop("the Checkpointer was closed; the agent goes on replicating what is sealed")

    def _tell(self, call: Callable[..., None], doing: str) -> None:
        """Calls the agent in the background. If that fails, the agent finds the shard in its directory by itself."""

        def tell() -> None:
            try:
                self._link.call(call, self._config.save_timeout, doing)
            except FencedError as error:
                log.warning("%s: %s", doing, error)
            except Exception as error:
                log.warning("%s failed: %s; the agent finds it by itself once it runs", doing, error)

        try:
            self._told = self._teller.submit(tell)
        except RuntimeError as error:  # at the interpreter's end
            log.info("%s: %s", doing, error)

    def _wait_until_told(self, deadline: float) -> None:
        if self._told is not None:
            self._told.wait(max(0.0, deadline - time.monotonic()))

    def _take_news(self, progress: WatchNews) -> None:
        if isinstance(progress, Overtaken):
            # A load of this process begins a newer launch, too. This rank is in it before any agent is taken over.
            if self.launch.is_older_than(progress.launch):
                self.on_overtaken(progress.reason)
            return
        if isinstance(progress, Change):
            self.replication.changed(progress)
            return
        if progress.flush_problem:
            self.flushes.failed(progress.generation.step, progress.flush_problem)
            with self._lock:
                waiting = list(self._handles.values())
            for one in waiting:
                one.flush_failed(progress.flush_problem)
            return
        if progress.level is Level.PERSISTED:
            self.flushes.done(progress.generation.step)
        with self._lock:
            handle = self._handles.get(progress.generation)
            overtaken = [
                other
                for generation, other in self._handles.items()
                if other.level < progress.level >= Level.REPLICATED
                and age_order(generation) < age_order(progress.generation)
            ]
            if handle is None and progress.generation.nonce == self.launch.nonce:
                self._early[progress.generation] = progress
                while len(self._early) > 16:
                    del self._early[next(iter(self._early))]
        if handle is not None:
            _advance(handle, progress)
        self._note_given_up(progress)
        for other in overtaken:
            # No more news of it will come: it was given up, or its news was lost with an agent.
            other.stop(f"step {progress.generation.step} was {progress.level.name.lower()} before it")

    def _note_given_up(self, progress: GenerationProgress) -> None:
        """Report, once, that a sealed save of this rank will not be replicated, even if the caller keeps no handle."""
        if progress.level is not Level.NONE:
            return
        with self._lock:
            found = [step for step, generation in self._saved.items() if generation == progress.generation]
            for step in found:
                del self._saved[step]
        for step in found:
            self.replication.given_up(step, progress.reason)


def _acquire(shard: ShardId, size_bytes: int, on_busy: str, client: AgentClient, ticket: bytes, left: float) -> int:
    return client.acquire(ticket, shard, size_bytes, on_busy, min(left, LOOK_SECONDS))


def _advance(handle: SaveHandle, progress: GenerationProgress) -> None:
    if progress.level is Level.NONE:
        handle.stop(progress.reason)
    else:
        handle.advance(progress.level)
