"""The Unix socket: other users, callers without a live lease, and trainers that ask for too much."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from flashckpt.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    FencedError,
    FlashError,
    IncompatibleError,
    NoSpaceError,
)
from flashckpt.protocol.line import from_fence
from flashckpt.rpc.guard import ROLES, Role
from flashckpt.rpc.settings import TICKET_KEY, VERSION
from flashckpt.store.owner import Owner
from flashckpt.types import Launch, ShardId
from flashckpt.v1 import agent_pb2, common_pb2
from tests.fault.agents import JOB, wait_until
from tests.security.arena import ATTEMPT, CREDENTIALS, code_of


@pytest.fixture
def client(arena):
    with arena.client() as client:
        yield client


@pytest.fixture
def ticket(client):
    """Of a lease of this very process."""
    lease = client.hello(Owner.current(), 0, VERSION, JOB)
    yield lease.ticket
    with contextlib.suppress(DeniedError):  # where the test has ended it
        client.bye(lease.ticket)


@pytest.fixture
def channel(arena):
    with grpc.insecure_channel("unix:" + arena.socket_path(), options=[("grpc.default_authority", "agent")]) as channel:
        yield channel


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user(arena, run_python):
    """The socket is 0600 in a directory of 0700: neither is enough alone for somebody who can't pass both."""
    path = Path(arena.socket_path())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    code = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
for attempt in (lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[1]), lambda: os.listdir(sys.argv[2]),
                lambda: open(sys.argv[3], "rb"), lambda: os.kill(int(sys.argv[4]), 0),
                lambda: open(f"/proc/{sys.argv[4]}/environ", "rb").read(),
                lambda: os.listdir(f"/proc/{sys.argv[4]}/fd")):
    try:
        attempt()
    except PermissionError:
        print("refused")
"""
    found = run_python(code, path, path.parent, path.parent / "tls" / CREDENTIALS, arena.pids[0])
    assert found.stdout.split() == ["refused"] * 6, found.stderr


LEASED = sorted(method for method, roles in ROLES.items() if roles == {Role.TRAINER})


def test_method_by_role_on_the_socket(arena, channel):
    """Without a ticket, with a wrong one, and with what only looks like one: default deny."""
    tickets = [(), ((TICKET_KEY, b""),), ((TICKET_KEY, bytes(16)),), ((TICKET_KEY, b"x" * 4000),)]
    for method in LEASED:
        for metadata in tickets:
            call = channel.unary_unary(method)
            found = code_of(lambda call=call, metadata=metadata: call(b"", timeout=ATTEMPT, metadata=metadata))
            assert found is grpc.StatusCode.PERMISSION_DENIED, (method, metadata)
    for method in ("/flashckpt.v1.Peer/Hello", "/flashckpt.v1.Peer/Tell", "/flashckpt.v1.Peer/Put"):
        found = code_of(lambda method=method: channel.unary_unary(method)(b"", timeout=ATTEMPT))
        assert found is grpc.StatusCode.UNIMPLEMENTED
    unknown = channel.unary_unary("/flashckpt.v1.Agent/Delete")
    assert code_of(lambda: unknown(b"", timeout=ATTEMPT)) is grpc.StatusCode.PERMISSION_DENIED


def test_the_ticket_of_a_lease_that_ended(arena, client, ticket):
    generation = arena.launch.generation(1000)
    client.bye(ticket)
    for attempt in (
        lambda: client.bye(ticket),
        lambda: client.begin(ticket, arena.launch.session, None),
        lambda: client.acquire(ticket, ShardId(generation, 0, 3), 4096, "skip", 0.0),
        lambda: client.put_line(ticket, from_fence(-1, 1, 1), None),
        lambda: next(client.watch(ticket)),
    ):
        with pytest.raises(DeniedError):
            attempt()


def test_another_job_or_version(arena, client):
    for version, job in ((VERSION, "another"), (VERSION + 1, JOB), (0, JOB), (VERSION, "\x1b[2J")):
        with pytest.raises(IncompatibleError):
            client.hello(Owner.current(), 0, version, job)
    for job in ("", "x" * 257, "x" * (1 << 20)):
        with pytest.raises(FlashError):
            client.hello(Owner.current(), 0, VERSION, job)
    assert "\x1b" not in arena.log()


def test_an_older_launch_of_the_same_user(arena, client, ticket):
    ours = arena.launch.session
    older = dataclasses.replace(ours, launch=Launch(ours.launch.epoch - 1, ours.launch.nonce))
    with pytest.raises(FencedError):
        client.begin(ticket, older, None)
    with pytest.raises(FencedError):
        client.put_line(ticket, from_fence(-1, ours.launch.epoch - 1, 0), None)
    other = dataclasses.replace(ours, replicas=0)
    with pytest.raises(FencedError, match="other members or settings"):
        client.begin(ticket, other, None)


def test_a_thousand_and_more_hellos(arena, client):
    """The cap holds, status answers meanwhile, and the leases end with the process that they were for."""
    before = len(arena.status()["trainers"])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owner = owner_of(child.pid)
        granted, refused = 0, 0
        for number in range(1100):
            try:
                client.hello(owner, number, VERSION, JOB)
                granted += 1
            except BusyError:
                refused += 1
            if number % 100 == 0:
                assert client.status()["node"] == arena.node(0)
        assert (granted, refused) == (1024 - before, 1100 - 1024 + before)
    finally:
        child.kill()
        child.communicate()
    wait_until(lambda: len(arena.status()["trainers"]) == before, "leases of a process that is gone to end")


def owner_of(pid):
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return dataclasses.replace(Owner.current(), pid=pid, start_ticks=ticks)


def test_sessions_beyond_reason(arena, client, channel, ticket):
    ours = arena.launch.session
    newer = Launch(ours.launch.epoch + 1, 1)

    def begin(session):
        request = agent_pb2.BeginRequest(session=session).SerializeToString()
        metadata = ((TICKET_KEY, ticket),)
        return code_of(lambda: channel.unary_unary("/flashckpt.v1.Agent/Begin")(request, timeout=20, metadata=metadata))

    refused = grpc.StatusCode.FAILED_PRECONDITION
    launch = common_pb2.Launch(epoch=newer.epoch, nonce=newer.nonce)
    many = [agent_pb2.Member(node_id=f"n{i}", ranks=[i]) for i in range(70_000)]
    assert begin(agent_pb2.Session(launch=launch, world=70_000, members=many, strategy="ring")) is refused
    one = [agent_pb2.Member(node_id="node0", ranks=[0])]
    assert begin(agent_pb2.Session(launch=launch, world=1 << 24, members=one, strategy="ring")) is refused
    assert begin(agent_pb2.Session(launch=launch, world=(1 << 32) - 1, members=one, strategy="ring")) is refused
    twice = [agent_pb2.Member(node_id="node0", ranks=[0]), agent_pb2.Member(node_id="node0", ranks=[1])]
    assert begin(agent_pb2.Session(launch=launch, world=2, members=twice, strategy="ring")) is refused
    assert arena.status()["launch"]["epoch"] == ours.launch.epoch


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, 1 << 53])
def test_the_last_launch_of_all(arena, client, ticket, epoch):
    """An epoch that no later launch could be above, kept for good by whoever hears of it."""
    last = Launch(epoch, 1)
    node = dataclasses.replace(arena.launch.session.members[0], ranks=(0,))
    with pytest.raises(IncompatibleError, match="epoch of a launch: expected at most"):
        client.begin(ticket, dataclasses.replace(arena.launch.session, launch=last, world=1, members=(node,)), None)
    with pytest.raises(IncompatibleError, match="epoch of a launch: expected at most"):
        client.hello(Owner.current(), 0, VERSION, JOB, last, 1.0)
    with pytest.raises(IncompatibleError, match="epoch of a launch: expected at most"):
        client.put_line(ticket, from_fence(0, epoch, 1), None)
    assert arena.status()["launch"]["epoch"] == arena.launch.launch.epoch
    assert not arena.status()["fenced"]


def test_slots_larger_than_memory(arena, client, ticket):
    generation = arena.launch.generation(arena.step + 1, seq=99)
    for size_bytes in (1 << 40, 1 << 62, (1 << 63) - 1):
        with pytest.raises((NoSpaceError, ConfigError)):
            client.acquire(ticket, ShardId(generation, 0, 3), size_bytes, "skip", 1.0)
        with pytest.raises((NoSpaceError, ConfigError)):
            client.prepare(ticket, size_bytes, 1, 5.0)
