"""Keys and tickets after a full run: in the files that are for them, and nowhere else. And what must have no effect."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from flashckpt.agent.process import Options
from flashckpt.rpc.settings import VERSION
from flashckpt.store.owner import Owner
from tests.fault.agents import JOB
from tests.security.arena import CREDENTIALS, Push, tell


def forms_of(secret):
    """As bytes, as text, and as what prints bytes makes of them."""
    return [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret).encode()[2:-1]]


def key_forms(pem):
    key = serialization.load_pem_private_key(pem, None)
    number = key.private_numbers().private_value.to_bytes(32, "big")
    der = key.private_bytes(serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    lines = [line for line in pem.splitlines() if not line.startswith(b"-----")]
    return [*lines[1:], *forms_of(number), *forms_of(der)]  # the first line is the same for every key


def readable(pid):
    for name in ("cmdline", "environ"):
        try:
            yield f"/proc/{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()
        except (PermissionError, FileNotFoundError):
            continue


def everything_of(arena):
    """What anybody but the agent itself could read, with where it was."""
    for node in arena.world.nodes:
        for folder, _, names in os.walk(node.memory_dir):
            if os.path.basename(folder) == "tls":
                continue
            for name in names:
                path = Path(folder, name)
                if stat.S_ISREG(path.lstat().st_mode):
                    yield str(path), path.read_bytes()
    for path in arena.world.cluster.scratch.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()
    ranks = [rank.pid for launch in arena.world.launches for rank in launch.ranks]
    for pid in (*arena.pids, *ranks, os.getpid()):
        yield from readable(pid)
    for index in range(3):
        yield f"status of node {index}", repr(arena.world.status(index)).encode()


def test_no_key_and_no_ticket_lies_anywhere(arena, run_python):
    with arena.client() as client, arena.channel(arena.traitor()) as channel:
        lease = client.hello(Owner.current(), 0, VERSION, JOB)
        # Things go wrong, too: errors and their log lines are where secrets like to turn up.
        tell(channel, arena.tell_request())
        Push(channel, arena.opening(), b"\xff\xff").end()
        secrets = {"ticket": forms_of(lease.ticket)}
        for index in range(3):
            secrets[f"key of node {index}"] = key_forms(arena._bundle_of(index).key_pem)
        shown = run_python(
            "from flashckpt.cli.entry import run; run()",
            *("status", "--json", "--job", JOB, "--memory-dir", arena.world.nodes[0].memory_dir),
        )
        assert shown.returncode == 0, shown.stderr
        places = [*everything_of(arena), ("flashckpt status", (shown.stdout + shown.stderr).encode())]
        assert repr(lease).count("***") == 1
        client.bye(lease.ticket)
    assert sum("agent.log" in where for where, _ in places) >= 3
    assert sum("/cmdline" in where for where, _ in places) >= 7
    found = [(what, where) for where, data in places for what, forms in secrets.items() for one in forms if one in data]
    assert found == []


def test_where_keys_lie_nobody_else_can_look(arena):
    for node in arena.world.nodes:
        (folder,) = Path(node.memory_dir).glob("*/tls")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        names = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}
        assert CREDENTIALS in names
        assert set(names.values()) == {0o600}


START = """
import sys
from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, stop_agent
from flashckpt.errors import AgentError
options = Options(job="points", memory_dir=sys.argv[1], node_id="n")
try:
    ensure_agent(options, 20.0)
except AgentError as error:
    print("died")
else:
    stop_agent(options.memory_dir, options.job, 20.0)
    print("runs")
"""


@pytest.mark.parametrize(("testing", "expected"), [("yes", "runs"), ("1", "died")])
def test_failpoints_are_for_tests(memory_dir, run_python, testing, expected):
    points = {"FLASHCKPT_AGENT_FAILPOINTS": "mid_start=kill", "FLASHCKPT_FAILPOINTS": "before_slot=kill"}
    found = run_python(START, memory_dir, FLASHCKPT_TESTING=testing, **points)
    assert found.stdout.split() == [expected], found.stderr


def test_nothing_secret_is_an_argument():
    options = Options(job="j", memory_dir="/dev/shm/x", node_id="n", linger=1.0, budget_bytes=1, nice=3)
    known = {"job", "memory-dir", "node-id", "linger", "budget-bytes", "nice"}
    assert {one.split("=")[0].lstrip("-") for one in options.arguments()} == known
