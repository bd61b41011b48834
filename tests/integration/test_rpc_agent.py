"""The agent's service on a real Unix socket."""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import stat
import subprocess
import sys
import threading
import time

import grpc
import pytest

from flashckpt import errors
from flashckpt.errors import AgentError, BusyError, ConfigError, DeniedError, FlashError, IncompatibleError
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.rpc.agent_client import AgentClient
from flashckpt.rpc.agent_server import AgentServer
from flashckpt.rpc.api import (
    VERSION,
    GenerationProgress,
    Lease,
    Retrieved,
    RetrieveFailed,
    RetrieveProgress,
    ShardProblem,
    TrainerState,
)
from flashckpt.rpc.credentials import Bundle
from flashckpt.rpc.guard import ROLES, Role
from flashckpt.rpc.settings import Keepalive
from flashckpt.store.owner import Owner
from flashckpt.testing.processes import wait_stopped
from flashckpt.types import ChunkRange, Claimant, Held, Launch, Level, Member, Portion, Retrieval, Session, ShardId
from tests.conftest import environment
from tests.integration.rpc_world import GENERATION, LAUNCH, WAIT

TICKET = b"0123456789abcdef"
SHARD = ShardId(GENERATION, 1, 4)
BUNDLE = Bundle(b"certificate", b"key", b"ca")
SESSION = Session(
    LAUNCH,
    3,
    (Member("a", "10.0.0.1:7000", "rack-1", (0, 2)), Member("nöde", "[::1]:7", "", (1,))),
    1,
    "ring",
    2,
)
FENCE = from_fence(-1, 5, 6)
INVENTORY = NodeInventory(
    "node-a",
    (
        Holding(Held(SHARD, bytes(range(16)), 1 << 40, (1 << 32) - 1), Level.REPLICATED, verified=True),
        Holding(Held(ShardId(GENERATION, 0, 4), bytes(16), 4096, 0), Level.SEALED, verified=False),
    ),
    (from_fence(3, 1, 2), FENCE),
    3,
    ((ShardId(GENERATION, 3, 4), "chunk 7 is bad"),),
    (SESSION,),
    1,
)
RETRIEVALS = (
    Retrieval(SHARD, bytes(range(16)), 7, 1 << 40, True, (Portion((ChunkRange(0, 1 << 30),), ("a", "nöde")),)),
    Retrieval(
        ShardId(GENERATION, 0, 4),
        bytes(16),
        0,
        4096,
        False,
        (Portion((ChunkRange(1, 2), ChunkRange(3, 1)), ("a",)), Portion((), ("b",))),
    ),
)
PLACE = "f0123456789abcdef.w1-2-0a1b2c3d-4"
NEWS = [
    RetrieveProgress(0, 0),
    RetrieveProgress(5, 1 << 40),
    Retrieved(((SHARD, ""), (ShardId(GENERATION, 0, 4), PLACE))),
]


TRAINERS = (TrainerState(0, True), TrainerState(3, False, "rank 3 ended (signal 9) on node-a"))


class MemoryAgent:
    """An AgentApi that notes what it was called with."""

    def __init__(self):
        self.calls = []
        self.error = None
        self.lease = Lease(TICKET, os.getpid(), "node-a", 4096)
        self.news = queue.Queue()
        self.watch_ended = threading.Event()
        self.retrieve_ended = threading.Event()
        self.watched = threading.Event()

    def _note(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def lease_of(self, ticket):
        return self.lease if ticket == TICKET else None

    def hello(self, *arguments):
        self._note("hello", *arguments)
        return self.lease

    def listen(self, *arguments):
        self._note("listen", *arguments)
        return "10.0.0.1:7000"

    def claimants(self, *arguments):
        self._note("claimants", *arguments)
        return (CLAIMANT,)

    def begin(self, *arguments):
        self._note("begin", *arguments)

    def put_line(self, *arguments):
        self._note("put_line", *arguments)
        return FENCE

    def acquire(self, *arguments):
        self._note("acquire", *arguments)
        return (1 << 64) - 1

    def prepare(self, *arguments):
        self._note("prepare", *arguments)

    def sealed(self, *arguments):
        self._note("sealed", *arguments)

    def flush(self, *arguments):
        self._note("flush", *arguments)
        return GENERATION

    def void(self, *arguments):
        self._note("void", *arguments)

    def trainers(self, *arguments):
        self._note("trainers", *arguments)
        return TRAINERS

    def watch(self, *arguments):
        self._note("watch", *arguments)
        try:
            self.watched.set()
            while True:
                try:
                    item = self.news.get(timeout=0.05)
                except queue.Empty:
                    yield None
                    continue
                if item == "end":
                    return
                yield item
        finally:
            self.watch_ended.set()

    def inventory(self, *arguments):
        self._note("inventory", *arguments)
        return INVENTORY

    def retrieve(self, *arguments):
        self._note("retrieve", *arguments)
        try:
            yield from NEWS
            while True:
                yield None
                time.sleep(0.01)
        finally:
            self.retrieve_ended.set()

    def bye(self, *arguments):
        self._note("bye", *arguments)

    def status(self):
        self._note("status")
        return {"node": "node-a", "list": [1, 2.5, None, "ü"]}

    def stop(self, *arguments):
        self._note("stop", *arguments)


@pytest.fixture
def path(memory_dir):
    return os.path.join(memory_dir, "agent.sock")


@pytest.fixture
def api():
    return MemoryAgent()


@pytest.fixture
def server(api, path):
    with AgentServer(api, path) as server:
        yield server


@pytest.fixture
def client(server, path):
    with AgentClient(path) as client:
        yield client


OWNER = Owner(123, 456, "0a1b2c3d", 789)
CLAIMANT = Claimant(OWNER.identity, 123, 3, Launch(7, 8), 1.5e9, True)
# method of the client → its arguments, what it returns, what the agent is called with
CALLS = {
    "hello": (
        (OWNER, 3, VERSION, "run1", CLAIMANT.launch, 1.5e9, "another"),
        Lease(TICKET, os.getpid(), "node-a", 4096),
        None,
    ),
    "claimants": ((TICKET,), (CLAIMANT,), None),
    "listen": ((TICKET, BUNDLE, "eth0", 7000), "10.0.0.1:7000", (BUNDLE, "eth0", 7000)),
    "begin": ((TICKET, SESSION, BUNDLE), None, None),
    "put_line": ((TICKET, from_fence(3, 1, 2), GENERATION), FENCE, None),
    "acquire": ((TICKET, SHARD, 1 << 40, "skip", 2.5), (1 << 64) - 1, None),
    "prepare": ((TICKET, 4096, 3, 30.0), None, None),
    "sealed": ((TICKET, SHARD, (1 << 64) - 1, 5), None, None),
    "flush": ((None, 7), GENERATION, (None, 7, False)),
    "void": ((TICKET, GENERATION), None, None),
    "inventory": ((TICKET, 5.0), INVENTORY, (TICKET,)),
    "trainers": ((TICKET,), TRAINERS, None),
    "bye": ((TICKET,), None, None),
    "status": ((), {"node": "node-a", "list": [1, 2.5, None, "ü"]}, None),
    "stop": ((1.5,), None, None),
}


@pytest.mark.parametrize("method", CALLS)
def test_every_method_arrives_and_answers(client, api, method):
    arguments, result, expected = CALLS[method]
    assert getattr(client, method)(*arguments) == result
    assert api.calls == [(method, *(arguments if expected is None else expected))]


def test_what_may_be_absent_arrives_as_none(client, api):
    client.listen(TICKET, BUNDLE, None, 0)
    client.begin(TICKET, SESSION, None)
    client.put_line(TICKET, FENCE, None)
    assert api.calls == [
        ("listen", BUNDLE, None, 0),
        ("begin", TICKET, SESSION, None),
        ("put_line", TICKET, FENCE, None),
    ]


def test_a_retrieval_ends_with_its_caller(client, api):
    news = client.retrieve(TICKET, RETRIEVALS, 2.5)
    assert [next(news) for _ in NEWS] == NEWS
    assert api.calls == [("retrieve", TICKET, RETRIEVALS, 2.5)]
    assert not api.retrieve_ended.wait(0.2)
    news.close()
    assert api.retrieve_ended.wait(WAIT)


def test_a_retrieval_that_fails_says_why(client, api, monkeypatch):
    problem = ShardProblem(SHARD, (("a", "gone"), ("", "no\x1b[31m room")))
    monkeypatch.setattr(f"{__name__}.NEWS", [RetrieveFailed((problem,))])
    (found,) = next(client.retrieve(TICKET, RETRIEVALS, 2.5)).problems
    assert found == ShardProblem(SHARD, (("a", "gone"), ("", "no\\x1b[31m room")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"portions": ()},
        {"portions": (Portion((), ()),)},
        {"portions": (Portion((ChunkRange(0, 0),), ("a",)),)},
        {"portions": (Portion((ChunkRange(4, 2), ChunkRange(5, 1)), ("a",)),)},
        {"portions": (Portion((ChunkRange(4, 2), ChunkRange(0, 1)), ("a",)),)},
        {"portions": (Portion((ChunkRange((1 << 63) - 1, 2),), ("a",)),)},
        {"digest": b"short"},
        {"tag": 1 << 32},
        {"size_bytes": 0},
    ],
)
def test_retrievals_that_can_not_be(client, api, wrong):
    with pytest.raises(IncompatibleError):
        next(client.retrieve(TICKET, (dataclasses.replace(RETRIEVALS[0], **wrong),), 1.0))
    with pytest.raises(IncompatibleError, match="a shard each"):
        next(client.retrieve(TICKET, (RETRIEVALS[0], RETRIEVALS[0]), 1.0))
    assert api.calls == []


def test_a_plan_that_is_too_long_is_not_sent(client, api):
    ranges = tuple(ChunkRange(3 * i, 1) for i in range(1 << 20))
    with pytest.raises(ConfigError, match="at most"):
        next(client.retrieve(TICKET, (dataclasses.replace(RETRIEVALS[0], portions=(Portion(ranges, ("a",)),)),), 1.0))
    assert api.calls == []


def test_all_methods_of_the_service_were_tried():
    names = {method.rpartition("/")[2].lower() for method in ROLES if "Agent" in method}
    assert names == {name.replace("_", "") for name in CALLS} | {"watch", "retrieve"}


@pytest.mark.parametrize("method", [name for name in CALLS if name not in ("hello", "flush", "status", "stop")])
@pytest.mark.parametrize("ticket", [b"", b"0123456789abcdeX", TICKET + b"x", b"\x00"])
def test_without_a_live_ticket_nothing_happens(client, api, method, ticket):
    arguments, _, _ = CALLS[method]
    with pytest.raises(DeniedError) as caught:
        getattr(client, method)(*(ticket if argument == TICKET else argument for argument in arguments))
    assert api.calls == []
    if ticket:
        assert caught.value.lease == "unknown", "a trainer can tell that it has to say hello again"


def test_watching_needs_a_ticket(client, api):
    with pytest.raises(DeniedError):
        next(client.watch(b"nobody"))
    assert api.calls == []


@pytest.mark.parametrize(
    "error",
    [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and cls is not FlashError and issubclass(cls, FlashError)
    ],
)
def test_every_error_comes_back_as_what_it_is(client, api, error):
    api.error = error("expected a, found b", hint="do c", step=3, missing=("x", 1))
    with pytest.raises(error) as caught:
        client.acquire(TICKET, SHARD, 1, "wait", 1.0)
    assert type(caught.value) is error
    assert (caught.value.message, caught.value.hint) == ("expected a, found b", "do c")
    assert (caught.value.step, caught.value.missing) == (3, ("x", 1))


def test_a_bug_in_the_agent_is_an_internal_error(client, api, caplog):
    api.error = ZeroDivisionError("oops")
    with pytest.raises(errors.InternalError, match="ZeroDivisionError"):
        client.void(TICKET, GENERATION)
    assert "/flashckpt.v1.Agent/Void failed" in caplog.text


def test_news_arrive_in_order_until_the_agent_drains(client, api):
    sent = [GenerationProgress(GENERATION, Level.SEALED), GenerationProgress(GENERATION, Level.NONE, "rank 2 gave up")]
    for item in [*sent, "end"]:
        api.news.put(item)
    assert list(client.watch(TICKET)) == sent
    assert api.watch_ended.wait(WAIT)


def test_a_watcher_that_leaves_is_noticed(client, api):
    news = client.watch(TICKET)
    api.news.put(GenerationProgress(GENERATION, Level.SEALED))
    next(news)
    news.close()
    assert api.watch_ended.wait(WAIT)


def test_closing_the_client_ends_its_watch(client, api):
    failed = queue.Queue()

    def follow():
        try:
            list(client.watch(TICKET))
        except FlashError as error:
            failed.put(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert api.watched.wait(WAIT)
    client.close()
    thread.join(WAIT)
    assert isinstance(failed.get_nowait(), AgentError)
    with pytest.raises(AgentError, match=r"after close\(\)"):
        client.status()


def test_the_server_ends_watches_when_it_closes(server, client, api):
    ended = queue.Queue()

    def follow():
        try:
            ended.put(list(client.watch(TICKET)))
        except AgentError as error:
            ended.put(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert api.watched.wait(WAIT)
    server.close()
    assert isinstance(ended.get(timeout=WAIT), AgentError)
    thread.join(WAIT)


def test_the_socket_is_ours_alone(server, path):
    mode = os.stat(path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_the_umask_is_as_before(api, path):
    before = os.umask(0o022)
    try:
        with AgentServer(api, path):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_can_not_connect(server, path, run_python):
    os.chmod(os.path.dirname(path), 0o755)
    code = "import os, socket, sys; os.setuid(int(sys.argv[2])); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert "PermissionError" in run_python(code, path, 65534).stderr
    assert run_python(code, path, 0).returncode == 0, "the owner can"


def test_through_a_descriptor_of_the_directory(api, memory_dir):
    deep = os.path.join(memory_dir, "d" * 200)
    os.mkdir(deep)
    fd = os.open(deep, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/agent.sock"
        with AgentServer(api, path), AgentClient(path) as client:
            assert client.status()["node"] == "node-a"
    finally:
        os.close(fd)


def test_a_path_that_is_too_long(api, memory_dir):
    with pytest.raises(AgentError, match="at most 107 bytes"):
        AgentServer(api, os.path.join(memory_dir, "d" * 200))


def test_a_file_in_the_way(api, path):
    with open(path, "w"):
        pass
    with pytest.raises(AgentError, match=r"agent\.sock: expected to bind it"):
        AgentServer(api, path)


def test_a_dead_agents_socket_is_no_obstacle(api, path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    with AgentServer(api, path), AgentClient(path) as client:
        assert client.status()["node"] == "node-a"


def test_nobody_there(path):
    with (
        AgentClient(path, timeout=2.0) as client,
        pytest.raises(AgentError, match=r"agent\.sock \(waited \d+\.\d s\)"),
    ):
        client.status()


def test_a_restarted_agent_is_reconnected(api, path):
    with AgentClient(path) as client:
        for _ in range(3):
            with AgentServer(api, path):
                assert until_answered(client)["node"] == "node-a"


def until_answered(client):
    """As a trainer does: a call that meets the dying connection of the agent before is made again."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return client.status()
        except AgentError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_busy_error_keeps_its_fields(client, api):
    api.error = BusyError("the previous generation is not complete", missing=(1, 3), step=7)
    with pytest.raises(BusyError) as caught:
        client.acquire(TICKET, SHARD, 1, "skip", 0.0)
    assert (caught.value.missing, caught.value.step) == ((1, 3), 7)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("acquire", (TICKET, ShardId(GENERATION, 1, 1), 1, "skip", 1.0)),
        ("acquire", (TICKET, SHARD, 0, "skip", 1.0)),
        ("acquire", (TICKET, SHARD, 1, "maybe", 1.0)),
        ("prepare", (TICKET, 0, 1, 1.0)),
        ("listen", (TICKET, BUNDLE, None, 70_000)),
        ("begin", (TICKET, Session(LAUNCH, 2, (Member("a", "", "", (0,)),), 1, "ring", 1), None)),
        ("hello", (Owner(0, 0, "0a1b2c3d", 0), 0, VERSION, "run1")),
        ("hello", (OWNER, 0, VERSION, "")),
    ],
)
def test_calls_that_make_no_sense_are_refused(client, api, method, arguments):
    with pytest.raises(IncompatibleError):
        getattr(client, method)(*arguments)
    assert api.calls == []


def test_values_beyond_the_protocol_are_refused_before_they_are_sent(client, api):
    with pytest.raises(ConfigError, match="Prepare: expected values that fit"):
        client.prepare(TICKET, -1, 1, 1.0)
    assert api.calls == []


def raw(path, method, data, **options):
    with grpc.insecure_channel(f"unix:{path}") as channel:
        return channel.unary_unary(method)(data, timeout=WAIT, **options)


def test_methods_that_do_not_exist_are_denied(server, path, api):
    for method in ("/flashckpt.v1.Agent/Delete", "/flashckpt.v1.Peer/Delete", "/grpc.reflection.v1/X", "/x/y"):
        with pytest.raises(grpc.RpcError) as caught:
            raw(path, method, b"")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.RpcError) as caught:
        raw(path, "/flashckpt.v1.Peer/Tell", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "the other service is not on the socket"
    assert api.calls == []


def test_a_method_without_a_row_is_denied_although_the_server_has_it(client, api, monkeypatch):
    monkeypatch.delitem(ROLES, "/flashckpt.v1.Agent/Status")
    with pytest.raises(DeniedError):
        client.status()
    monkeypatch.setitem(ROLES, "/flashckpt.v1.Agent/Status", frozenset({Role.MEMBER}))
    with pytest.raises(DeniedError):
        client.status()
    assert api.calls == []


def test_bytes_that_are_no_message(server, path, api):
    with pytest.raises(grpc.RpcError) as caught:
        raw(path, "/flashckpt.v1.Agent/Hello", b"\xff" * 10)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert api.calls == []


def test_compressed_and_oversized_calls_are_refused(server, path, api):
    with pytest.raises(grpc.RpcError) as caught:
        raw(path, "/flashckpt.v1.Agent/Status", b"", compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        raw(path, "/flashckpt.v1.Agent/Hello", bytes(5 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert api.calls == []


STOPPED = """
import os, signal, sys
from tests.integration.test_rpc_agent import MemoryAgent
from flashckpt.rpc.agent_server import AgentServer
server = AgentServer(MemoryAgent(), sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stopped_agent_is_noticed(path):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STOPPED, path],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        with AgentClient(path, timeout=1.5, keepalive=Keepalive(3.0, 3.0)) as client:
            assert until_answered(client)["node"] == "node-a"
            os.kill(child.pid, 19)
            wait_stopped([child.pid], WAIT)  # it may still answer for a moment
            stopped = time.monotonic()
            with pytest.raises(AgentError, match=r"agent\.sock.*hung, stopped or overloaded"):
                client.status()
            with pytest.raises(AgentError, match=r"Watch of the agent at .*agent\.sock"):
                list(client.watch(TICKET))
            assert time.monotonic() - stopped < 30, "six seconds of keepalive, and what a loaded machine adds"
            os.kill(child.pid, 18)
            assert until_answered(client)["node"] == "node-a", "it goes on when the agent does"
    finally:
        child.kill()
        child.communicate()


FORKING = """
import os, sys, threading
from flashckpt.rpc.settings import prepare_trainer
prepare_trainer()
import torch.utils.data
from flashckpt.rpc.agent_client import AgentClient

client = AgentClient(sys.argv[1])
threading.Thread(target=lambda: list(client.watch(b"0123456789abcdef")), daemon=True).start()

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

stop = threading.Event()
def keep_calling():
    while not stop.is_set():
        client.status()
caller = threading.Thread(target=keep_calling)
caller.start()
for _ in range(5):
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert sorted(int(n) for batch in loader for n in batch) == list(range(64))
    assert client.status()["node"] == "node-a"
stop.set()
caller.join(20)
# A child that ends like a program, not by os._exit: it takes the client and gRPC's threadless state down.
pid = os.fork()
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert client.status()["node"] == "node-a"
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_trainer_may_fork_while_it_talks_to_its_agent(server, path, run_python):
    result = run_python(FORKING, path, PYTHONWARNINGS="ignore")
    assert (result.stdout, result.stderr) == ("done\n", "")
