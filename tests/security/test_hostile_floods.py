"""Too much of everything: connections, handshakes, calls, frames. Honest nodes save meanwhile."""

from __future__ import annotations

import contextlib
import queue
import resource
import socket
import struct
import threading
import time

import grpc
import pytest

from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.rpc.settings import PeerLimits
from flashckpt.v1 import peer_pb2
from tests.fault.agents import World, wait_until
from tests.integration import rpc_world
from tests.security import raw
from tests.security.arena import ATTEMPT, Arena, Push, Usage, code_of, tell

PUT, GET, TELL = "/flashckpt.v1.Peer/Put", "/flashckpt.v1.Peer/Get", "/flashckpt.v1.Peer/Tell"


@pytest.fixture
def connections():
    """Closed, with everything in them, when the test ends."""
    with contextlib.ExitStack() as stack:
        yield stack


def test_connections_that_say_nothing_or_little(arena, connections, tmp_path):
    """200 that never begin a handshake, 100 that send a byte of it now and then, 50 members that do so after it."""
    idle = [raw.connect(arena.endpoint) for _ in range(200)]
    slow = [raw.connect(arena.endpoint) for _ in range(100)]
    member = raw.context(arena.traitor(), tmp_path)
    proven = [raw.connect(arena.endpoint, member) for _ in range(50)]
    for one in (*idle, *slow, *proven):
        connections.callback(one.close)
    began = time.monotonic()
    pace, sent = threading.Event(), 0
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a ClientHello begins

    def dribble():
        nonlocal sent
        while not pace.wait(0.5):
            for one, text in ((slow, hello), (proven, raw.PREFACE)):
                for connection in one:
                    with contextlib.suppress(OSError):
                        connection.sendall(text[sent : sent + 1])
            sent += 1

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        arena.save()
        wait_until(lambda: arena.usage().fds <= arena.baseline.fds + 12, "all of them to be closed", 30.0)
    finally:
        pace.set()
        thread.join()
    assert time.monotonic() - began < 20
    assert sent > 2, "they kept sending until they were closed"


def test_two_thousand_connections_that_are_reset(arena):
    reset = struct.pack("ii", 1, 0)
    for number in range(2000):
        with socket.create_connection(arena.endpoint, timeout=ATTEMPT) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            if number % 2:
                one.sendall(b"\x16\x03\x01")
        if number == 1000:
            arena.save()


def test_many_handshakes_at_once():
    """What handshakes of one moment share must not be replaced under them. On a cluster of its own: a flood like this
    leaves more in the agent's heap than all other attacks together (docs/threat-model.md)."""
    with Arena() as arena:
        end, made = time.monotonic() + 4.0, []

        def knock():
            while time.monotonic() < end:
                with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                    some = [stack.enter_context(raw.connect(arena.endpoint)) for _ in range(20)]
                    for one in some:
                        one.sendall(b"\x16\x03\x01")
                    made.append(len(some))

        threads = [threading.Thread(target=knock) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(made) > 500
        assert [arena.world.agent_pid(index) for index in range(3)] == arena.pids, "an agent died"
        arena.save()
        arena.world.check()


@pytest.mark.skipif(Usage.of("self").fds == 0, reason="needs to count descriptors")
def test_more_connections_than_descriptors():
    """Without a cap the agent could not write its next record, and an agent that can't keep a decision ends."""
    with World(2) as world, contextlib.ExitStack() as connections:
        pids = [world.agent_pid(index) for index in range(2)]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (192, 256))
        launch = world.launch()
        launch.save(1)
        host, port = launch.session.members[0].address.rsplit(":", 1)
        for _ in range(600):
            connections.enter_context(socket.create_connection((host, int(port)), timeout=ATTEMPT))
        launch.save(2)
        assert Usage.of(pids[0]).fds < 192
        wait_until(lambda: Usage.of(pids[0]).fds < 60, "strangers to be sent away", 30.0)
        launch.save(3)
        assert [world.agent_pid(index) for index in range(2)] == pids
        world.check()


def silent_calls(channel, method, count):
    calls = []
    for _ in range(count):
        never = queue.SimpleQueue()
        calls.append((never, channel.stream_stream(method)(iter(never.get, None), timeout=60)))
    return calls


@pytest.mark.parametrize("method", [TELL, PUT, GET])
def test_calls_that_stay_silent(arena, method):
    """More than the agent serves at a time, of a node with a certificate. Each would wait for its message for ever."""
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(5):
            channel = stack.enter_context(arena.channel(arena.guest()))
            calls += silent_calls(channel, method, 32)
        try:
            for _ in range(3):
                arena.save()
        finally:
            for never, call in calls:
                never.put(None)
                call.cancel()


def test_answers_that_nobody_reads(arena, connections, tmp_path):
    """Flow control with a window of nothing: the agent's answers can't leave."""
    tls = raw.context(arena.guest(), tmp_path)
    opening = arena.opening(sender="guest")
    for _ in range(4):
        one = connections.enter_context(raw.connect(arena.endpoint, tls))
        one.sendall(raw.PREFACE + raw.settings(window=0))
        for stream in range(1, 64, 2):
            one.sendall(
                raw.frame(raw.HEADERS, raw.END_HEADERS, stream, raw.headers(PUT))
                + raw.frame(raw.DATA, 0, stream, raw.message(opening))
            )
    for _ in range(3):
        arena.save()


def test_an_unread_answer_ends_its_push(tmp_path, connections):
    """The same with a server whose patience is shorter than a test's, and than gRPC's own with such a client."""
    job = rpc_world.Credentials()
    api = rpc_world.MemoryPeer("b")
    limits = PeerLimits(idle_timeout=0.5)
    with PeerServer(api, job.bundle("b"), rpc_world.JOB, "b", limits=limits) as server:
        port = server.start("127.0.0.1:0")
        one = connections.enter_context(raw.connect(("127.0.0.1", port), raw.context(job.bundle("a"), tmp_path)))
        shard = rpc_world.Shard.make(head_bytes=1000, data_bytes=0)
        opening = peer_pb2.PutRequest(open=rpc_world_opening(shard)).SerializeToString()
        one.sendall(
            raw.PREFACE
            + raw.settings(window=0)
            + raw.frame(raw.HEADERS, raw.END_HEADERS, 1, raw.headers(PUT))
            + raw.frame(raw.DATA, 0, 1, raw.message(opening))
            + raw.frame(raw.SETTINGS, raw.ACK)  # else gRPC hangs up by itself, after five seconds
        )
        assert api.opened.acquire(timeout=rpc_world.WAIT)
        assert api.receivers[0].ended.wait(4.0), "the clock runs while an answer can't leave"
        assert api.receivers[0].ends == ["suspend"]


def rpc_world_opening(shard):
    from flashckpt.rpc import convert

    return convert.to_opening(shard.opening("a"), "b")


def test_headers_without_an_end(arena, connections, tmp_path):
    tls = raw.context(arena.guest(), tmp_path)
    big = raw.headers(TELL, *((b"x-%d" % number, b"v" * 1000) for number in range(64)))
    one = connections.enter_context(raw.connect(arena.endpoint, tls))
    with contextlib.suppress(OSError):  # it may hang up before all is sent
        one.sendall(raw.PREFACE + raw.settings())
        for stream in range(1, 201, 2):
            parts = [big[at : at + 16000] for at in range(0, len(big), 16000)]
            one.sendall(raw.frame(raw.HEADERS, 0, stream, parts[0]))
            for part in parts[1:-1]:
                one.sendall(raw.frame(raw.CONTINUATION, 0, stream, part))
            one.sendall(raw.frame(raw.CONTINUATION, raw.END_HEADERS, stream, parts[-1]))
    flood = connections.enter_context(raw.connect(arena.endpoint, tls))
    with contextlib.suppress(OSError):
        flood.sendall(raw.PREFACE + raw.settings() + raw.frame(raw.HEADERS, 0, 1, raw.headers(TELL)))
        for number in range(2000):  # 16 MiB of headers of one call
            flood.sendall(
                raw.frame(raw.CONTINUATION, 0, 1, b"\x10\x04x%03d\x7f\xc9\x3e" % (number % 1000) + b"v" * 8008)
            )
    arena.save()
    with arena.channel(arena.traitor()) as channel:
        found = code_of(lambda: tell(channel, arena.tell_request(), metadata=(("x-big", "v" * 20_000),)))
        assert found is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert tell(channel, arena.tell_request()).refused == ""


def test_pings_without_an_end(arena, connections, tmp_path):
    one = connections.enter_context(raw.connect(arena.endpoint, raw.context(arena.traitor(), tmp_path)))
    with contextlib.suppress(OSError):
        one.sendall(raw.PREFACE + raw.settings())
        for _ in range(2000):
            one.sendall(raw.frame(raw.PING, payload=bytes(8)) * 10)
    assert raw.is_closed(one), "too many pings"


def test_calls_that_are_reset_at_once(arena, connections, tmp_path):
    """HTTP/2 rapid reset: each counts as ended before the agent has begun with it."""
    one = connections.enter_context(raw.connect(arena.endpoint, raw.context(arena.traitor(), tmp_path)))
    head, request = raw.headers(TELL), raw.message(arena.tell_request().SerializeToString())
    cancel = struct.pack(">I", 8)
    with contextlib.suppress(OSError):
        one.sendall(raw.PREFACE + raw.settings())
        for stream in range(1, 4001, 2):
            one.sendall(
                raw.frame(raw.HEADERS, raw.END_HEADERS, stream, head)
                + raw.frame(raw.DATA, raw.END_STREAM, stream, request)
                + raw.frame(raw.RST_STREAM, 0, stream, cancel)
            )
            if stream == 2001:
                arena.save()


def test_frames_that_are_none(arena, connections, tmp_path):
    tls = raw.context(arena.traitor(), tmp_path)
    for noise in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        raw.PREFACE + b"\xff" * 1000,
        raw.PREFACE + raw.settings() + raw.frame(raw.HEADERS, raw.END_HEADERS, 1, b"\x7f" * 100),
    ):
        one = connections.enter_context(raw.connect(arena.endpoint, tls))
        with contextlib.suppress(OSError):
            one.sendall(noise)
        assert raw.is_closed(one)


def test_openings_and_cancels(arena):
    with arena.channel(arena.traitor()) as channel:
        opening = arena.opening()
        for _ in range(200):
            push = Push(channel, opening)
            push.close()
        arena.save()
