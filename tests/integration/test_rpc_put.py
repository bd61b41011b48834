"""Pushes over real connections: whole, resumed, refused, broken at every state, stalled."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time

import grpc
import pytest

from flashckpt.errors import CorruptShardError, FlashError, IncompatibleError, NoSpaceError, PeerError
from flashckpt.move.seam import PutEnd
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.frames import encode_chunks
from flashckpt.move.transports.grpc.send import WINDOW_BYTES
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.protocol.wire import PutHave, PutReady, PutRefused
from flashckpt.rpc import convert
from flashckpt.rpc.credentials import DNS_NAME
from flashckpt.rpc.settings import Keepalive, PeerLimits
from flashckpt.v1 import peer_pb2
from tests.conftest import environment
from tests.integration.rpc_world import FENCE, JOB, LAUNCH, WAIT, Credentials, MemoryPeer, Shard, beat

CHUNK = 256 << 10
BY_STREAM = LanePolicy("grpc")  # lanes: tests/contract/test_transfer.py


@pytest.fixture(scope="module")
def bundles():
    job = Credentials()
    return {name: job.bundle(name) for name in ("a", "b", "c")}


@pytest.fixture
def api():
    return MemoryPeer("b")


@pytest.fixture
def serve(bundles, api):
    """Starts a server with these limits; its address."""
    servers = []

    def start(address="127.0.0.1:0", **options):
        server = PeerServer(api, bundles["b"], JOB, "b", **{"lanes": BY_STREAM, **options})
        servers.append(server)
        return f"127.0.0.1:{server.start(address)}"

    start.servers = servers
    yield start
    for receiver in api.receivers:
        receiver.gate.set()
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


def arrived(receiver, shard):
    assert receiver.ends == ["finish"]
    assert bytes(receiver.head) == shard.head
    assert bytes(receiver.data) == shard.data


@pytest.mark.parametrize(
    ("head_bytes", "data_bytes", "chunk_bytes"),
    [
        (4096, 0, CHUNK),
        (4096, 1, CHUNK),
        (1 << 20, CHUNK, CHUNK),
        ((1 << 20) + 1, 4 * CHUNK, CHUNK),
        (3_000_000, 9 * CHUNK + 7, CHUNK),
        (4096, 100_000, 4096),
        (4096, (9 << 20) + 1, 4 << 20),
    ],
)
def test_a_shard_arrives_whole(serve, connect, api, head_bytes, data_bytes, chunk_bytes):
    shard = Shard.make(head_bytes, data_bytes, chunk_bytes)
    api.chunk_bytes = chunk_bytes
    result = connect(serve()).put(shard.opening("a"), shard)
    assert (result.end, result.digest) == (PutEnd.SEALED, shard.digest)
    assert result.sent_bytes == head_bytes + data_bytes
    arrived(api.receivers[0], shard)
    assert api.calls == [("put_open", "a", shard.opening("a"))]


def test_progress_and_throttle_see_every_byte(serve, connect, api):
    class Brake:
        taken = 0

        def take(self, size_bytes):
            Brake.taken += size_bytes

    shard, seen = Shard.make(data_bytes=40 << 20), []
    connect(serve()).put(shard.opening("a"), shard, Brake(), on_progress=seen.append)
    assert Brake.taken == len(shard.head) + len(shard.data)
    assert seen == sorted(seen)
    assert len(seen) >= 10
    assert 0 < seen[-1] <= Brake.taken


def test_not_more_than_the_window_is_on_its_way(serve, connect, api):
    api.gate_closed = True
    shard = Shard.make(head_bytes=4096, data_bytes=WINDOW_BYTES + (16 << 20))
    client, done = connect(serve()), queue.Queue()
    thread = threading.Thread(target=lambda: done.put(client.put(shard.opening("a"), shard)))
    thread.start()
    assert api.opened.acquire(timeout=WAIT)
    receiver = api.receivers[0]
    assert receiver.took.acquire(timeout=WAIT)
    read, clock = -1, threading.Event()
    while read != len(shard.reads):  # until the sender stands still
        read = len(shard.reads)
        clock.wait(0.5)
    assert read * CHUNK <= WINDOW_BYTES + (2 << 20)
    receiver.gate.set()
    assert done.get(timeout=WAIT).end is PutEnd.SEALED
    thread.join()
    arrived(receiver, shard)


def test_a_shard_that_is_there_is_not_sent(serve, connect, api):
    shard, client = Shard.make(), connect(serve())
    client.put(shard.opening("a"), shard)
    shard.reads.clear()
    result = client.put(shard.opening("a"), shard)
    assert (result.end, result.digest, result.sent_bytes) == (PutEnd.HAVE, shard.digest, 0)
    assert shard.reads == []


def test_a_refusal_says_why_and_whether_to_come_again(serve, connect, api):
    shard, client = Shard.make(), connect(serve())
    for retry in (True, False):
        api.on_open = lambda peer, opening, retry=retry: PutRefused("no room", retry, LAUNCH, FENCE)
        result = client.put(shard.opening("a"), shard)
        assert (result.end, result.reason, result.retry) == (PutEnd.REFUSED, "no room", retry)
        assert (result.launch, result.line) == (LAUNCH, FENCE)
    assert shard.reads == []


def test_errors_of_the_receiver_come_back(serve, connect, api):
    def full(peer, opening):
        raise NoSpaceError("tmpfs is full", needed_bytes=opening.size_bytes)

    api.on_open = full
    shard = Shard.make()
    with pytest.raises(NoSpaceError) as caught:
        connect(serve()).put(shard.opening("a"), shard)
    assert caught.value.needed_bytes == shard.opening("a").size_bytes


def test_wrong_bytes_are_given_up_and_named(serve, connect, api):
    """The source's chunks are not as long as the receiver knows they must be."""
    shard = Shard.make(chunk_bytes=CHUNK // 2)
    # Not a CorruptShardError: that would say that the sender's own copy is bad.
    with pytest.raises(PeerError, match=r"refused the bytes of .* expected whole ones, found 131072 bytes of 0"):
        connect(serve()).put(shard.opening("a"), shard)
    assert api.receivers[0].ends == ["fail CorruptShardError"]


def test_another_digest_is_not_an_acknowledgement(serve, connect, api):
    shard = Shard.make()
    client = connect(serve())
    api.on_open = lambda peer, opening: PutHave(bytes(16))
    with pytest.raises(PeerError, match="found digest 0000"):
        client.put(shard.opening("a"), shard)


def test_a_receiver_that_wants_more_than_there_is(serve, connect, api):
    class Greedy:
        ready = PutReady(0, 1 << 40)
        ended = threading.Event()

        def suspend(self):
            self.ended.set()

    shard = Shard.make()
    api.on_open = lambda peer, opening: Greedy()
    with pytest.raises(PeerError, match="next_chunk=1099511627776"):
        connect(serve()).put(shard.opening("a"), shard)
    assert Greedy.ended.wait(WAIT)


def test_a_source_that_turns_out_bad(serve, connect, api):
    class Rotten(Shard):
        def read_chunk(self, index):
            if index == 5:
                raise CorruptShardError("chunk 5: crc32c", chunk=5)
            return super().read_chunk(index)

    good = Shard.make()
    shard = Rotten(good.head, good.data, good.chunk_bytes)
    client = connect(serve())
    with pytest.raises(CorruptShardError, match="chunk 5: crc32c"):
        client.put(shard.opening("a"), shard)
    assert api.receivers[0].ended.wait(WAIT)
    assert api.receivers[0].ends == ["suspend"], "what was good is kept"
    assert client.put(good.opening("a"), good).end is PutEnd.SEALED
    arrived(api.receivers[0], good)


def test_chunks_that_no_message_can_hold(serve, connect):
    shard = Shard.make(data_bytes=9 << 20, chunk_bytes=8 << 20)
    with pytest.raises(IncompatibleError, match="chunks of at most 4194304 bytes"):
        connect(serve()).put(shard.opening("a"), shard)


# --- streams that break, at each state


def opening_message(shard, sender="a", receiver="b"):
    return peer_pb2.PutRequest(open=convert.to_opening(shard.opening(sender), receiver)).SerializeToString()


def head_message(shard, offset=0, size=1 << 20):
    head = peer_pb2.PutHead(offset=offset, data=shard.head[offset : offset + size])
    return peer_pb2.PutRequest(head=head).SerializeToString()


def chunk_message(shard, *indexes):
    return encode_chunks(indexes[0], [shard.read_chunk(index) for index in indexes])


FINISH = peer_pb2.PutRequest(finish=peer_pb2.PutFinish()).SerializeToString()


class Stream:
    """A push by hand. The bytes of a stream are what somebody else sends."""

    def __init__(self, address, bundle):
        credentials = grpc.ssl_channel_credentials(bundle.ca_pem, bundle.key_pem, bundle.certificate_pem)
        self.channel = grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", DNS_NAME)])
        self.messages = queue.SimpleQueue()
        self.call = self.channel.stream_stream("/flashckpt.v1.Peer/Put")(iter(self.messages.get, None), timeout=60)

    def send(self, *messages):
        for message in messages:
            self.messages.put(message)

    def answer(self):
        return peer_pb2.PutResponse.FromString(next(self.call))

    def code(self):
        """Reads to the end; how it ended."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def close(self):
        self.messages.put(None)
        self.channel.close()


@pytest.fixture
def stream(bundles):
    streams = []

    def make(address, name="a"):
        streams.append(Stream(address, bundles[name]))
        return streams[-1]

    yield make
    for one in streams:
        one.close()


SHARD = Shard.make(head_bytes=3 << 20, data_bytes=8 * CHUNK)
HEAD = [head_message(SHARD, offset) for offset in range(0, 3 << 20, 1 << 20)]
OPEN = opening_message(SHARD)
STATES = {
    "nothing": [],
    "opened": [OPEN],
    "in the head": [OPEN, HEAD[0]],
    "after the head": [OPEN, *HEAD],
    "in the data": [OPEN, *HEAD, chunk_message(SHARD, 0, 1), chunk_message(SHARD, 2)],
    "before the finish": [OPEN, *HEAD, chunk_message(SHARD, *range(8))],
}


@pytest.mark.parametrize("how", ["half-close", "cancel", "connection"])
@pytest.mark.parametrize("state", STATES)
def test_a_stream_that_ends_early_is_resumed(serve, connect, api, stream, state, how):
    address = serve()
    broken = stream(address)
    broken.send(*STATES[state])
    if state != "nothing":
        assert broken.answer().WhichOneof("part") == "ready"
        receiver = api.receivers[0]
        for _ in SHARD.reads and range({"in the data": 3, "before the finish": 8}.get(state, 0)):
            assert receiver.took.acquire(timeout=WAIT)
    if how == "half-close":
        broken.send(None)
        code = broken.code()
        assert code is (grpc.StatusCode.OK if state == "nothing" else grpc.StatusCode.INTERNAL)
    elif how == "cancel":
        broken.call.cancel()
    else:
        broken.channel.close()
    if state == "nothing":
        assert api.calls == []
        return
    assert receiver.ended.wait(WAIT)
    assert receiver.ends == ["suspend"]
    kept = len(receiver.head) + len(receiver.have) * CHUNK
    result = connect(address).put(SHARD.opening("a"), SHARD)
    assert result.end is PutEnd.SEALED
    assert result.sent_bytes == len(SHARD.head) + len(SHARD.data) - kept
    arrived(receiver, SHARD)


WRONG = {
    "a head first": [HEAD[0]],
    "chunks first": [chunk_message(SHARD, 0)],
    "the finish first": [FINISH],
    "an empty message first": [b""],
    "no protobuf first": [b"\xff\xff\xff"],
    "opened twice": [OPEN, OPEN],
    "an empty message": [OPEN, b""],
    "no protobuf": [OPEN, b"\xff\xff\xff"],
    "no chunks in chunks": [OPEN, *HEAD, peer_pb2.PutRequest(chunks=peer_pb2.PutChunks()).SerializeToString()],
    "a head piece of 2 MiB": [OPEN, head_message(SHARD, 0, 2 << 20)],
    "a head piece twice": [OPEN, HEAD[0], HEAD[0]],
    "a chunk before the head": [OPEN, HEAD[0], chunk_message(SHARD, 0)],
    "a chunk too many": [OPEN, *HEAD, chunk_message(SHARD, *range(8)), encode_chunks(8, [bytes(CHUNK)])],
    "an index beyond all": [OPEN, *HEAD, encode_chunks((1 << 64) - 1, [b"x"])],
    "finished in the head": [OPEN, HEAD[0], FINISH],
    "finished in the data": [OPEN, *HEAD, chunk_message(SHARD, 0), FINISH],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_stream_that_breaks_the_rules_is_given_up(serve, api, stream, wrong):
    bad = stream(serve())
    bad.send(*WRONG[wrong])
    assert bad.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS)
    assert bool(api.receivers) == (WRONG[wrong][0] == OPEN)
    for receiver in api.receivers:
        assert receiver.ended.wait(WAIT)
        assert [end.split()[0] for end in receiver.ends] == ["fail"]


def test_nothing_is_taken_after_the_seal(serve, api, stream):
    late = stream(serve())
    late.send(OPEN, *HEAD, chunk_message(SHARD, *range(8)), FINISH, chunk_message(SHARD, 0))
    assert late.code() is grpc.StatusCode.OK
    arrived(api.receivers[0], SHARD)


def test_an_oversized_message_is_refused_unread(serve, api, stream):
    huge = stream(serve())
    huge.send(OPEN, *HEAD, encode_chunks(0, [bytes(5 << 20)]))
    assert huge.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert api.receivers[0].ended.wait(WAIT)
    assert api.receivers[0].ends == ["suspend"]
    assert not api.receivers[0].have


@pytest.mark.parametrize("state", STATES)
def test_a_stalled_stream_is_cancelled(serve, connect, api, stream, state):
    address = serve(limits=PeerLimits(idle_timeout=0.3))
    loris = stream(address)
    loris.send(*STATES[state])
    assert loris.code() is grpc.StatusCode.CANCELLED
    for receiver in api.receivers:
        assert receiver.ended.wait(WAIT)
        assert receiver.ends == ["suspend"]
    assert connect(address).put(SHARD.opening("a"), SHARD).end is PutEnd.SEALED


def test_a_slow_receiver_is_not_a_stalled_sender(serve, connect, api):
    api.gate_closed = True
    client = connect(serve(limits=PeerLimits(idle_timeout=0.2)))
    done = queue.Queue()
    thread = threading.Thread(target=lambda: done.put(client.put(SHARD.opening("a"), SHARD)))
    thread.start()
    assert api.opened.acquire(timeout=WAIT)
    receiver = api.receivers[0]
    assert receiver.took.acquire(timeout=WAIT)
    assert not receiver.ended.wait(1.0), "five times the idle timeout"
    receiver.gate.set()
    assert done.get(timeout=WAIT).end is PutEnd.SEALED
    thread.join()


def test_a_stalled_receiver_is_noticed_by_name(serve, connect, api):
    api.gate_closed = True
    address = serve()
    client = connect(address, stall_timeout=0.3)
    with pytest.raises(PeerError, match=rf"node 'b' at {address}: connected, but the push of .* for 0\.3 s") as caught:
        client.put(SHARD.opening("a"), SHARD)
    assert caught.value.peer == "b"
    api.receivers[0].gate.set()
    assert api.receivers[0].ended.wait(WAIT)
    assert api.receivers[0].ends == ["suspend"]


def test_a_receiver_that_does_not_open_is_noticed(serve, connect, api):
    asked, let_go = threading.Event(), threading.Event()

    def hang(peer, opening):
        asked.set()
        let_go.wait(WAIT)
        return PutRefused("late", True, None, None)

    api.on_open = hang
    client = connect(serve(), stall_timeout=60, open_timeout=0.3)
    with pytest.raises(PeerError, match=r"no progress for 0\.3 s"):
        client.put(SHARD.opening("a"), SHARD)
    assert asked.is_set()
    let_go.set()


def test_a_braked_sender_is_not_a_stalled_receiver(serve, connect, api, monkeypatch):
    monkeypatch.setattr(
        "flashckpt.move.transports.grpc.receive.PROGRESS_SECONDS", 0.0
    )  # of the patience below, not of 30 s

    class Brake:
        def take(self, size_bytes):
            time.sleep(0.25)  # what a throttle does

    shard = Shard.make(head_bytes=4096, data_bytes=4 << 20)
    result = connect(serve(), stall_timeout=0.2).put(shard.opening("a"), shard, Brake())
    assert result.end is PutEnd.SEALED


def test_a_push_has_a_deadline_where_one_is_given(serve, connect, api):
    api.gate_closed = True
    with pytest.raises(PeerError, match="Put of node 'b'"):
        connect(serve()).put(SHARD.opening("a"), SHARD, timeout=0.5)


def test_closing_the_client_ends_its_pushes(serve, connect, api):
    api.gate_closed = True
    client, failed = connect(serve()), queue.Queue()

    def push():
        try:
            client.put(SHARD.opening("a"), SHARD)
        except FlashError as error:
            failed.put(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert api.opened.acquire(timeout=WAIT)
    client.close()
    assert isinstance(failed.get(timeout=WAIT), PeerError)
    thread.join(WAIT)


def test_streams_are_counted_for_each_node_and_for_all(serve, connect, api, stream):
    address = serve(limits=PeerLimits(streams=3, streams_per_peer=2, gets=1, gets_per_peer=1, calls=9))
    silent = [stream(address), stream(address, "c")]
    for one, name in zip(silent, "ac", strict=True):
        one.send(opening_message(Shard.make(rank="ac".index(name)), name))
        assert one.answer().WhichOneof("part") == "ready"
    opened = stream(address)
    opened.send(opening_message(Shard.make(rank=2)))
    assert opened.answer().WhichOneof("part") == "ready"
    for name, reason in (("a", "at most 2 pushes per node"), ("c", "at most 3 pushes at a time")):
        more = stream(address, name)
        more.send(opening_message(Shard.make(rank=3), name))
        refused = more.answer().refused
        assert reason in refused.reason
        assert refused.retry
    assert connect(address).tell(beat("a"), WAIT), "messages still come through"
    for one in silent:
        one.send(None)
        one.code()
    free = stream(address, "c")
    free.send(opening_message(Shard.make(rank=3), "c"))
    assert free.answer().WhichOneof("part") == "ready"


def test_a_server_that_stops_suspends_its_pushes(serve, connect, api):
    api.gate_closed = True
    client, failed = connect(serve()), queue.Queue()

    def push():
        try:
            client.put(SHARD.opening("a"), SHARD)
        except FlashError as error:
            failed.put(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert api.opened.acquire(timeout=WAIT)
    assert api.receivers[0].took.acquire(timeout=WAIT)
    threading.Timer(0.2, api.receivers[0].gate.set).start()
    serve.servers[0].close()
    assert api.receivers[0].ends == ["suspend"], "before close() returns: the store may go then"
    assert isinstance(failed.get(timeout=WAIT), PeerError)
    thread.join(WAIT)
    again = connect(serve())
    api.receivers[0].gate.set()
    assert again.put(SHARD.opening("a"), SHARD).end is PutEnd.SEALED
    arrived(api.receivers[0], SHARD)


def test_closing_a_server_waits_for_a_stuck_push_only_so_long(serve, connect, api, monkeypatch, caplog):
    monkeypatch.setattr("flashckpt.move.transports.grpc.server.STRAGGLERS_SECONDS", 0.3)
    api.gate_closed = True
    client, ended = connect(serve()), queue.Queue()

    def push():
        try:
            client.put(SHARD.opening("a"), SHARD)
        except FlashError as error:
            ended.put(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert api.opened.acquire(timeout=WAIT)
    assert api.receivers[0].took.acquire(timeout=WAIT)
    serve.servers[0].close()
    assert "pushes or reads of ['a'] did not end within 0.3 s" in caplog.text
    assert isinstance(ended.get(timeout=WAIT), PeerError)
    thread.join(WAIT)


# --- processes that die or stand still

SERVER = """
import sys
from flashckpt.rpc.credentials import Bundle
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.rpc.settings import Keepalive
from tests.integration.rpc_world import JOB, MemoryPeer
api = MemoryPeer("b")
api.gate_closed = True
bundle = Bundle(*(open(name, "rb").read() for name in sys.argv[1:4]))
server = PeerServer(api, bundle, JOB, "b")
print(server.start("127.0.0.1:0"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(bundles, tmp_path):
    bundle = bundles["b"]
    paths = []
    for name in ("certificate_pem", "key_pem", "ca_pem"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(getattr(bundle, name))
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, *map(str, paths)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.address = f"127.0.0.1:{child.stdout.readline().strip()}"
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize("signal", [19, 9], ids=["stopped", "killed"])
def test_a_hung_or_dead_node_is_noticed_by_name(other_process, connect, signal):
    client = connect(other_process.address, keepalive=Keepalive(1.0, 1.0))
    client.tell(beat("a"), WAIT)
    shard, failed = Shard.make(data_bytes=64 << 20), queue.Queue()
    reading = threading.Event()

    def push():
        try:
            client.put(shard.opening("a"), shard, on_progress=lambda _: reading.set())
        except FlashError as error:
            failed.put(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert reading.wait(WAIT)
    os.kill(other_process.pid, signal)
    started = time.monotonic()
    with pytest.raises(PeerError, match=f"node 'b' at {other_process.address}"):
        client.tell(beat("a"), 1.0)
    error = failed.get(timeout=WAIT)
    waited = time.monotonic() - started
    thread.join(WAIT)
    assert isinstance(error, PeerError)
    assert error.peer == "b"
    assert f"node 'b' at {other_process.address}" in error.message
    assert waited < 10, "two seconds of keepalive, and what a loaded machine adds; far from the 30 of a stall"


def test_a_sender_that_dies_leaves_a_push_to_resume(serve, connect, api, bundles, tmp_path):
    code = (
        "import sys\n"
        "from flashckpt.rpc.credentials import Bundle\n"
        "from flashckpt.move.transports.grpc.client import PeerClient\n"
        "from tests.integration.rpc_world import JOB, Shard\n"
        "bundle = Bundle(*(open(name, 'rb').read() for name in sys.argv[2:5]))\n"
        "shard = Shard.make(data_bytes=16 << 20)\n"
        "PeerClient(sys.argv[1], bundle, JOB, 'b').put(shard.opening('a'), shard)\n"
    )
    paths = []
    for name in ("certificate_pem", "key_pem", "ca_pem"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(getattr(bundles["a"], name))
    address = serve()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, address, *map(str, paths)],
        env={**environment(), "FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": "mid_push=kill@12"},
    )
    try:
        assert child.wait(WAIT) == -9
    finally:
        child.kill()
        child.wait()
    receiver = api.receivers[0]
    assert receiver.ended.wait(WAIT)
    assert receiver.ends == ["suspend"]
    shard = Shard.make(data_bytes=16 << 20)
    result = connect(address).put(shard.opening("a"), shard)
    assert result.end is PutEnd.SEALED
    arrived(receiver, shard)
