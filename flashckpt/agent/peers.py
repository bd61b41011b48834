"""Talks to other nodes: serves their calls, sends them messages, and pushes shards to them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.agent.gets import Reading, open_get
from flashckpt.errors import (
    ClosedError,
    ConfigError,
    CorruptShardError,
    FencedError,
    FlashError,
    InternalError,
    NoSpaceError,
    PeerError,
)
from flashckpt.failpoints import failpoint
from flashckpt.move.incoming import Incoming
from flashckpt.move.seam import PutEnd
from flashckpt.move.throttle import Throttle
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.protocol.events import (
    Accept,
    Acknowledge,
    Answered,
    Decline,
    Moved,
    Pushed,
    PushEnd,
    PutAsked,
    Received,
    Reply,
    Rotten,
    Told,
    Unreachable,
)
from flashckpt.protocol.wire import Answer, Beat, Envelope, GetRefused, PutOpen, PutReady, PutRefused
from flashckpt.rpc.address import format_address, is_loopback
from flashckpt.rpc.api import VERSION, Hello
from flashckpt.store.room import check_room
from flashckpt.types import Level, age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashckpt.agent.shell import Shell
    from flashckpt.protocol.wire import Body, GetOpen, PutHave
    from flashckpt.rpc.api import TrainerState
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.types import Held, Launch, ShardId

_log = logging.getLogger(__name__)

_SENDERS, _PUSHERS = 16, 8
_MAX_UNSENT = 64  # messages that wait for one node; they are state, so the oldest may be dropped
# Incomplete replicas of one node: a node pushes two at a time, and its broken connections may leave two more. Each
# occupies its full memory from the start, and may never be completed.
_MAX_UNFINISHED = 4
_MAX_SUSPENDED = 8  # half-received replicas, of all nodes, that wait for their sender to continue
_SUSPENDED_SECONDS = 120.0
_ASK_SECONDS = 2.0  # for another node to say which of its ranks live


@dataclass(frozen=True, slots=True)
class _Suspended:
    peer: str
    launch: Launch
    incoming: Incoming
    since: float


class Peers:
    """Implements the calls of the peer server, and carries out pushes and messages. Any thread may call it."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._lock = threading.Lock()  # protects what follows; not held during a call to a peer or the core
        self._bundle: Bundle | None = None
        self._server: PeerServer | None = None
        self._listening = threading.Lock()  # held while the server is changed; taken before the other lock
        self._address, self._advertised, self._port = "", "", 0
        self._clients: dict[str, tuple[str, Bundle, PeerClient]] = {}
        self._gates: dict[str, threading.Lock] = {}
        self._unsent: dict[str, collections.deque[Body]] = {}
        self._suspended: dict[tuple[ShardId, bytes], _Suspended] = {}
        self._receiving: dict[ShardId, str] = {}  # shard → the node that sends it
        # Two pools: pushes to nodes that do not answer must not delay pushes to others, nor messages.
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="send")
        self._pushers = ThreadPoolExecutor(_PUSHERS, thread_name_prefix="push")
        mbps = shell.options.replicate_max_mbps
        self._throttle = Throttle(mbps * 1e6 / 8 if mbps else None)
        self._running = 0
        self._closed = False

    # --- being reachable ------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._address

    def listen(self, bundle: Bundle, advertise: str | None, port: int) -> str:
        """Start the server if it does not run yet; return host:port for the other nodes.

        A server that runs keeps the credentials of the launch that has begun: this launch may still be refused.
        """
        if not advertise:
            raise ConfigError("advertise: expected the address that other nodes reach this one by, found none")
        with self._listening:
            if self._server is None:
                self._serve(bundle, advertise, port)
            with self._lock:
                self._advertised = advertise
                self._address = format_address(advertise, self._port)
                in_force = self._bundle or bundle
        _log.info("listening for other nodes at %s", self._address)
        self._shell.keep_bundle(in_force, self._address)
        return self._address

    def use(self, bundle: Bundle) -> None:
        """Use the credentials of a new launch. Connections of the previous launch end; pushes resume with the new
        credentials."""
        with self._listening:
            with self._lock:
                if bundle == self._bundle:
                    return
                old, port, self._server = self._server, self._port, None
            if old is None:
                self._bundle = bundle
            else:
                old.close()
                try:
                    self._serve(bundle, self._advertised, port)
                except ConfigError as error:
                    _log.warning("can't listen at port %d any more: %s; using another port", port, error)
                    self._serve(bundle, self._advertised, 0)
                    self.greet()
        self._forget_strangers()
        self._shell.keep_bundle(bundle, self._address)

    def _forget_strangers(self) -> None:
        """Close the connections to nodes of earlier launches: over a long life there are many of them."""
        others = set(self._shell.others())
        with self._lock:
            left = [self._clients.pop(node_id)[2] for node_id in set(self._clients) - others]
        for client in left:
            client.close()

    def greet(self) -> None:
        """Tell all nodes where this one listens now. Nodes that only push to it would not learn it otherwise."""
        for node_id in self._shell.others():
            self.send(node_id, Beat())

    def _serve(self, bundle: Bundle, advertise: str, port: int) -> None:
        options = self._shell.options
        server = PeerServer(self, bundle, options.job, options.node_id, lanes=options.lane_policy)
        # If all nodes are on one machine, no other machine may even begin a handshake.
        host = advertise if is_loopback(advertise) else "::"
        try:
            bound = server.start(format_address(host, port))
        except BaseException:
            server.close()
            raise
        with self._lock:
            # At once: a node that connects with the credentials says hello, and then the address has to be known.
            self._server, self._bundle, self._port = server, bundle, bound
            self._address = format_address(advertise, bound)

    # --- what other nodes ask -------------------------------------------------------------------------------

    def hello(self, peer: str, hello: Hello) -> Hello:
        self._shell.check_epochs(hello.launch, hello.line)
        launch, _ = self._shell.session_and_line()
        # Of this launch only: otherwise an agent that was paused for long would take its successor's place.
        if hello.address and hello.launch == launch:
            self._shell.feed(Moved(peer, hello.address))
        return self._hello()

    def _hello(self) -> Hello:
        launch, line = self._shell.current()
        options, here = self._shell.options, self._shell.trainers.here()
        return Hello(VERSION, options.job, options.node_id, self._address, launch, line, here)

    def tell(self, peer: str, envelope: Envelope) -> Answer:
        failpoint("before_tell_taken")
        if refused := self._why_stranger(peer, envelope.launch):
            return Answer(*self._shell.current(), None, (), refused)
        for effect in self._shell.feed(Told(envelope)):
            if isinstance(effect, Reply):
                return effect.answer
        raise InternalError(f"no answer to {envelope.body}")

    def put_open(self, peer: str, opening: PutOpen) -> _Receiver | PutHave | PutRefused:
        failpoint("before_put_open")
        if refused := self._why_stranger(peer, opening.launch):
            return PutRefused(refused, False, None, None)
        effects = self._shell.feed(PutAsked(opening))
        for effect in effects:
            if isinstance(effect, Decline):
                return effect.answer
        accepts = [effect for effect in effects if isinstance(effect, Accept)]
        if not accepts:
            raise InternalError(f"no answer to a put of {opening.shard}")
        if accepts[0].heals:
            if shortage := self._shell.why_no_room(opening.shard, opening.size_bytes):
                return PutRefused(f"{self._shell.options.node_id}: {shortage}", True, None, None)
            failpoint("after_heal_open")
        key = (opening.shard, opening.digest)
        with self._lock:
            if opening.shard in self._receiving or self._closed:
                return PutRefused(f"{opening.shard} is being received", True, None, None)
            running = sum(one == peer for one in self._receiving.values())
            if running >= _MAX_UNFINISHED:
                return PutRefused(f"{running} replicas of {peer} are being received", True, None, None)
            self._receiving[opening.shard] = peer
            kept = self._suspended.pop(key, None)
            surplus = self._take_surplus(peer, _MAX_UNFINISHED - 1 - running)
        _abandon_all(surplus)
        try:
            incoming = kept.incoming if kept is not None else self._new_incoming(opening)
        except (FlashError, OSError) as error:
            with self._lock:
                self._receiving.pop(opening.shard, None)
            # Lack of memory here is not the sender's fault, and may pass.
            return PutRefused(f"{self._shell.options.node_id}: {error}", True, None, None)
        failpoint("after_put_open")
        return _Receiver(self, peer, opening, incoming)

    def get_open(self, peer: str, opening: GetOpen) -> Reading | GetRefused:
        if refused := self._why_stranger(peer, opening.launch):
            return GetRefused(refused, retry=False)
        return open_get(self._shell, peer, opening)

    def _why_stranger(self, peer: str, launch: Launch) -> str:
        """Return why a node may not speak in the name of the launch that this one works for; "" = it may.

        Called before the core gets the message. The core learns lines from everybody, because the members of a newer
        launch may be other nodes.
        """
        mine, _ = self._shell.session_and_line()
        if mine != launch:
            return ""
        try:
            self._shell.address_of(peer)
        except PeerError:
            return f"{peer} is no member of this launch"
        return ""

    def _new_incoming(self, opening: PutOpen) -> Incoming:
        try:
            return self._claim(opening)
        except NoSpaceError:
            # Half-received replicas, which may never be completed, make room for one that is being sent.
            if not self._give_up(lambda _: True):
                raise
            return self._claim(opening)

    def _claim(self, opening: PutOpen) -> Incoming:
        return Incoming(
            self._shell.store,
            self._shell.options.job,
            opening.shard,
            opening.tag,
            opening.size_bytes,
            opening.head_bytes,
            opening.digest,
            max_shard_bytes=self._shell.options.budget_bytes,
        )

    def received(self, peer: str, opening: PutOpen, incoming: Incoming) -> bytes:
        """Seal a replica whose last chunk has arrived. Return the digest to acknowledge."""
        held = incoming.finish()
        with self._lock:
            self._receiving.pop(opening.shard, None)
        self._shell.note_sealed(held.shard)
        failpoint("before_ack")
        effects = self._shell.feed(Received(peer, opening.launch, held))
        if not any(isinstance(effect, Acknowledge) for effect in effects):
            raise FencedError(f"{held.shard}: not needed any more: a record, a line or a newer launch came meanwhile")
        failpoint("after_ack")
        return held.digest

    def suspended(self, peer: str, opening: PutOpen, incoming: Incoming) -> None:
        with self._lock:
            self._receiving.pop(opening.shard, None)
            one = _Suspended(peer, opening.launch, incoming, time.monotonic())
            self._suspended[opening.shard, opening.digest] = one
            running = sum(one == peer for one in self._receiving.values())
            surplus = self._take_surplus(peer, max(0, _MAX_UNFINISHED - running))
            surplus += self._take_surplus(None, _MAX_SUSPENDED)
        _abandon_all(surplus)

    def _take_surplus(self, peer: str | None, most: int) -> list[_Suspended]:
        """Remove and return the oldest ones beyond `most`, of one node or of all. The caller holds the lock."""
        mine = [(key, one) for key, one in self._suspended.items() if peer is None or one.peer == peer]
        mine.sort(key=lambda item: item[1].since)
        return [self._suspended.pop(key) for key, _ in mine[: max(0, len(mine) - most)]]

    def failed(self, opening: PutOpen, incoming: Incoming) -> None:
        with self._lock:
            self._receiving.pop(opening.shard, None)
        _abandon(incoming)

    def drop_old(self) -> None:
        """Give up half-received replicas that were not continued in time, are not needed, or take room that saves
        need."""
        with self._lock:
            waiting = sum(one.incoming.size_bytes for one in self._suspended.values())
        if not waiting:
            return
        # They stay only if as much again is free: a save must not fail because of half a replica.
        is_short = check_room(waiting, self._shell.store.status().room) is not None
        limit = time.monotonic() - _SUSPENDED_SECONDS
        newest, _ = self._shell.current()
        progress = self._shell.known_progress()
        voids = {one.generation for one in progress if one.level is Level.NONE}
        committed = [one.generation for one in progress if one.level is not Level.NONE]

        def is_needless(one: _Suspended) -> bool:
            generation = one.incoming.shard.generation
            return (
                is_short
                or one.since < limit
                or one.launch != newest
                or generation in voids
                or any(age_order(generation) < age_order(other) for other in committed)
            )

        self._give_up(is_needless)

    def _give_up(self, wanted: Callable[[_Suspended], bool]) -> bool:
        """Give up half-received replicas. Return False if there was none."""
        with self._lock:
            keys = [key for key, one in self._suspended.items() if wanted(one)]
            found = [self._suspended.pop(key) for key in keys]
        _abandon_all(found)
        return bool(found)

    # --- what is said and pushed to them --------------------------------------------------------------------

    def send(self, node_id: str, body: Body) -> None:
        """Send a message in the background, in order per node."""
        with self._lock:
            if self._closed:
                return
            waiting = self._unsent.get(node_id)
            if waiting is not None:
                waiting.append(body)
                while len(waiting) > _MAX_UNSENT:
                    waiting.popleft()
                return
            self._unsent[node_id] = collections.deque([body])
        self._senders.submit(self._send_all, node_id)

    def _send_all(self, node_id: str) -> None:
        while True:
            with self._lock:
                waiting = self._unsent[node_id]
                if not waiting or self._closed:
                    del self._unsent[node_id]
                    return
                body = waiting.popleft()
            try:
                launch, line = self._shell.session_and_line()
                if launch is None:
                    continue
                client = self.client(node_id)
                envelope = Envelope(self._shell.options.node_id, launch, line, body)
                failpoint("before_tell")
                answer = client.tell(envelope, self._shell.options.peer_timeout)
                failpoint("after_tell")
                self._shell.feed(Answered(node_id, answer))
            except FlashError as error:
                self._shell.feed(Unreachable(node_id, error.message))
            except Exception:
                _log.exception("sending messages to %s failed unexpectedly; they are sent again", node_id)
                self._shell.feed(Unreachable(node_id, "internal error; see the log"))

    def push(self, held: Held, node_id: str, *, heals: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            self._running += 1
        self._pushers.submit(self._push, held, node_id, heals)

    def _push(self, held: Held, node_id: str, heals: bool) -> None:
        try:
            if heals:
                failpoint("before_heal")
            event = self._push_once(held, node_id)
        except CorruptShardError as error:
            self._shell.feed(Rotten(held.shard, error.message))
            event = Pushed(held.shard, node_id, PushEnd.FAILED, reason="our copy is bad")
        except FlashError as error:
            event = Pushed(held.shard, node_id, PushEnd.FAILED, reason=error.message)
        except Exception as error:
            _log.exception("pushing %s to %s failed unexpectedly; it is tried again", held.shard, node_id)
            event = Pushed(held.shard, node_id, PushEnd.FAILED, reason=repr(error))
        with self._lock:
            self._running -= 1
        if event.end is not PushEnd.ACKED:
            _log.info("push of %s to %s: %s: %s", held.shard, node_id, event.end.name.lower(), event.reason)
        elif heals:
            _log.info("healed: a missing copy of %s is on %s now", held.shard, node_id)
        self._shell.feed(event)

    def _push_once(self, held: Held, node_id: str) -> Pushed:
        launch, line = self._shell.session_and_line()
        if launch is None:
            raise FencedError("this node has no launch")
        client = self.client(node_id)
        failpoint("before_push")
        with contextlib.closing(self._shell.open_shard(held.shard)) as outgoing:
            opening = PutOpen(
                self._shell.options.node_id,
                launch,
                line,
                held.shard,
                held.tag,
                outgoing.digest,
                outgoing.size_bytes,
                outgoing.head_bytes,
            )
            result = client.put(opening, outgoing, self._throttle)
        failpoint("after_push")
        if result.end is PutEnd.REFUSED:
            self._shell.check_epochs(result.launch, result.line)  # here, where it counts as a failure of the push
            end = PushEnd.LATER if result.retry else PushEnd.REFUSED
            return Pushed(held.shard, node_id, end, reason=result.reason, launch=result.launch, line=result.line)
        return Pushed(held.shard, node_id, PushEnd.ACKED, digest=result.digest)

    def client(self, node_id: str) -> PeerClient:
        """Return a client that is sure to reach that node. It connects by itself, and again when the node is back at
        its address."""
        address = self._shell.address_of(node_id)
        with self._lock:
            bundle = self._bundle
            gate = self._gates.setdefault(node_id, threading.Lock())
        if bundle is None:
            raise ClosedError(f"{node_id}: this agent has no credentials to speak to other nodes with")
        with gate:  # one thread connects, the others wait for it
            known = self._clients.get(node_id)
            if known is not None and known[:2] == (address, bundle):
                return known[2]
            options = self._shell.options
            timeout = options.peer_timeout
            client = PeerClient(address, bundle, options.job, node_id, stall_timeout=timeout, lanes=options.lane_policy)
            try:
                client.hello(self._hello(), timeout)
            except BaseException:
                client.close()
                raise
            with self._lock:
                self._clients[node_id] = (address, bundle, client)
        if known is not None:
            known[2].close()  # of an earlier launch, or for an address that the node has left
        return client

    def trainers(self) -> list[TrainerState]:
        """Ask all other nodes of the launch for their ranks. Nodes that do not answer in time are left out."""
        asked = [self._senders.submit(self._trainers_of, node_id) for node_id in self._shell.others()]
        concurrent.futures.wait(asked, _ASK_SECONDS)
        return [one for answer in asked if answer.done() for one in answer.result()]

    def _trainers_of(self, node_id: str) -> tuple[TrainerState, ...]:
        try:
            told = self.client(node_id).hello(self._hello(), _ASK_SECONDS).trainers
        except FlashError as error:
            _log.info("%s does not say which of its ranks live: %s", node_id, error.message)
            return ()
        return own_ranks(told, self._shell.ranks_of(node_id))

    # --- the end --------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of pushes under way."""
        return self._running

    def close(self) -> None:
        with self._lock:
            self._closed = True
            server, clients = self._server, [one[2] for one in self._clients.values()]
            self._clients.clear()
        for client in clients:
            client.close()
        self._senders.shutdown(wait=True, cancel_futures=True)
        self._pushers.shutdown(wait=True, cancel_futures=True)
        if server is not None:
            server.close()
        self._give_up(lambda _: True)


class _Receiver:
    """One replica that is being received. Exactly one of finish, suspend and fail ends it."""

    def __init__(self, peers: Peers, peer: str, opening: PutOpen, incoming: Incoming) -> None:
        self._peers = peers
        self._peer = peer
        self._opening = opening
        self._incoming = incoming

    @property
    def ready(self) -> PutReady:
        return PutReady(self._incoming.next_head_offset, self._incoming.next_chunk)

    def put_head(self, offset: int, data: bytes | memoryview) -> None:
        self._incoming.put_head(offset, data)

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        return self._incoming.receive(first, size_bytes, fd, scratch)

    def put_chunks(self, first: int, data: bytes | memoryview) -> None:
        self._incoming.put_chunks(first, data)

    def finish(self) -> bytes:
        return self._peers.received(self._peer, self._opening, self._incoming)

    def suspend(self) -> None:
        self._peers.suspended(self._peer, self._opening, self._incoming)

    def fail(self, error: Exception) -> None:
        _log.warning("the replica of %s from node %r was refused: %s", self._opening.shard, self._peer, error)
        self._peers.failed(self._opening, self._incoming)


def own_ranks(told: Sequence[TrainerState], ranks: Sequence[int]) -> tuple[TrainerState, ...]:
    """Return the part of what a node told that counts: it speaks for its own ranks, and nobody else may call a rank
    dead."""
    return tuple(one for one in told if one.rank in ranks)


def _abandon_all(suspended: list[_Suspended]) -> None:
    for one in suspended:
        _abandon(one.incoming)


def _abandon(incoming: Incoming) -> None:
    with contextlib.suppress(FlashError, OSError):
        incoming.abandon()
