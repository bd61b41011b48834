"""What every way to move a shard between two nodes keeps to: by messages of gRPC, by plain lanes, by lanes with TLS.

Both halves are the real ones, over real connections; shards lie in real stores.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from flashckpt.errors import CorruptShardError, NoSpaceError, PeerError
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES
from flashckpt.move.filling import Filling
from flashckpt.move.incoming import Incoming
from flashckpt.move.outgoing import Outgoing
from flashckpt.move.seam import PutEnd
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.move.transports.tcp.layout import MAGIC
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.protocol.wire import GetInfo, GetOpen, GetRefused
from flashckpt.rpc.settings import PeerLimits
from flashckpt.store.slots import SlotStore
from flashckpt.store.windows import open_window
from flashckpt.types import ChunkRange
from tests.integration.rpc_world import FENCE, JOB, LAUNCH, WAIT, Credentials, MemoryPeer
from tests.integration.test_rpc_replica import SHARD, Receiver, content, opening_of, write_shard

CHUNK = DEFAULT_CHUNK_BYTES
CHUNKS = 40
POLICIES = {
    "grpc": LanePolicy("grpc"),
    "tcp": LanePolicy("tcp"),
    "tls": LanePolicy("tcp", tls=True),
    "one lane": LanePolicy("tcp", count=1),
    "auto": LanePolicy("auto", count=4),
}


@pytest.fixture(scope="module")
def job():
    return Credentials()


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


class Reading:
    """A Giver over a sealed shard, as an agent has it."""

    def __init__(self, store, sealed):
        self.fd = store.open_shard(sealed)
        self.opened = Outgoing(self.fd, SHARD, JOB, lambda: open_window(self.fd))
        self.head_bytes, self.chunk_bytes = self.opened.head_bytes, self.opened.chunk_bytes
        self.chunks, self.digest = self.opened.chunks, self.opened.digest
        self.info = GetInfo(self.opened.size_bytes, self.head_bytes, self.chunk_bytes, 9)
        self.read_head, self.view_of = self.opened.read_head, self.opened.view_of
        self.gate, self.found, self.closed = threading.Event(), [], threading.Event()
        self.gate.set()

    def read_chunk(self, index):
        assert self.gate.wait(WAIT)
        return self.opened.read_chunk(index)

    def rotten(self, error):
        self.found.append(error.message)

    def close(self):
        assert not self.closed.is_set(), "once"
        self.closed.set()
        os.close(self.fd)


class World:
    """Node a, which calls, and node b, which serves."""

    def __init__(self, root, job, policy, **limits):
        self.paths = [os.path.join(root, name) for name in "ab"]
        for path in self.paths:
            os.mkdir(path, 0o700)
        self.a, self.b = (SlotStore.open(path, JOB) for path in self.paths)
        self.api, self.received = MemoryPeer("b"), []
        self.api.on_open = self._on_open
        self.api.get_open = lambda peer, get: self.giver
        self.server = PeerServer(self.api, job.bundle("b"), JOB, "b", lanes=policy, limits=PeerLimits(**limits))
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1:0')}"
        self.job, self.policy, self.clients = job, policy, []

    def client(self, **options):
        made = PeerClient(self.address, self.job.bundle("a"), JOB, "b", **{"lanes": self.policy, **options})
        self.clients.append(made)
        return made

    def _on_open(self, peer, opening):
        if self.received and self.received[-1].ends == ["suspend"]:
            self.received.append(Receiver(self.received[-1].incoming))
        else:
            announced = (opening.shard, opening.tag, opening.size_bytes, opening.head_bytes, opening.digest)
            self.received.append(Receiver(Incoming(self.b, JOB, *announced)))
        return self.received[-1]

    @property
    def lanes(self):
        """Connections of lanes that were let in so far, of transfers that still run."""
        return self.server._lanes._listener

    def close(self):
        for client in self.clients:
            client.close()
        self.server.close()
        for one in self.received:
            if one.ends == ["suspend"]:
                one.incoming.abandon()
        for store in (self.a, self.b):
            assert store.check() == []
            store.close()


@pytest.fixture
def world(memory_dir, job, policy):
    made = World(memory_dir, job, policy)
    yield made
    made.close()


@pytest.fixture
def outgoing(world):
    fd = world.a.open_shard(write_shard(world.a, CHUNKS))
    yield Outgoing(fd, SHARD, JOB, lambda: open_window(fd))
    os.close(fd)


class Taken:
    """A Taker that keeps what it gets."""

    def __init__(self, error=None, slow=0.0, on_opened=lambda: None):
        self.head, self.chunks, self.error, self.slow, self.lock = b"", {}, error, slow, threading.Lock()
        self.on_opened = on_opened

    def opened(self, info):
        self.info = info
        self.on_opened()

    def put_head(self, offset, data):
        assert offset == len(self.head)
        self.head += data

    def receive(self, first, size_bytes, fd, scratch):
        return False

    def put_chunks(self, first, data):
        time.sleep(self.slow)
        if self.error is not None:
            raise self.error
        size = self.info.chunk_bytes
        with self.lock:
            for number, at in enumerate(range(0, len(data), size)):
                self.chunks[first + number] = bytes(data[at : at + size])


def asking(reading, *ranges, with_head=False):
    return GetOpen("a", LAUNCH, FENCE, SHARD, reading.digest, with_head, tuple(ChunkRange(*one) for one in ranges))


def flip(fd, at):
    good = os.pread(fd, 1, at)
    writable = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.pwrite(writable, bytes([good[0] ^ 1]), at)
    os.close(writable)


# --- pushes


def test_a_replica_is_the_shard_byte_for_byte(world, outgoing):
    seen = []
    result = world.client().put(opening_of(outgoing), outgoing, on_progress=seen.append)
    assert (result.end, result.digest) == (PutEnd.SEALED, outgoing.digest)
    assert result.sent_bytes == outgoing.size_bytes
    assert seen == sorted(seen)
    assert world.received[0].ends == ["finish"]
    assert content(world.b) == content(world.a)


def test_every_byte_is_braked(world, outgoing):
    class Brake:
        taken = 0
        lock = threading.Lock()

        def take(self, size_bytes):
            with self.lock:
                self.taken += size_bytes

    brake = Brake()
    world.client().put(opening_of(outgoing), outgoing, brake)
    assert brake.taken == outgoing.size_bytes


def test_rot_at_the_sender_is_found_named_and_never_sealed(world, outgoing):
    at = outgoing.head_bytes + 9 * CHUNK + 100
    flip(outgoing._fd, at)
    client = world.client()
    with pytest.raises(CorruptShardError, match="chunk 9"):
        client.put(opening_of(outgoing), outgoing)
    assert list(world.b.scan()) == [], "nothing was acknowledged"
    flip(outgoing._fd, at)
    result = client.put(opening_of(outgoing), outgoing)
    assert result.end is PutEnd.SEALED
    assert [one.ends for one in world.received] == [["suspend"], ["finish"]]
    assert content(world.b) == content(world.a)


def test_a_receiver_that_is_slow_is_waited_for_and_one_that_stands_still_is_not(world, outgoing, monkeypatch):
    verify, gate, calls = Filling._verify, threading.Event(), []

    def slow(filling, first, data):
        calls.append(first)
        if len(calls) > 2:
            gate.wait(WAIT)
        return verify(filling, first, data)

    monkeypatch.setattr(Filling, "_verify", slow)
    client = world.client(stall_timeout=1.0)
    try:
        with pytest.raises(PeerError):
            client.put(opening_of(outgoing), outgoing)
    finally:
        gate.set()
    deadline = time.monotonic() + WAIT
    while not world.received[0].ends and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.received[0].ends == ["suspend"]
    assert client.put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
    assert content(world.b) == content(world.a)


def test_a_brake_is_no_stall(world, outgoing):
    class Brake:
        def take(self, size_bytes):
            time.sleep(0.12)

    # The receiver tells of every fourth frame, well before it counts as stalled; the whole push takes longer than that.
    result = world.client(stall_timeout=1.0).put(opening_of(outgoing), outgoing, Brake())
    assert result.end is PutEnd.SEALED


def test_a_server_that_closes_suspends_the_push(world, outgoing, monkeypatch):
    verify, began, gate = Filling._verify, threading.Event(), threading.Event()

    def slow(filling, first, data):
        began.set()
        gate.wait(0.5)
        return verify(filling, first, data)

    monkeypatch.setattr(Filling, "_verify", slow)
    closer = threading.Thread(target=lambda: began.wait(WAIT) and world.server.close())
    closer.start()
    with pytest.raises(PeerError):
        world.client().put(opening_of(outgoing), outgoing)
    closer.join()
    assert world.received[0].ends == ["suspend"], "and nothing was written after that"


def test_a_client_that_closes_ends_its_push(world, outgoing, monkeypatch):
    began = threading.Event()
    client = world.client()

    class Brake:
        def take(self, size_bytes):
            began.set()
            time.sleep(0.05)

    closer = threading.Thread(target=lambda: began.wait(WAIT) and client.close())
    closer.start()
    with pytest.raises(PeerError):
        client.put(opening_of(outgoing), outgoing, Brake())
    closer.join()
    deadline = time.monotonic() + WAIT
    while not world.received[0].ends and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.received[0].ends == ["suspend"]


# --- reads


@pytest.mark.parametrize("ranges", [[(0, CHUNKS + 1)], [(0, 1), (3, 30)], [(CHUNKS, 1)]], ids=str)
@pytest.mark.parametrize("with_head", [True, False])
def test_what_was_asked_for_and_nothing_else(world, ranges, with_head):
    world.giver = Reading(world.b, write_shard(world.b, CHUNKS))
    taken = Taken()
    assert world.client().get(asking(world.giver, *ranges, with_head=with_head), taken) is None
    expected = {index for first, count in ranges for index in range(first, first + count)}
    assert set(taken.chunks) == expected
    whole = content(world.b)[2]
    data = whole[world.giver.head_bytes :]
    assert all(taken.chunks[index] == data[index * CHUNK : (index + 1) * CHUNK] for index in expected)
    assert taken.head == (whole[: world.giver.head_bytes] if with_head else b"")
    assert world.giver.closed.wait(WAIT)


def test_rot_at_the_holder_is_told_to_both(world):
    world.giver = Reading(world.b, write_shard(world.b, CHUNKS))
    flip(world.giver.fd, world.giver.head_bytes + 9 * CHUNK + 100)
    good = [world.giver.opened.read_chunk(index) for index in range(8)]

    class Verifying(Taken):
        def put_chunks(self, first, data):
            if first <= 9 < first + -(-len(data) // CHUNK):
                raise CorruptShardError("chunk 9 is bad")  # as a Gathering would find
            super().put_chunks(first, data)

    taken = Verifying()
    refused = world.client().get(asking(world.giver, (0, CHUNKS)), taken)
    assert isinstance(refused, GetRefused)
    assert not refused.retry
    assert "chunk 9" in refused.reason
    assert all(taken.chunks[index] == good[index] for index in taken.chunks if index < 8)
    assert 9 not in taken.chunks
    assert world.giver.closed.wait(WAIT)
    assert len(world.giver.found) == 1
    assert "chunk 9" in world.giver.found[0]


def test_what_the_taker_raises_ends_the_read(world):
    world.giver = Reading(world.b, write_shard(world.b, CHUNKS))
    with pytest.raises(NoSpaceError, match="full"):
        world.client().get(asking(world.giver, (0, CHUNKS)), Taken(NoSpaceError("full")))
    assert world.giver.closed.wait(WAIT)


def test_a_holder_that_closes(world):
    many = 8 * CHUNKS  # more than the buffers of all sockets hold
    world.giver = Reading(world.b, write_shard(world.b, many))
    closer = threading.Timer(0.2, world.server.close)
    taken = Taken(slow=0.2, on_opened=closer.start)
    try:
        refused = world.client().get(asking(world.giver, (0, many)), taken)
        assert refused is not None
        assert refused.retry
    except PeerError:
        pass
    closer.join()
    assert world.giver.closed.wait(WAIT)
    assert len(taken.chunks) < many


def test_a_reader_that_goes_is_noticed(world):
    world.giver = Reading(world.b, write_shard(world.b, CHUNKS))
    client = world.client()
    closer = threading.Timer(0.2, client.close)
    with pytest.raises(PeerError):
        client.get(asking(world.giver, (0, CHUNKS)), Taken(slow=0.5, on_opened=closer.start))
    closer.join()
    assert world.giver.closed.wait(WAIT)


# --- which way


BOTH_WAYS = [("auto", "grpc"), ("grpc", "auto"), ("grpc", "tcp"), ("auto", "auto")]


@pytest.mark.parametrize(("sender", "receiver"), BOTH_WAYS, ids=str)
def test_nodes_with_different_settings_find_a_way(memory_dir, job, sender, receiver):
    world = World(memory_dir, job, LanePolicy(receiver))
    fd = world.a.open_shard(write_shard(world.a, CHUNKS))
    try:
        outgoing = Outgoing(fd, SHARD, JOB, lambda: open_window(fd))
        client = world.client(lanes=LanePolicy(sender))
        assert client.put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
        world.giver = Reading(world.a, world.a.scan()[0])
        assert client.get(asking(world.giver, (0, CHUNKS)), Taken()) is None
    finally:
        os.close(fd)
        world.close()


@pytest.mark.parametrize(
    ("sender", "receiver", "reason"),
    [
        (LanePolicy("tcp"), LanePolicy("grpc"), "offers n"),
        (LanePolicy("tcp", tls=True), LanePolicy("tcp"), "without TLS"),
    ],
)
def test_lanes_or_nothing(memory_dir, job, sender, receiver, reason):
    world = World(memory_dir, job, receiver)
    fd = world.a.open_shard(write_shard(world.a, CHUNKS))
    try:
        outgoing = Outgoing(fd, SHARD, JOB, lambda: open_window(fd))
        client = world.client(lanes=sender)
        with pytest.raises(PeerError, match=reason):
            client.put(opening_of(outgoing), outgoing)
        world.giver = Reading(world.a, world.a.scan()[0])
        with pytest.raises(PeerError, match=reason):
            client.get(asking(world.giver, (0, CHUNKS)), Taken())
    finally:
        os.close(fd)
        world.close()


def test_a_port_that_nobody_gets_through_to_is_gone_around(memory_dir, job, caplog):
    """As behind a firewall that knows the port of the calls only."""
    world = World(memory_dir, job, LanePolicy("auto"))
    listener = world.server._lanes._listener
    listener.close()  # what is offered is the port of nobody
    fd = world.a.open_shard(write_shard(world.a, CHUNKS))
    try:
        outgoing = Outgoing(fd, SHARD, JOB, lambda: open_window(fd))
        client = world.client()
        assert client.put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
        world.giver = Reading(world.a, world.a.scan()[0])
        taken = Taken()
        assert client.get(asking(world.giver, (0, CHUNKS)), taken) is None
        assert len(taken.chunks) == CHUNKS
        strict = world.client(lanes=LanePolicy("tcp"))
        world.giver = Reading(world.a, world.a.scan()[0])
        with pytest.raises(PeerError, match="no lane"):
            strict.get(asking(world.giver, (0, CHUNKS)), Taken())
    finally:
        os.close(fd)
        world.close()


# --- strangers


@pytest.mark.parametrize("policy", ["tcp"], indirect=True)
def test_nobody_comes_in_without_a_ticket_and_none_is_good_twice(world, outgoing, monkeypatch):
    listener = world.lanes
    shown = []
    redeem = type(listener)._redeem

    def spy(listener, lane):
        expected = redeem(listener, lane)
        shown.extend(expected.tickets)
        return expected

    monkeypatch.setattr(type(listener), "_redeem", spy)
    world.client().put(opening_of(outgoing), outgoing)
    assert len(set(shown)) == 2
    for knock in (b"", b"x" * 48, MAGIC + bytes(32), *(MAGIC + ticket for ticket in set(shown)), b"y" * 32 + shown[0]):
        with socket.create_connection(("127.0.0.1", listener.port), WAIT) as stranger:
            stranger.sendall(knock)
            if len(knock) < 48:
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(WAIT)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert not listener._tickets, "tickets go with their call"


@pytest.mark.parametrize("policy", ["tcp"], indirect=True)
def test_strangers_that_say_nothing_are_few_and_shown_out(world, outgoing, monkeypatch):
    monkeypatch.setattr("flashckpt.move.transports.tcp.listener._TICKET_SECONDS", 1.0)
    strangers = [socket.create_connection(("127.0.0.1", world.lanes.port), WAIT) for _ in range(100)]
    try:
        deadline = time.monotonic() + WAIT
        while world.lanes._strangers and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not world.lanes._strangers
        assert world.client().put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
    finally:
        for one in strangers:
            one.close()


def connect_from(source, port):
    return socket.create_connection(("127.0.0.1", port), WAIT, source_address=(source, 0))


def is_open(connection):
    connection.settimeout(0)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("policy", ["tcp", "tls"], indirect=True)
def test_strangers_that_drip_keep_nobody_out_and_are_shown_out(world, outgoing, monkeypatch):
    """From the member's own address and from others: a byte now and then does not prolong the time to show a ticket."""
    monkeypatch.setattr("flashckpt.move.transports.tcp.listener._TICKET_SECONDS", 2.0)
    sources = [f"127.0.0.{1 + index % 6}" for index in range(90)]
    strangers = [connect_from(source, world.lanes.port) for source in sources]
    began = time.monotonic()
    try:
        assert world.client().put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
        while any(map(is_open, strangers)):
            assert time.monotonic() - began < 2.0 + 2.0, "2 s in all, and what it takes to look"
            for one in strangers:
                with contextlib.suppress(OSError):
                    one.send(MAGIC[:1])
            time.sleep(0.2)
    finally:
        for one in strangers:
            one.close()


@pytest.mark.parametrize("policy", ["tcp"], indirect=True)
def test_a_flood_of_strangers_costs_a_member_no_lane(world, outgoing):
    stop = threading.Event()

    def knock(source):
        with contextlib.ExitStack() as held:
            for _ in range(400):
                if not stop.is_set():
                    held.enter_context(contextlib.closing(connect_from(source, world.lanes.port)))
            stop.wait(WAIT)

    threads = [threading.Thread(target=knock, args=(f"127.0.1.{index + 1}",)) for index in range(3)]
    try:
        for one in threads:
            one.start()
        assert world.client().put(opening_of(outgoing), outgoing).end is PutEnd.SEALED
    finally:
        stop.set()
        for one in threads:
            one.join(WAIT)


@pytest.mark.parametrize("policy", ["tls"], indirect=True)
def test_a_ticket_of_one_node_is_no_good_to_another(world, outgoing, job, monkeypatch):
    """Stolen tickets need the certificate of the node that they were given to."""
    from flashckpt.move.transports.tcp.connections import Connections
    from flashckpt.move.transports.tcp.ends import client_context

    open_fleet = Connections.open

    def with_other_certificate(host, offer, **options):
        return open_fleet(host, offer, **{**options, "tls": client_context(job.bundle("c"))})

    monkeypatch.setattr(Connections, "open", with_other_certificate)
    with pytest.raises(PeerError, match="no lane"):
        world.client().put(opening_of(outgoing), outgoing)
    assert list(world.b.scan()) == []
