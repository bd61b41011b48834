"""Reads over real connections: whole, in part, refused, broken, stalled, and answers that nobody asked for."""

from __future__ import annotations

import threading

import grpc
import pytest

from flashckpt.errors import CorruptShardError, IncompatibleError, NoSpaceError, PeerError
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.frames import decode_chunks, encode_chunks
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.move.transports.grpc.take import Take
from flashckpt.move.transports.tcp.ends import LaneClient
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.protocol.wire import GetInfo, GetOpen, GetRefused
from flashckpt.rpc.settings import PeerLimits
from flashckpt.types import ChunkRange, ShardId
from flashckpt.v1 import peer_pb2
from tests.integration.rpc_world import FENCE, GENERATION, JOB, LAUNCH, WAIT, Credentials, MemoryPeer, Shard

CHUNK = 256 << 10
BY_STREAM = LanePolicy("grpc")  # lanes: tests/contract/test_transfer.py


class MemoryGiver:
    """A Giver over a Shard."""

    def __init__(self, shard, rotten_at=None, gate=None):
        self.shard, self.rotten_at, self.gate = shard, rotten_at, gate
        self.head_bytes, self.chunk_bytes, self.chunks = shard.head_bytes, shard.chunk_bytes, shard.chunks
        self.info = GetInfo(len(shard.head) + len(shard.data), shard.head_bytes, shard.chunk_bytes, 7)
        self.read_head = shard.read_head
        self.found = []
        self.closed = threading.Event()

    def read_chunk(self, index):
        if self.gate is not None:
            self.gate.wait(WAIT)
        if index == self.rotten_at:
            raise CorruptShardError(f"chunk {index} is bad")
        return self.shard.read_chunk(index)

    def view_of(self, chunks):
        return None

    def rotten(self, error):
        self.found.append(error.message)

    def close(self):
        assert not self.closed.is_set(), "once"
        self.closed.set()


class GivingPeer(MemoryPeer):
    def __init__(self):
        super().__init__("b")
        self.giver = None

    def get_open(self, peer, get):
        self.calls.append(("get_open", peer, get))
        return self.giver


class Taken:
    """A Taker that keeps what it gets."""

    def __init__(self, error=None):
        self.info, self.head, self.chunks, self.error = None, b"", {}, error
        self.order = []

    def opened(self, info):
        self.info = info

    def put_head(self, offset, data):
        assert offset == len(self.head)
        self.head += data

    def put_chunks(self, index, data):
        if self.error is not None:
            raise self.error
        self.order.append(index)
        self.chunks[index] = bytes(data)


@pytest.fixture(scope="module")
def bundles():
    job = Credentials()
    return {name: job.bundle(name) for name in ("a", "b")}


@pytest.fixture
def api():
    return GivingPeer()


@pytest.fixture
def serve(bundles, api):
    servers = []

    def start(**options):
        servers.append(PeerServer(api, bundles["b"], JOB, "b", **{"lanes": BY_STREAM, **options}))
        return f"127.0.0.1:{servers[-1].start('127.0.0.1:0')}"

    start.servers = servers
    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(bundles):
    clients = []

    def make(address, **options):
        clients.append(PeerClient(address, bundles["a"], JOB, "b", **{"lanes": BY_STREAM, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def asking(shard, *ranges, with_head=False, **changes):
    values = {"sender": "a", "launch": LAUNCH, "line": FENCE, "shard": ShardId(GENERATION, 0, 4)}
    ranges = tuple(ChunkRange(*one) for one in ranges)
    return GetOpen(**{**values, "digest": shard.digest, "with_head": with_head, "ranges": ranges, **changes})


@pytest.mark.parametrize(
    ("head_bytes", "data_bytes", "chunk_bytes"),
    [(4096, 0, CHUNK), (4096, 1, CHUNK), (3_000_000, 9 * CHUNK + 7, CHUNK), (4096, 100_000, 4096)],
)
def test_all_of_a_shard(serve, connect, api, head_bytes, data_bytes, chunk_bytes):
    shard = Shard.make(head_bytes, data_bytes, chunk_bytes)
    api.giver, taken = MemoryGiver(shard), Taken()
    asked = asking(shard, *([(0, shard.chunks)] if shard.chunks else []), with_head=True)
    assert connect(serve()).get(asked, taken) is None
    assert api.calls == [("get_open", "a", asked)]
    assert taken.info == api.giver.info
    assert taken.head == shard.head
    assert b"".join(taken.chunks[index] for index in range(shard.chunks)) == shard.data
    assert api.giver.closed.wait(WAIT)


def test_parts_come_in_the_order_asked_for_and_nothing_else_is_read(serve, connect, api):
    shard = Shard.make(4096, 40 * CHUNK)
    api.giver, taken = MemoryGiver(shard), Taken()
    assert connect(serve()).get(asking(shard, (1, 6), (9, 1), (30, 10)), taken) is None
    assert taken.order == shard.reads == [*range(1, 7), 9, *range(30, 40)]
    assert (taken.head, taken.chunks[9]) == (b"", shard.read_chunk(9))


@pytest.mark.parametrize("retry", [True, False])
def test_a_refusal(serve, connect, api, retry):
    shard = Shard.make()
    api.giver = GetRefused("not here", retry, LAUNCH, FENCE)
    assert connect(serve()).get(asking(shard, (0, 1)), Taken()) == api.giver


def test_chunks_that_are_not_there(serve, connect, api):
    shard = Shard.make(4096, 3 * CHUNK)
    api.giver, taken = MemoryGiver(shard), Taken()
    refused = connect(serve()).get(asking(shard, (0, 1), (2, 2)), taken)
    assert (refused.retry, taken.info, shard.reads) == (False, None, [])
    assert "up to 2" in refused.reason
    assert api.giver.closed.wait(WAIT)


def test_rot_is_told_and_not_sent(serve, connect, api):
    shard = Shard.make(4096, 20 * CHUNK)
    api.giver, taken = MemoryGiver(shard, rotten_at=9), Taken()
    refused = connect(serve()).get(asking(shard, (0, 20)), taken)
    assert "chunk 9 is bad" in refused.reason
    assert not refused.retry
    assert taken.order == list(range(8))  # whole messages before it
    assert api.giver.found == ["chunk 9 is bad"]
    assert api.giver.closed.wait(WAIT)


@pytest.mark.parametrize("error", [NoSpaceError("full"), CorruptShardError("wrong")])
def test_what_the_taker_raises_ends_the_call(serve, connect, api, error):
    shard = Shard.make(4096, 100 * CHUNK)
    api.giver = MemoryGiver(shard)
    with pytest.raises(type(error)) as raised:
        connect(serve()).get(asking(shard, (0, 100)), Taken(error))
    assert raised.value is error
    assert api.giver.closed.wait(WAIT)
    assert len(shard.reads) < 100


def test_a_holder_that_stalls(serve, connect, api):
    shard, gate = Shard.make(4096, 3 * CHUNK), threading.Event()
    api.giver = MemoryGiver(shard, gate=gate)
    with pytest.raises(PeerError, match=r"no progress for 0.3 s \(0 bytes"):
        connect(serve(), stall_timeout=0.3).get(asking(shard, (0, 3)), Taken())
    gate.set()
    assert api.giver.closed.wait(WAIT)


def test_a_reader_that_does_not_read_is_cut_off(serve, connect, api):
    shard, release = Shard.make(4096, 400 * CHUNK), threading.Event()

    class Slow(Taken):
        def put_chunks(self, index, data):
            release.wait(WAIT)

    api.giver = MemoryGiver(shard)
    client = connect(serve(limits=PeerLimits(idle_timeout=0.3)))
    failed = []

    def get():
        try:
            client.get(asking(shard, (0, 400)), Slow())
        except PeerError as error:
            failed.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    assert api.giver.closed.wait(WAIT), "the clock runs while a message can't leave"
    assert len(shard.reads) < 400, "no more was read than the connection takes"
    release.set()
    thread.join(WAIT)
    assert failed


def test_a_server_that_closes_and_one_that_is_not_there(serve, connect, api):
    shard, gate = Shard.make(4096, 100 * CHUNK), threading.Event()
    client = connect(serve())

    class Closing(Taken):
        def put_chunks(self, index, data):
            super().put_chunks(index, data)
            if index == 0:
                threading.Thread(target=serve.servers[0].close).start()
                gate.wait(0.5)

    api.giver, taken = MemoryGiver(shard), Closing()
    with pytest.raises(PeerError):
        client.get(asking(shard, (0, 100)), taken)
    assert taken.order == list(range(len(taken.order)))
    assert api.giver.closed.wait(WAIT)
    with pytest.raises(PeerError, match="can't be reached"):
        client.get(asking(shard, (0, 3)), Taken(), 5.0)
    client.close()
    with pytest.raises(PeerError, match=r"after close\(\)"):
        client.get(asking(shard, (0, 3)), Taken())


def test_reads_are_counted_for_each_node(serve, connect, api):
    shard, gate = Shard.make(4096, 3 * CHUNK), threading.Event()
    api.giver = MemoryGiver(shard, gate=gate)
    limits = PeerLimits(gets=2, gets_per_peer=1)
    address = serve(limits=limits)
    client, done = connect(address), []
    thread = threading.Thread(target=lambda: done.append(client.get(asking(shard, (0, 3)), Taken())))
    thread.start()
    wait = threading.Event()
    while not api.calls:
        wait.wait(0.01)
    refused = client.get(asking(shard, (0, 3)), Taken())
    assert refused.retry
    assert "at most 1 reads per node" in refused.reason
    gate.set()
    thread.join(WAIT)
    assert done == [None]


OPENED = peer_pb2.GetOpened(size_bytes=4096 + 3 * CHUNK, head_bytes=4096, chunk_bytes=CHUNK)
LIES = {
    "nothing": [],
    "opened alone": [{"opened": OPENED}],
    "no opening": [{"head": peer_pb2.GetHead(data=b"x")}],
    "opened twice": [{"opened": OPENED}, {"opened": OPENED}],
    "no sizes": [{"opened": peer_pb2.GetOpened()}],
    "another chunk": [{"opened": OPENED}, (2, 1)],
    "a chunk too many": [{"opened": OPENED}, (0, 2)],
    "a chunk again": [{"opened": OPENED}, (0, 1), (0, 1)],
    "a head that nobody wants": [{"opened": OPENED}, {"head": peer_pb2.GetHead(data=b"x")}],
    "no chunks": [{"opened": OPENED}, (0, 0)],
    "an empty message": [{"opened": OPENED}, {}],
}


@pytest.mark.parametrize("what", LIES)
def test_an_answer_that_is_not_what_was_asked_for(what):
    """Whatever a holder sends, the taker gets nothing that was not asked for."""
    shard = Shard.make(4096, 3 * CHUNK)
    messages = [
        encode_chunks(one[0], [b"x" * CHUNK] * one[1])
        if isinstance(one, tuple)
        else peer_pb2.GetResponse(**one).SerializeToString()
        for one in LIES[what]
    ]
    taken = Taken()

    class Clock:
        def expect(self, timeout): ...

        def relax(self): ...

    job = Credentials()
    lanes = LaneClient("127.0.0.1:1", job.bundle("a"), "b", BY_STREAM, 1.0)
    with pytest.raises((PeerError, IncompatibleError)):
        Take(asking(shard, (0, 1)), "b", taken, lanes).follow(messages, Clock(), 1.0)
    assert taken.order in ([], [0])
    assert taken.head == b""


def test_chunks_are_laid_out_as_protobuf_would():
    chunks = [b"a" * 300, b"", b"b"]
    for first in (0, 1, 1 << 40):
        message = peer_pb2.GetResponse(chunks=peer_pb2.GetChunks(first_index=first, data=chunks))
        assert encode_chunks(first, chunks) == message.SerializeToString()
        index, views = decode_chunks(message.SerializeToString())
        assert (index, [bytes(view) for view in views]) == (first, chunks)


def test_a_silent_reader_takes_no_thread_for_good(serve, bundles, api):
    address = serve(limits=PeerLimits(idle_timeout=0.3))
    credentials = grpc.ssl_channel_credentials(bundles["a"].ca_pem, bundles["a"].key_pem, bundles["a"].certificate_pem)
    options = [("grpc.ssl_target_name_override", "agent.flashckpt")]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        never = threading.Event()

        def silent():
            never.wait(WAIT)
            yield from ()

        call = channel.stream_stream("/flashckpt.v1.Peer/Get")(silent(), timeout=WAIT)
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        never.set()
    assert api.calls == []
