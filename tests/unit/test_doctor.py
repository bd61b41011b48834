"""Checks of a node: each finding from facts alone, then one real look at this machine."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading

import pytest
from click.testing import CliRunner

from flashckpt import __version__
from flashckpt.cli.entry import group
from flashckpt.config import CheckpointConfig, resolve
from flashckpt.doctor.disk import DiskFacts, judge_disk, look_at_disk
from flashckpt.doctor.finding import Grade, fail, ok, warn, worst
from flashckpt.doctor.host import HostFacts, judge_host, look_at_host
from flashckpt.doctor.memory import MemoryFacts, MemoryWish, judge_memory, look_at_memory
from flashckpt.doctor.network import AgentFacts, NetworkFacts, judge_network, look_at_network
from flashckpt.rpc.credentials import Authority, make_request
from flashckpt.store.room import CgroupRoom, Room

GIB = 1 << 30


def room(**changes):
    return Room(
        **{
            "fs_type": "tmpfs",
            "mount_point": "/dev/shm",
            "fs_total_bytes": 64 * GIB,
            "fs_free_bytes": 60 * GIB,
            "fs_free_inodes": 10_000,
            "cgroup": None,
            "memory_total_bytes": 128 * GIB,
            "memory_available_bytes": 100 * GIB,
            **changes,
        }
    )


def memory(**changes):
    return MemoryFacts(
        **{"path": "/dev/shm/x", "mount_point": "/dev/shm", "huge_page_bytes": 2 << 20, "room": room(), **changes}
    )


def only(findings, check):
    (found,) = [one for one in findings if one.check == check]
    return found


# --- memory


def test_a_node_that_is_well():
    found = list(judge_memory(memory(), MemoryWish(10 * GIB)))
    assert {one.state for one in found} == {Grade.OK}
    assert all(not one.advice for one in found)
    assert only(found, "memory.room").found.startswith("4 times 10 GiB (keep_memory 1, replicas 1): needs 40 GiB")


@pytest.mark.parametrize(
    ("changes", "check", "state", "said"),
    [
        ({"problem": "/x: No such device"}, "memory.directory", Grade.FAIL, "No such device"),
        ({"fs_type": "ext4"}, "memory.directory", Grade.FAIL, "is on ext4"),
        ({"uid": 7}, "memory.access", Grade.FAIL, "belongs to uid 7"),
        ({"mode": 0o755}, "memory.access", Grade.FAIL, "mode 0755"),
        ({"exists": False}, "memory.access", Grade.OK, "not there yet"),
        ({"exists": False, "may_create": False}, "memory.access", Grade.FAIL, "may not make it"),
        ({"huge_page_bytes": 0}, "memory.huge_pages", Grade.WARN, "many times slower"),
        ({"swap_total_bytes": GIB}, "memory.swap", Grade.WARN, "1 GiB of swap"),
        ({"swap_total_bytes": GIB, "options": ("rw", "noswap")}, "memory.swap", Grade.OK, "noswap"),
        ({"removes_ipc": True, "euid": 1000, "uid": 1000}, "memory.cleaner", Grade.WARN, "RemoveIPC"),
        ({"removes_ipc": True, "euid": 1000, "uid": 1000, "path": "/mnt/x"}, "memory.cleaner", Grade.OK, ""),
        ({"room": room(fs_free_bytes=30 * GIB)}, "memory.room", Grade.FAIL, "tmpfs can't hold it"),
        (
            {"room": room(fs_free_bytes=30 * GIB), "held_bytes": 20 * GIB},
            "memory.room",
            Grade.OK,
            "20 GiB of it",
        ),
        ({"room": room(memory_available_bytes=40 * GIB)}, "memory.room", Grade.FAIL, "the machine's memory"),
        ({"room": room(cgroup=CgroupRoom("/c", 100 * GIB, 70 * GIB))}, "memory.room", Grade.FAIL, "memory cgroup"),
        ({"room": room(cgroup=CgroupRoom("/c", 100 * GIB, 7 * GIB))}, "memory.cgroup", Grade.OK, "7 GiB of 100 GiB"),
        (
            {"room": room(cgroup=CgroupRoom("/c", 50 * GIB, 1 * GIB))},
            "memory.cgroup",
            Grade.WARN,
            "more than the limit",
        ),
    ],
)
def test_memory(changes, check, state, said):
    found = only(judge_memory(memory(**changes), MemoryWish(10 * GIB)), check)
    assert (found.state, said in found.found) == (state, True), found
    assert bool(found.advice) == (state is not Grade.OK)


@pytest.mark.parametrize(
    ("wish", "copies"),
    [
        (MemoryWish(1), 4),
        (MemoryWish(1, replicas=0), 2),
        (MemoryWish(1, keep_memory=3), 8),
        (MemoryWish(1, replicas=2), 6),
        (MemoryWish(1, persists=True), 6),
    ],
)
def test_how_often_the_state_lies_here(wish, copies):
    assert wish.copies == copies


def test_without_a_size_the_room_is_told_and_the_size_asked_for():
    found = only(judge_memory(memory(), MemoryWish()), "memory.room")
    assert found.state is Grade.WARN
    assert "60 GiB free" in found.found
    assert "--size" in found.advice


# --- host


def host(**changes):
    return HostFacts(
        **{
            "fd_soft": 65536,
            "fd_hard": 65536,
            "wall_seconds": 1.8e9,
            "synchronised": True,
            "native": True,
            "kernel": "sse42",
            "kernels": ("sse42", "portable"),
            "torch": "2.13.0+cpu",
            "environ": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            **changes,
        }
    )


def test_a_host_that_is_well():
    assert {one.state for one in judge_host(host())} == {Grade.OK}


@pytest.mark.parametrize(
    ("changes", "check", "state"),
    [
        ({"fd_soft": 256, "fd_hard": 512}, "host.descriptors", Grade.FAIL),
        ({"fd_soft": 1024}, "host.descriptors", Grade.WARN),
        ({"fd_soft": resource.RLIM_INFINITY, "fd_hard": resource.RLIM_INFINITY}, "host.descriptors", Grade.OK),
        ({"wall_seconds": 0.0}, "host.clock", Grade.FAIL),
        ({"synchronised": False}, "host.clock", Grade.WARN),
        ({"synchronised": None}, "host.clock", Grade.OK),
        ({"native": False}, "host.native", Grade.FAIL),
        ({"torch": None}, "host.torch", Grade.WARN),
        ({"torch": "2.6.1"}, "host.torch", Grade.FAIL),
        ({"torch": "2.10.0"}, "host.torch", Grade.OK),
        ({"environ": {}}, "host.torchrun", Grade.WARN),
        ({"environ": {"TORCHELASTIC_MAX_RESTARTS": "3"}}, "host.torchrun", Grade.WARN),
        ({"environ": {"TORCHELASTIC_MAX_RESTARTS": "0"}}, "host.torchrun", Grade.OK),
        ({"environ": {"FLASHCKPT_DISABLE": "1"}}, "host.disabled", Grade.FAIL),
        ({"environ": {"GRPC_ENABLE_FORK_SUPPORT": "true"}}, "host.fork", Grade.WARN),
    ],
)
def test_host(changes, check, state):
    found = only(judge_host(host(**changes)), check)
    assert found.state is state, found
    assert bool(found.advice) == (state is not Grade.OK)


# --- agent and network


def status(**changes):
    peer = {"node": "b", "address": "10.0.0.2:7000", "state": "up", "silent_seconds": None, "problem": ""}
    return {
        "pid": 7,
        "node": "a",
        "address": "10.0.0.1:7000",
        "fenced": False,
        "persist": None,
        "peers": [peer],
        "replicas": {"asked": 1, "effective": 1},
        "placement": "",
        **changes,
    }


def network(agent=None, **changes):
    facts = {
        "agent": agent or AgentFacts(True, __version__, status()),
        "host": "10.0.0.1",
        "host_problem": "",
        "port": 0,
        "port_problem": "",
        "tls": None,
        "tls_problem": "",
        "tls_days": None,
        "unreachable": {},
    }
    return NetworkFacts(**{**facts, **changes})


def test_a_network_that_is_well():
    found = list(judge_network(network()))
    assert {one.state for one in found} == {Grade.OK}
    assert only(found, "network.peers").found == "all 1 other nodes answer"
    assert {one.state for one in judge_network(network(AgentFacts(False)))} == {Grade.OK}


DOWN = {"node": "b", "address": "x:1", "state": "down", "silent_seconds": 12.0, "problem": "refused"}


@pytest.mark.parametrize(
    ("facts", "check", "state", "said"),
    [
        (network(AgentFacts(False, problem="not ours")), "agent.runs", Grade.FAIL, "not ours"),
        (
            network(AgentFacts(True, __version__, None, "deadline")),
            "agent.runs",
            Grade.FAIL,
            "answer: deadline",
        ),
        (network(AgentFacts(True, "0.0.1", status())), "agent.version", Grade.FAIL, "it is 0.0.1"),
        (network(AgentFacts(True, __version__, status(fenced=True))), "agent.launch", Grade.WARN, "taken over"),
        (
            network(AgentFacts(True, __version__, status(persist={"problem": "disk full"}))),
            "agent.flush",
            Grade.WARN,
            "disk full",
        ),
        (network(AgentFacts(True, __version__, status(peers=[DOWN]))), "network.peers", Grade.WARN, "down for 12 s"),
        (network(unreachable={"b": "timed out"}), "network.peers", Grade.FAIL, "b at 10.0.0.2:7000: timed out"),
        (
            network(AgentFacts(True, __version__, status(replicas={"asked": 2, "effective": 1}))),
            "network.replicas",
            Grade.WARN,
            "1 of 2 copies",
        ),
        (network(host=None, host_problem="none but loopback"), "network.address", Grade.WARN, "none but"),
        (network(host="127.0.0.1"), "network.address", Grade.WARN, "loopback"),
        (network(port=7000, port_problem="in use"), "network.port", Grade.FAIL, "port 7000: in use"),
        (network(port=7000), "network.port", Grade.OK, "port 7000"),
        (network(tls_problem="/k: mode 0644"), "network.certificates", Grade.FAIL, "mode 0644"),
        (network(tls=("c", "k", "ca"), tls_days=3.0), "network.certificates", Grade.WARN, "3 more days"),
        (network(tls=("c", "k", "ca"), tls_days=300.0), "network.certificates", Grade.OK, "300 more days"),
    ],
)
def test_network(facts, check, state, said):
    found = only(judge_network(facts), check)
    assert (found.state, said in found.found) == (state, True), found
    assert bool(found.advice) == (state is not Grade.OK)


def settings_of(memory_dir, **environ):
    return resolve(CheckpointConfig(job="job", memory_dir=str(memory_dir), node_id="n"), environ)


def test_a_port_that_somebody_has(memory_dir):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        facts = look_at_network(settings_of(memory_dir, FLASHCKPT_PORT=str(port)))
    assert "in use" in facts.port_problem
    assert look_at_network(settings_of(memory_dir, FLASHCKPT_PORT=str(port))).port_problem == ""


def test_certificates_of_the_operators(memory_dir, tmp_path):
    key, request = make_request("job", "n")
    authority = Authority.create("job")
    files = {"CERT": authority.sign(request, "job", "n"), "KEY": key, "CA": authority.certificate_pem}
    environ = {}
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o600)
        environ[f"FLASHCKPT_TLS_{name}"] = str(path)
    facts = look_at_network(settings_of(memory_dir, **environ))
    assert (facts.tls_problem, facts.tls_days is not None and facts.tls_days > 0) == ("", True)
    (tmp_path / "KEY").chmod(0o644)
    assert "0644" in look_at_network(settings_of(memory_dir, **environ)).tls_problem
    (tmp_path / "KEY").chmod(0o600)
    other = {**environ, "FLASHCKPT_JOB": "job"}
    wrong = resolve(CheckpointConfig(job="job", memory_dir=str(memory_dir), node_id="other"), other)
    assert "expected job 'job', node 'other'" in look_at_network(wrong).tls_problem


# --- persist_dir


@pytest.mark.parametrize(
    ("facts", "size", "check", "state"),
    [
        (None, None, "persist.directory", Grade.WARN),
        (DiskFacts("/p", problem="denied"), None, "persist.directory", Grade.FAIL),
        (DiskFacts("/p", fs_type="ext4"), None, "persist.directory", Grade.OK),
        (DiskFacts("/p", fs_type="tmpfs"), None, "persist.directory", Grade.FAIL),
        (DiskFacts("/p", fs_type="nfs4", same_as_memory=True), None, "persist.directory", Grade.FAIL),
        (DiskFacts("s3://b/p"), 5, "persist.directory", Grade.OK),
        (DiskFacts("/p", exists=False, free_bytes=1), None, "persist.directory", Grade.OK),
        (DiskFacts("/p", fs_type="ext4", write_seconds=9.0), None, "persist.speed", Grade.WARN),
        (DiskFacts("/p", fs_type="ext4", free_bytes=29), 10, "persist.room", Grade.WARN),
        (DiskFacts("/p", fs_type="ext4", free_bytes=9), 10, "persist.room", Grade.FAIL),
        (DiskFacts("/p", fs_type="ext4", free_bytes=30), 10, "persist.room", Grade.OK),
    ],
)
def test_disk(facts, size, check, state):
    found = only(judge_disk(facts, size, 2), check)
    assert found.state is state, found
    assert bool(found.advice) == (state is not Grade.OK)


def test_a_look_at_a_directory_leaves_nothing(tmp_path, memory_dir):
    facts = look_at_disk(str(tmp_path), str(memory_dir))
    assert (facts.problem, facts.exists, os.listdir(tmp_path)) == ("", True, [])
    facts = look_at_disk(str(tmp_path / "a" / "b"), str(memory_dir))
    assert (facts.problem, facts.exists, os.listdir(tmp_path)) == ("", False, [])
    assert look_at_disk("nosuchprotocol://bucket/x", str(memory_dir)).problem
    (tmp_path / "file").write_text("x")
    assert look_at_disk(str(tmp_path / "file"), str(memory_dir)).problem
    assert look_at_disk(str(memory_dir), str(memory_dir)).same_as_memory


def test_a_disk_that_hangs(memory_dir, tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr("flashckpt.doctor.disk._look", lambda *_: hangs.wait(60))
    assert "hangs" in look_at_disk(str(tmp_path), str(memory_dir), timeout=0.2).problem
    hangs.set()


# --- as a whole


def doctor(*arguments, **environ):
    env = {"FLASHCKPT_JOB": None, "FLASHCKPT_PORT": None, "FLASHCKPT_DISABLE": None, **environ}
    return CliRunner().invoke(group, ["doctor", *arguments], env=env, catch_exceptions=False)


def test_the_command_on_this_machine(memory_dir, tmp_path):
    arguments = ["--job", "job", "--memory-dir", str(memory_dir), "--persist-dir", str(tmp_path), "--size", "1MiB"]
    found = doctor(*arguments, "--json")
    content = json.loads(found.stdout)
    assert content["schema"] == "flashckpt.doctor/v1"
    checks = {one["check"]: one for one in content["findings"]}
    assert checks["memory.directory"]["state"] == checks["memory.room"]["state"] == "ok"
    assert checks["host.native"]["state"] == checks["agent.runs"]["state"] == "ok"
    assert {"memory.swap", "host.clock", "network.address", "persist.directory", "persist.room"} <= checks.keys()
    expected = 1 if content["state"] == "fail" else 0
    assert found.exit_code == expected
    assert doctor(*arguments).exit_code == expected


def test_what_fails_is_the_exit_code(memory_dir, tmp_path):
    here = ["--job", "job", "--memory-dir"]
    assert doctor(*here, str(tmp_path)).exit_code == 1  # not a tmpfs
    found = doctor(*here, str(memory_dir), "--size", "9999T")
    assert found.exit_code == 1
    assert "can't hold it" in found.stdout
    assert doctor(*here, str(memory_dir), "--size", "much").exit_code == 2


def test_a_look_at_this_host_and_its_memory(memory_dir):
    assert look_at_host({"FLASHCKPT_DISABLE": "1", "SECRET": "x"}).environ == {"FLASHCKPT_DISABLE": "1"}
    facts = look_at_memory(str(memory_dir))
    assert (facts.problem, facts.exists, facts.euid) == ("", True, os.geteuid())
    assert (
        look_at_memory(str(memory_dir / "a" / "b") if hasattr(memory_dir, "parent") else f"{memory_dir}/a/b").exists
        is False
    )
    assert worst([ok("a", ""), warn("b", "", "x")]) is Grade.WARN
    assert worst([fail("a", "", "x"), warn("b", "", "x")]) is Grade.FAIL
