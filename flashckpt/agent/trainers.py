"""Serves the trainers of this node: leases, slots, and news of their generations."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import queue
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashckpt.errors import BusyError, ClosedError, DeadlineError, DeniedError, FencedError, IncompatibleError
from flashckpt.failpoints import failpoint
from flashckpt.protocol.current_launch import overtaken_by
from flashckpt.protocol.events import (
    GaveUp,
    Grant,
    LeaseEnded,
    LinePut,
    RefuseBusy,
    RefuseFenced,
    ShardSealed,
    SlotWanted,
    WantDropped,
)
from flashckpt.rpc.api import VERSION, Lease, Overtaken, TrainerState
from flashckpt.store.owner import LivenessCheck, Owner, is_dead, is_ending
from flashckpt.types import Claimant, Launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashckpt.agent.shell import Shell
    from flashckpt.protocol.events import Effect
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.node_inventory import NodeInventory
    from flashckpt.protocol.verdict import Change
    from flashckpt.rpc.api import GenerationProgress, RetrieveNews, WatchNews
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.types import Generation, Retrieval, Session, ShardId

_log = logging.getLogger(__name__)

_TICKET_BYTES = 16
_MAX_LEASES = 1024
_MAX_NEWS = 1024  # that wait for a trainer which does not read; beyond, the oldest is dropped
_QUIET_SECONDS = 1.0
_RETURN_SECONDS = 2.5  # for trainers to find a new agent; less than a launch waits (start/claimants.py)
_GRACE_SECONDS = 1.0  # beyond a request's deadline, for the core's answer


@dataclass(slots=True)
class _Trainer:
    """A live process with a lease, and its present request and shard."""

    lease_id: int
    ticket: bytes
    owner: Owner
    liveness: LivenessCheck
    rank: int
    launch: Launch | None = None  # the launch that it has begun
    claimed_at: float = 0.0  # when, in seconds since 1970
    process: str = ""  # the trainer's process, if this process acts for another one
    watches: int = 0  # number of watches that it has open: the only sign of life if its pid can't be looked up
    news: queue.Queue[WatchNews | None] | None = None
    told_overtaken: bool = False  # in this watch
    request_id: int = 0  # of its newest request for a slot; older ones were given up by the caller
    slot_id: int | None = None  # what it was granted last
    shard: ShardId | None = None  # that the slot was granted for; None once it is sealed or given up


@dataclass(slots=True)
class _Request:
    """A request for a slot, with its answer."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Effect | None = None


class TrainerCalls:
    """Implements the calls of trainers (AgentApi). Any thread may call it."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._lock = threading.Lock()  # protects the two dictionaries; not held during a call to the core
        self._leases: dict[int, _Trainer] = {}
        self._requests: dict[int, _Request] = {}
        self._ended: dict[int, str] = {}  # ranks without a lease: how the process of the last one ended
        self._numbers = itertools.count(1)
        self._closed = False
        self._started_at = time.monotonic()
        self.idle_since: float | None = time.monotonic()  # None while there is a lease

    # --- leases ---------------------------------------------------------------------------------------------

    def hello(
        self,
        owner: Owner,
        rank: int,
        version: int,
        job: str,
        launch: Launch | None = None,
        claimed_at: float = 0.0,
        acts_for: str = "",
    ) -> Lease:
        if version != VERSION:
            raise IncompatibleError(
                f"agent {os.getpid()}: expected protocol version {VERSION}, found {version}",
                hint="stop this agent (`flashckpt agent stop`): the trainer then starts one of its own version",
            )
        if job != self._shell.options.job:
            raise IncompatibleError(f"agent of job {self._shell.options.job!r}: found a trainer of job {job!r}")
        self._shell.check_epochs(launch, None)
        if owner.pid_namespace != Owner.current().pid_namespace:
            _log.warning(
                "rank %d is in another pid namespace: its end can't be noticed, and its slots stay occupied until a "
                "reboot; run agent and trainers in one pid namespace (shareProcessNamespace, --pid)",
                rank,
            )
        with self._lock:
            if self._closed:
                raise ClosedError(f"agent {os.getpid()} is stopping", hint="try again in a moment")
            if len(self._leases) >= _MAX_LEASES:
                raise BusyError(f"agent {os.getpid()}: expected at most {_MAX_LEASES} trainers")
            ticket = secrets.token_bytes(_TICKET_BYTES)
            lease = _Trainer(next(self._numbers), ticket, owner, LivenessCheck(owner), rank, launch, claimed_at)
            lease.process = acts_for or owner.identity
            self._leases[lease.lease_id] = lease
            self._ended.pop(rank, None)
            self.idle_since = None
        _log.info("rank %d, process %d: lease %d", rank, owner.pid, lease.lease_id)
        return self._lease(lease)

    def _lease(self, lease: _Trainer) -> Lease:
        return Lease(lease.ticket, os.getpid(), self._shell.options.node_id, self._shell.store.granule_bytes)

    def lease_of(self, ticket: bytes) -> Lease | None:
        try:
            return self._lease(self._find(ticket))
        except DeniedError:
            return None

    def bye(self, ticket: bytes) -> None:
        self._end(self._find(ticket), "said goodbye", "has closed its Checkpointer")

    def end_dead(self) -> None:
        """End the leases of processes that are gone, and take back the slots that they were writing into."""
        with self._lock:
            leases = list(self._leases.values())
        dead = [lease for lease in leases if lease.liveness.is_dead()]
        if dead:
            # IMPORTANT: before the core gives up what they were writing. They may have sealed it, and died before they
            # could report it.
            self._shell.rescan()
        for lease in dead:
            self._end(lease, "is gone", _how_it_ended(lease.liveness))
        if dead:
            self._shell.store.reclaim()

    def _end(self, lease: _Trainer, how: str, ended: str) -> None:
        with self._lock:
            if self._leases.pop(lease.lease_id, None) is None:
                return
            if all(other.rank != lease.rank for other in self._leases.values()):
                self._ended[lease.rank] = f"rank {lease.rank} {ended} on {self._shell.options.node_id}"
            if not self._leases:
                self.idle_since = time.monotonic()
            has_trainers = any(one.launch is not None for one in self._leases.values())
            _offer(lease.news, None)
        lease.liveness.close()
        _log.info("rank %d, process %d %s: lease %d ends", lease.rank, lease.owner.pid, how, lease.lease_id)
        self._shell.feed(LeaseEnded(lease.lease_id))
        if lease.launch is not None and not has_trainers:
            # A process that only reads neither delays nor causes that.
            self._shell.want_flush_at_end("the trainers ended")

    def _find(self, ticket: bytes) -> _Trainer:
        with self._lock:
            for lease in self._leases.values():
                if hmac.compare_digest(lease.ticket, ticket):
                    return lease
        raise DeniedError("no live lease has this ticket", hint="say hello again: the agent was restarted")

    def here(self) -> tuple[TrainerState, ...]:
        """Return the ranks of this node: live ones, and those that ended and have no successor here."""
        self.end_dead()
        with self._lock:
            live = {lease.rank for lease in self._leases.values()}
            ended = [TrainerState(rank, False, how) for rank, how in self._ended.items() if rank not in live]
        return (*(TrainerState(rank, True) for rank in sorted(live)), *ended)

    def trainers(self, ticket: bytes) -> tuple[TrainerState, ...]:
        """Return the ranks of all nodes of the launch. A rank that lives on one node has ended on no other."""
        self._find(ticket)
        found: dict[int, TrainerState] = {}
        for one in (*self.here(), *self._shell.peers.trainers()):
            if one.lives or one.rank not in found:
                found[one.rank] = one
        return tuple(found.values())

    # --- launches -------------------------------------------------------------------------------------------

    def listen(self, credentials: Bundle, advertise: str | None, port: int) -> str:
        return self._shell.peers.listen(credentials, advertise, port)

    def claimants(self, ticket: bytes) -> tuple[Claimant, ...]:
        self._find(ticket)
        launch, _ = self._shell.session_and_line()
        if launch is None:
            return ()
        with self._lock:
            leases = list(self._leases.values())
            found = [one for one in leases if one.launch == launch and self._lives(one)]
        claimants = [
            Claimant(one.process, one.owner.pid, one.rank, launch, one.claimed_at, is_ending(one.owner))
            for one in found
        ]
        return (*claimants, *self._returning(launch, {one.owner for one in leases}))

    def _returning(self, launch: Launch, known: set[Owner]) -> list[Claimant]:
        """Return live trainers that have saved in this launch and have not said hello yet to an agent that has just
        started.

        They need a moment, and a launch that asks meanwhile waits that long. Trainers that had closed their lease
        before are among them.
        """
        if time.monotonic() - self._started_at > _RETURN_SECONDS:
            return []
        me, found = Owner.current(), dict[Owner, Claimant]()
        for sealed in self._shell.store.scan():
            shard, writer = sealed.shard, sealed.writer
            if (shard.generation.epoch, shard.generation.nonce) != (launch.epoch, launch.nonce) or writer in known:
                continue
            if writer != me and not is_dead(writer):  # this process wrote the replicas of other nodes' shards
                found[writer] = Claimant(writer.identity, writer.pid, shard.rank, launch, 0.0, is_ending(writer))
        return list(found.values())

    @staticmethod
    def _lives(lease: _Trainer) -> bool:
        """Return True unless the process is known to have ended, or can't be looked up and no longer watches."""
        can_be_looked_up = lease.owner.pid_namespace == Owner.current().pid_namespace
        return not lease.liveness.is_dead() and (can_be_looked_up or lease.watches > 0)

    def begin(self, ticket: bytes, session: Session, credentials: Bundle | None) -> None:
        lease = self._find(ticket)
        failpoint("before_begin")
        self._raise_if_refused(self._shell.begin(session, credentials))
        with self._lock:
            if lease.launch != session.launch:
                lease.launch, lease.claimed_at = session.launch, time.time()
        self.tell_overtaken()

    def put_line(self, ticket: bytes, line: Line, base: Generation | None) -> Line:
        self._find(ticket)
        self._raise_if_refused(self._shell.feed(LinePut(line.head, line, base)))
        return self._shell.line or line

    def _raise_if_refused(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RefuseFenced) and effect.request_id is None:
                raise FencedError(f"job {self._shell.options.job!r}: {effect.reason}")

    # --- slots ----------------------------------------------------------------------------------------------

    def acquire(self, ticket: bytes, shard: ShardId, size_bytes: int, on_busy: str, timeout: float) -> int:
        lease = self._find(ticket)
        self._shell.raise_if_read_only()
        request_id, request = next(self._numbers), _Request()
        with self._lock:
            self._requests[request_id] = request
            lease.request_id = request_id
        try:
            failpoint("before_slot")
            deadline = time.monotonic() + timeout
            # A request for the next slot shows that the trainer has finished with the previous one: it may be sealed,
            # and the report lost.
            if lease.shard is not None and (held := self._shell.hold(lease.shard)) is not None:
                self._shell.feed(ShardSealed(held))
            self._shell.feed(SlotWanted(request_id, lease.lease_id, shard, on_busy == "wait", deadline))
            request.answered.wait(timeout + _GRACE_SECONDS)
            self._check_granted(request, shard, timeout)
            slot_id = self._grant(lease, request_id, shard, size_bytes)
            failpoint("after_slot")
        except BaseException:
            self._shell.feed(WantDropped(request_id))
            raise
        finally:
            with self._lock:
                del self._requests[request_id]
        return slot_id

    def _grant(self, lease: _Trainer, request_id: int, shard: ShardId, size_bytes: int) -> int:
        """Reserve the granted slot.

        IMPORTANT: takes back only a slot that this lease was granted and never wrote into. Another Checkpointer of the
        same process, or a later request of this one, may be writing into its own.
        """
        with self._lock:
            if lease.request_id != request_id:
                raise DeadlineError(f"{shard}: a newer request of this trainer has replaced this one")
            left_over, lease.slot_id = lease.slot_id, None
        if left_over is not None:
            self._shell.store.withdraw(left_over, lease.owner)
        slot_id = self._shell.store.grant(size_bytes, lease.owner)
        with self._lock:
            lease.slot_id, lease.shard = slot_id, shard
        return slot_id

    def _check_granted(self, request: _Request, shard: ShardId, timeout: float) -> None:
        match request.answer:
            case Grant():
                return
            case RefuseBusy(_, reason, in_vain):
                raise BusyError(
                    reason,
                    hint="save less often, raise slots_per_rank, or see `flashckpt status` for what lags behind",
                    step=shard.generation.step,
                    in_vain=in_vain,
                )
            case RefuseFenced(_, reason):
                raise FencedError(
                    f"job {self._shell.options.job!r}: {reason}",
                    hint="this process belongs to a launch that was replaced; end it",
                )
            case _:
                raise DeadlineError(f"{shard}: expected a slot within {timeout:g} s, found no answer of the agent")

    def prepare(self, ticket: bytes, size_bytes: int, count: int, timeout: float) -> None:
        self._shell.raise_if_read_only()
        self._shell.store.prepare_for(size_bytes, count, self._find(ticket).owner)

    def sealed(self, ticket: bytes, shard: ShardId, tag: int, slot_id: int) -> None:
        lease = self._find(ticket)
        failpoint("before_adopt")
        held = self._shell.hold(shard)
        if held is not None:
            self._shell.feed(ShardSealed(held))
        self._settle(lease, shard.generation)
        failpoint("after_adopt")

    def flush(self, generation: Generation | None, step: int | None, urgent: bool) -> Generation:
        return self._shell.flush(generation, step, urgent)

    def void(self, ticket: bytes, generation: Generation) -> None:
        lease = self._find(ticket)
        failpoint("before_give_up")
        self._shell.feed(GaveUp(generation, lease.rank))
        self._settle(lease, generation)

    def _settle(self, lease: _Trainer, generation: Generation) -> None:
        """Note that the rank has sealed its shard or given it up: its next request for a slot need not look for it."""
        with self._lock:
            if lease.shard is not None and lease.shard.generation == generation:
                lease.shard = None

    # --- news -----------------------------------------------------------------------------------------------

    def watch(self, ticket: bytes) -> Iterator[WatchNews | None]:
        """Yield the progress of generations, beginning with what is known already; None while nothing is new."""
        lease = self._find(ticket)
        news: queue.Queue[WatchNews | None] = queue.Queue(_MAX_NEWS)
        with self._lock:
            _offer(lease.news, None)
            lease.news = news
            lease.told_overtaken = False
            lease.watches += 1
        self.tell_overtaken()
        try:
            yield from self._shell.known_progress()
            yield from self._shell.known_changes()
            while True:
                try:
                    progress = news.get(timeout=_QUIET_SECONDS)
                except queue.Empty:
                    yield None
                    continue
                if progress is None:
                    return
                yield progress
        finally:
            with self._lock:
                lease.watches -= 1

    def notify(self, progress: GenerationProgress | Change) -> None:
        with self._lock:
            for lease in self._leases.values():
                _offer(lease.news, progress)

    def answer(self, request_id: int, answer: Effect) -> None:
        with self._lock:
            request = self._requests.get(request_id)
        if request is not None:
            request.answer = answer
            request.answered.set()

    def tell_overtaken(self) -> None:
        """Tell the trainers whose launch a newer one has overtaken, once per watch."""
        newest, _ = self._shell.current()
        with self._lock:
            newer = [one for one in self._leases.values() if newest is not None and one.launch == newest]
            begun = min(newer, key=lambda one: one.claimed_at, default=None)
            for lease in self._leases.values():
                if newest is None or lease.launch is None or lease.told_overtaken or lease.news is None:
                    continue
                if not lease.launch.is_older_than(newest):
                    continue
                reason = overtaken_by(newest, lease.launch)
                if begun is not None:
                    node = self._shell.options.node_id
                    reason += f": begun by rank {begun.rank}, process {begun.owner.pid} on {node}"
                lease.told_overtaken = True
                _offer(lease.news, Overtaken(newest, reason))

    def close(self) -> None:
        """End all watches: trainers see that the agent ends, and look for its successor."""
        with self._lock:
            self._closed = True
            for lease in self._leases.values():
                _offer(lease.news, None)

    # --- loads ----------------------------------------------------------------------------------------------

    def inventory(self, ticket: bytes) -> NodeInventory:
        self._find(ticket)
        return self._shell.inventory()

    def retrieve(self, ticket: bytes, retrievals: Sequence[Retrieval], timeout: float) -> Iterator[RetrieveNews | None]:
        self._find(ticket)
        return self._shell.retrieves.run(retrievals, timeout)

    # --- operators ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self._shell.status()

    def stop(self, drain_timeout: float | None) -> None:
        self._shell.stop(drain_timeout)

    def leases(self) -> list[dict[str, int]]:
        with self._lock:
            return [{"rank": one.rank, "pid": one.owner.pid} for one in self._leases.values()]


def _how_it_ended(liveness: LivenessCheck) -> str:
    code = liveness.exit_code()
    if code is None:
        return "ended"
    return f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"


def _offer(news: queue.Queue[WatchNews | None] | None, one: WatchNews | None) -> None:
    """Queue news without waiting: a trainer that does not read loses the oldest."""
    while news is not None:
        try:
            news.put_nowait(one)
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                news.get_nowait()
        else:
            return
