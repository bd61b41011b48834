"""The cluster that other tests stand on: its nodes are apart, its faults take place, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flashckpt import native
from flashckpt.errors import ConfigError, DeadlineError, NotFoundError, PeerError
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import encode_header, geometry, seal_bytes
from flashckpt.protocol.line import from_fence
from flashckpt.store.mounts import read_mounts
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster, Proxy
from flashckpt.testing.check import broken_promises, newest_in_force
from flashckpt.testing.launch import LAUNCH_MARK
from flashckpt.testing.places import MEMORY_ROOT, find_stale, scratch_root
from flashckpt.testing.processes import look, state_of
from flashckpt.types import Generation, Layout, Record, ShardId
from tests.conftest import environment

NO_NETNS = Cluster.available("netns")
needs_netns = [pytest.mark.root, pytest.mark.skipif(bool(NO_NETNS), reason=NO_NETNS or "netns is available")]
NETNS = pytest.param("netns", marks=needs_netns)
KINDS = ["loopback", NETNS]
PYTHON = [sys.executable, "-S", "-c"]
# As an agent does: detached from everything, and with nothing in its environment that tells whose it is.
DETACH = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        argv = [sys.executable, "-S", "-c", "import signal; signal.pause()", "--memory-dir=" + sys.argv[1]]
        os.execve(argv[0], argv, {})
    os._exit(0)
os.wait()
"""
HOLD_LOCK = """
import os, signal
from flashckpt.agent.lock import AgentLock
from flashckpt.store.directory import open_directory
lock = AgentLock(open_directory(os.environ["FLASHCKPT_MEMORY_DIR"], os.environ["FLASHCKPT_JOB"]))
lock.acquire()
print("held", flush=True)
signal.pause()
"""


def wait_until(condition, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
    return result


def start_detached(node):
    done = node.run([*PYTHON, DETACH, node.memory_dir])
    assert done.returncode == 0, done.stderr
    return wait_until(
        lambda: [seen.pid for seen in look() if f"--memory-dir={node.memory_dir}".encode() in seen.arguments]
    )


def traces(memory, scratch, networks):
    """Whatever is left of a cluster."""
    found = [str(path) for path in (memory, scratch) if os.path.lexists(path)]
    found += [mount.mount_point for mount in read_mounts() if mount.mount_point.startswith(str(memory))]
    for seen in look():
        if seen.names(str(memory)) or seen.network in networks:
            found.append(f"process {seen.pid} {seen.arguments}")
    return found


def places_of(cluster):
    networks = set()
    if cluster.kind == "netns":
        networks = {int(n.run(["stat", "-L", "-c", "%i", "/proc/self/ns/net"]).stdout) for n in cluster.nodes}
    return Path(cluster[0].memory_dir).parent.parent, cluster.scratch, networks


# --- nodes that are apart


@pytest.mark.parametrize("kind", KINDS)
def test_each_node_has_a_name_and_a_memory_of_its_own(kind, monkeypatch):
    monkeypatch.setenv("FLASHCKPT_JOB", "of the outer shell")
    monkeypatch.setenv("FLASHCKPT_DISABLE", "1")
    monkeypatch.setenv("RANK", "7")
    with Cluster(3, kind, ranks_per_node=[1, 2, 1], domains=["a", "b", ""]) as cluster:
        dump = "import json, os; print(json.dumps(dict(os.environ)))"
        seen = [json.loads(node.run([*PYTHON, dump]).stdout) for node in cluster.nodes]
        assert [one["FLASHCKPT_NODE_ID"] for one in seen] == ["node0", "node1", "node2"]
        assert [one["FLASHCKPT_ADVERTISE"] for one in seen] == [node.address for node in cluster.nodes]
        assert [one.get("FLASHCKPT_DOMAIN") for one in seen] == ["a", "b", None]
        assert {one["FLASHCKPT_JOB"] for one in seen} == {cluster.job}
        assert len({one["FLASHCKPT_MEMORY_DIR"] for one in seen}) == 3
        assert not any({"RANK", "FLASHCKPT_DISABLE"} & set(one) for one in seen)
        assert [node.ranks for node in cluster.nodes] == [1, 2, 1]
        for node in cluster.nodes:
            SlotStore.open(node.memory_dir, cluster.job).close()
            assert Path(node.memory_dir).stat().st_mode & 0o777 == 0o700
        devices = {Path(node.memory_dir).stat().st_dev for node in cluster.nodes}
        assert len(devices) == (3 if kind == "netns" else 1)


@pytest.mark.parametrize("kind", [NETNS])
def test_a_namespace_has_its_own_host_name_and_a_tmpfs_that_is_full_at_its_size(kind):
    with Cluster(2, kind, memory_bytes=8 << 20) as cluster:
        assert [node.run(["hostname"]).stdout.strip() for node in cluster.nodes] == ["node0", "node1"]
        assert socket.gethostname() not in ("node0", "node1")
        place = Path(cluster[0].memory_dir).parent
        assert os.statvfs(place).f_blocks * os.statvfs(place).f_frsize == 8 << 20
        with pytest.raises(OSError, match="No space left"), (place / "big").open("wb") as file:
            file.write(bytes(9 << 20))
        cluster[1].replace("spare")
        assert cluster[1].run(["hostname"]).stdout.strip() == "spare"
        assert cluster[1].environment["FLASHCKPT_NODE_ID"] == "spare"


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="one for each of 2 nodes"):
        Cluster(2, ranks_per_node=[1, 2, 3])
    with pytest.raises(ConfigError, match="at least 1"):
        Cluster(2, ranks_per_node=[1, 0])
    with pytest.raises(ConfigError, match="loopback or netns"):
        Cluster(2, "docker")
    with Cluster(2) as cluster:
        with pytest.raises(ConfigError, match="links of their own"):
            cluster[0].cut()
        with pytest.raises(ConfigError, match="links of their own"):
            cluster[0].rate(10)
        with pytest.raises(ConfigError, match="number of ranks"):
            cluster.start(["true"], nproc_per_node=[1])


# --- nothing is left behind


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind, error):
    with contextlib.suppress(error or ()), Cluster(2, kind) as cluster:
        memory, scratch, networks = places_of(cluster)
        cluster.start([*PYTHON, "import signal; signal.pause()"])
        (detached,) = start_detached(cluster[1])
        stopped = cluster[0].pause()
        assert stopped
        SlotStore.open(cluster[0].memory_dir, cluster.job).close()
        assert memory.is_dir()
        assert scratch.is_dir()
        if error is not None:
            raise error
    assert traces(memory, scratch, networks) == []
    assert state_of(detached) in ("", "Z")


def test_nothing_is_left_behind_where_the_start_fails(monkeypatch):
    before = set(MEMORY_ROOT.iterdir()) | set(scratch_root().glob("flashckpt-cluster-*"))
    made = []

    def fail_at_the_second():
        made.append(len(made))
        if len(made) == 2:
            raise OSError("no more hosts")
        return real()

    from flashckpt.testing import cluster as module

    real = module.LoopbackHost
    monkeypatch.setattr(module, "LoopbackHost", fail_at_the_second)
    with pytest.raises(OSError, match="no more hosts"), Cluster(3):
        pytest.fail("the block must not be entered")
    assert made == [0, 1]
    left = set(MEMORY_ROOT.iterdir()) | set(scratch_root().glob("flashckpt-cluster-*"))
    assert not [path for path in left - before if f"-{os.getpid()}-" in path.name]


CRASH = """
import signal, sys
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster, Proxy
kind, detach = sys.argv[1:]
with Cluster(2, kind) as cluster:
    node = cluster[1]
    SlotStore.open(node.memory_dir, cluster.job).close()
    assert node.run([sys.executable, "-S", "-c", detach, node.memory_dir]).returncode == 0
    network = node.run(["stat", "-L", "-c", "%i", "/proc/self/ns/net"]).stdout.strip() if kind == "netns" else "0"
    print(node.memory_dir, cluster.scratch, network, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_cluster_removes_what_a_killed_one_left(kind):
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, kind, DETACH], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        memory_dir, scratch, network = child.stdout.readline().split()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    memory = Path(memory_dir).parent.parent
    networks = {int(network)} - {0}
    assert memory in find_stale(MEMORY_ROOT)
    assert any("process" in one for one in traces(memory, scratch, networks))
    with Cluster(1):
        assert traces(memory, Path(scratch), networks) == []


def test_a_running_cluster_is_no_leftover():
    with Cluster(1) as first, Cluster(1) as second:
        assert Path(first[0].memory_dir).parent.is_dir()
        assert first[0].memory_dir != second[0].memory_dir


# --- processes


def test_kill_ends_every_process_of_one_node_and_of_no_other():
    with Cluster(2) as cluster:
        launch = cluster.start([*PYTHON, "import signal; signal.pause()"], nproc_per_node=2)
        (detached,) = start_detached(cluster[0])
        assert len(cluster[0].pids()) == 3
        assert cluster[0].kill() == 3
        assert cluster[0].pids() == []
        assert state_of(detached) in ("", "Z")
        assert [process.returncode for process in launch.processes] == [-9, -9, None, None]
        assert len(cluster[1].pids()) == 2


def test_pause_and_resume_of_agent_and_trainers():
    with Cluster(2) as cluster:
        node = cluster[0]
        with pytest.raises(NotFoundError, match="expected an agent"):
            node.pause("agent")
        assert node.agent_pid() is None
        launch = cluster.start([*PYTHON, "import signal; signal.pause()"])
        trainer, other = launch.processes
        # As if a trainer had started it, and passed on its environment.
        agent = node.start([sys.executable, "-c", HOLD_LOCK], environment={LAUNCH_MARK: launch.mark})
        wait_until(lambda: agent.output)
        assert agent.output == "held\n"
        assert node.agent_pid() == agent.pid
        assert node.pause("agent") == [agent.pid]
        assert node.pause("trainers") == [trainer.pid]
        assert [state_of(one.pid) for one in (agent, trainer)] == ["T", "T"]
        assert state_of(other.pid) != "T"
        assert node.agent_pid() == agent.pid, "a stopped agent still holds its lock"
        node.resume("agent")
        wait_until(lambda: state_of(agent.pid) != "T")
        assert state_of(trainer.pid) == "T"
        launch.kill()
        assert [trainer.returncode, other.returncode, agent.returncode] == [-9, -9, None]
        node.kill()
        assert agent.returncode == -9
        assert node.agent_pid() is None


def test_wipe_and_replace():
    with Cluster(2) as cluster:
        node = cluster[0]
        SlotStore.open(node.memory_dir, cluster.job).close()
        process = node.start([*PYTHON, "import signal; signal.pause()"])
        node.wipe()
        assert not Path(node.memory_dir).exists()
        assert process.returncode is None
        SlotStore.open(node.memory_dir, cluster.job).close()
        node.replace("fresh")
        assert process.returncode == -9
        assert not Path(node.memory_dir).exists()
        assert node.run([*PYTHON, "import os; print(os.environ['FLASHCKPT_NODE_ID'])"]).stdout == "fresh\n"


def test_run_ends_at_its_deadline_with_all_that_it_started():
    with Cluster(1) as cluster:
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            cluster[0].run(["sh", "-c", "sleep 60 & wait"], timeout=0.2)
        assert time.monotonic() - began < 20
        wait_until(lambda: cluster[0].pids() == [])


# --- links

RECEIVE = """
import socket, sys, time
one = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
one.bind((sys.argv[1], 0))
print(one.getsockname()[1], flush=True)
while True:
    print(one.recv(100).decode(), flush=True)
"""
SEND = (
    "import socket, sys; host, port, text = sys.argv[1:]; family = socket.AF_INET6 if ':' in host else socket.AF_INET; "
)
SEND += "socket.socket(family, socket.SOCK_DGRAM).sendto(text.encode(), (host, int(port)))"


class Mailbox:
    """Datagrams that arrive at a node: the plainest proof of a link."""

    def __init__(self, node, address=None):
        self.address = address or node.address
        self.process = node.start([*PYTHON, RECEIVE, self.address])
        self.port = wait_until(lambda: self.process.output.endswith("\n") and self.process.output.split()[0])

    def send_from(self, node, text):
        node.run([*PYTHON, SEND, self.address, self.port, text])

    @property
    def letters(self):
        return self.process.output.split()[1:]


def assert_links(cluster, boxes, expected):
    """The (from, to) of all pairs of nodes whose letters arrive."""
    mark = secrets.token_hex(4)
    pairs = [(x, y) for x in cluster.nodes for y in cluster.nodes if x is not y]
    for x, y in pairs:
        boxes[y].send_from(x, f"{mark}-{x.index}")

    def arrived():
        return {(x.index, y.index) for x, y in pairs if f"{mark}-{x.index}" in boxes[y].letters}

    wait_until(lambda: arrived() >= expected)
    if len(expected) < len(pairs):
        with contextlib.suppress(AssertionError):
            wait_until(lambda: arrived() != expected, timeout=0.3)  # what was lost does not come later
    assert arrived() == expected


@pytest.mark.parametrize("kind", [NETNS])
def test_cut_and_heal(kind):
    with Cluster(3, kind) as cluster:
        a, b, c = cluster.nodes
        boxes = {node: Mailbox(node) for node in cluster.nodes}
        everything = {(x, y) for x in range(3) for y in range(3) if x != y}
        assert_links(cluster, boxes, everything)
        a.cut()
        assert_links(cluster, boxes, {(1, 2), (2, 1)})
        a.heal()
        assert_links(cluster, boxes, everything)
        a.cut(b)
        assert_links(cluster, boxes, everything - {(0, 1), (1, 0)})
        a.heal()
        a.cut(b, "out")
        c.cut(b, "in")
        assert_links(cluster, boxes, everything - {(0, 1), (1, 2)})
        a.heal()
        assert_links(cluster, boxes, everything - {(1, 2)})
        c.heal()
        six = Mailbox(b, b.host.address6)
        a.cut(b, "out")
        six.send_from(a, "lost")
        assert_links(cluster, boxes, everything - {(0, 1)})
        a.replace()
        six.send_from(a, "arrives")
        wait_until(lambda: six.letters)
        assert six.letters == ["arrives"], "a new machine has a whole link"


@pytest.mark.parametrize("kind", [NETNS])
def test_a_connection_survives_a_cut_that_is_healed_in_time(kind):
    serve = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); c, _ = s.accept()\n"
    )
    serve += "while (got := c.recv(100)): print(got.decode(), flush=True)"
    connect = (
        "import socket, sys\nc = socket.create_connection((sys.argv[1], int(sys.argv[2])))\nprint('up', flush=True)\n"
    )
    connect += (
        "import pathlib, time\nwhile not pathlib.Path(sys.argv[3]).exists(): time.sleep(0.005)\nc.sendall(b'hello')\n"
    )
    connect += "print('sent', flush=True)\nc.recv(1)"
    with Cluster(2, kind) as cluster:
        server = cluster[0].start([*PYTHON, serve])
        port = wait_until(lambda: server.output.strip())
        go = cluster.scratch / "go"
        client = cluster[1].start([*PYTHON, connect, cluster[0].address, port, str(go)])
        wait_until(lambda: "up" in client.output)
        cluster[0].cut()
        go.touch()
        wait_until(lambda: "sent" in client.output)
        with pytest.raises(AssertionError):
            wait_until(lambda: "hello" in server.output, timeout=0.3)
        cluster[0].heal()
        wait_until(lambda: "hello" in server.output)


@pytest.mark.alone
@pytest.mark.parametrize("kind", [NETNS])
def test_rate(kind):
    serve = "import socket, time; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)\n"
    serve += "while True:\n c, _ = s.accept(); began = time.monotonic(); n = 0\n"
    serve += " while (got := c.recv(1 << 16)): n += len(got)\n print(n, time.monotonic() - began, flush=True)"
    send = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(bytes(2 << 20))"
    with Cluster(2, kind) as cluster:
        server = cluster[0].start([*PYTHON, serve])
        port = wait_until(lambda: server.output.strip())

        def seconds(number):
            assert cluster[1].run([*PYTHON, send, cluster[0].address, port]).returncode == 0
            line = wait_until(lambda: server.output.splitlines()[number:])[0]
            assert int(line.split()[0]) == 2 << 20
            return float(line.split()[1])

        # 2 MiB at 10 Mbit/s are 1.7 s; a bucket of 64 KiB saves little of it.
        assert seconds(1) < 1.2
        cluster[1].rate(10)
        assert seconds(2) > 1.4, "the sender's link"
        cluster[1].rate(None)
        cluster[0].rate(10)
        assert seconds(3) > 1.4, "the receiver's link"
        cluster[0].rate(None)
        assert seconds(4) < 1.2


# --- launching

WHO = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
mine = (os.environ["FLASHCKPT_NODE_ID"], os.environ["LOCAL_RANK"], os.environ["FLASHCKPT_MEMORY_DIR"])
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    print("RANKS", [f"{node}/{local}" for node, local, _ in everyone], len({place for _, _, place in everyone}))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torchrun_numbers_uneven_ranks_in_the_order_of_the_nodes(kind, tmp_path):
    script = tmp_path / "who.py"
    script.write_text(WHO)
    with Cluster(2, kind, ranks_per_node=[1, 2]) as cluster:
        launch = cluster.torchrun(script)
        assert launch.wait(200) == [0, 0], launch.output
        assert "RANKS ['node0/0', 'node1/0', 'node1/1'] 2" in launch.output
        assert [node.name for node in launch.owners] == ["node0", "node1", "node1"]
        assert cluster.check() == []


@pytest.mark.slow
def test_ranks_save_die_and_come_back_with_what_they_saved():
    with Cluster(1, ranks_per_node=2) as cluster:
        trainers = cluster.trainers(mebibytes=2, launcher="torchrun")
        trainers.wait_started()
        assert {one["step"] for one in trainers.load().values()} == {None}
        assert {one["outcome"] for one in trainers.save(3).values()} == {"ok"}
        trainers.save(5)
        with pytest.raises(PeerError, match="expected 'level'"):
            trainers.save(1)  # steps do not go down
        trainers.kill()
        assert cluster[0].agent_pids() == cluster[0].pids()

        again = cluster.trainers(mebibytes=2)
        again.wait_started()
        loaded = again.load()
        assert {one["step"] for one in loaded.values()} == {5}
        assert all(one["matches"] for one in loaded.values())
        assert loaded[0]["digest"] != loaded[1]["digest"]
        stopped = [process.pid for process in again.launch.processes[1:]]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        number = again.send("status")
        again.wait_for("status", number=number, ranks=[0])
        with pytest.raises(DeadlineError, match=r"ranks \[1\]"):
            again.wait_for("status", number=number, timeout=1)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        again.wait_for("status", number=number)
        assert again.stop() == [0, 0]
        with pytest.raises(PeerError, match="ended"):
            again.wait_for("no such event")
        assert cluster.check() == []


# --- check()


def write_shard(node, shard, content):
    """A shard as a trainer writes it, without a trainer."""
    layout = encode_layout(Layout(()))
    with SlotStore.open(node.memory_dir, node.job) as store:
        place = geometry(len(layout), len(content), store.granule_bytes, 1 << 16)
        slot = store.claim(place.file_length_bytes)
        data = slot.view[place.data_offset_bytes :]
        data[: len(content)] = content
        crcs = native.scatter_copy(data, struct.pack("<qqq", 0, 0, len(data)), 1 << 16, 1)
        data.release()
        header = encode_header(
            job=node.job,
            shard=shard,
            layout_bytes=layout,
            layout_fingerprint=fingerprint(layout),
            values_offset_bytes=0,
            values_length_bytes=0,
            chunk_bytes=1 << 16,
            chunk_crcs=crcs,
            saved_at=1.0,
        )
        seal_bytes(slot.view, header, place)
        store.seal(slot, shard)


def sealed_files(node):
    return sorted((Path(node.memory_dir) / node.job / "sealed").iterdir())


def copy_shards(source, target):
    SlotStore.open(target.memory_dir, target.job).close()
    for path in sealed_files(source):
        shutil.copy2(path, Path(target.memory_dir) / target.job / "sealed" / path.name)


def overwrite(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


GENERATION = Generation(epoch=5, nonce=7, step=10, seq=1)
SHARDS = [ShardId(GENERATION, rank, 2) for rank in range(2)]


@pytest.fixture
def pair():
    """Two nodes that hold two ranks' shards, each its own and the other's replica."""
    with Cluster(2) as cluster:
        for node, shard in zip(cluster.nodes, SHARDS, strict=True):
            write_shard(node, shard, bytes([shard.rank]) * 300_000)
        for source, target in (cluster.nodes, cluster.nodes[::-1]):
            for path in sealed_files(source):
                shutil.copy2(path, Path(target.memory_dir) / target.job / "sealed" / path.name)
        assert cluster.check() == []
        yield cluster


def test_check_of_blank_nodes_finds_nothing():
    with Cluster(2) as cluster:
        assert cluster.check() == []
        SlotStore.open(cluster[0].memory_dir, cluster.job).close()
        assert cluster.check() == []


def test_check_finds_a_flipped_bit_wherever_it_is(pair):
    path = sealed_files(pair[1])[0]
    size = path.stat().st_size
    original = path.read_bytes()
    for offset in (0, 9, 70, 5000, 100_000, size - 1):
        overwrite(path, offset, bytes([original[offset] ^ 1]))
        problems = pair.check()
        assert any("node1: " in one for one in problems), offset
        assert any(f"node0 and node1 differ, first at byte {offset}" in one for one in problems), problems
        overwrite(path, offset, original[offset : offset + 1])
    assert pair.check() == []


def test_check_finds_a_cut_and_a_misdirected_file(pair):
    path = sealed_files(pair[1])[0]
    os.truncate(path, path.stat().st_size - 4096)
    assert any("differ in size" in one for one in pair.check())
    path.unlink()
    other = sealed_files(pair[1])[0]
    shutil.copy2(other, path)  # the bytes of one shard under the name of the other
    assert any("node1: " in one and "expected shard 0/2" in one for one in pair.check())


def test_check_finds_two_sound_files_of_one_shard_that_differ():
    with Cluster(2) as cluster:
        write_shard(cluster[0], SHARDS[0], b"one")
        write_shard(cluster[1], SHARDS[0], b"two")
        (problem,) = cluster.check()
        assert "node0 and node1 differ" in problem


def test_check_finds_what_a_dead_writer_left_and_strangers(pair):
    claim = "import os, sys; from flashckpt.store.slots import SlotStore\n"
    claim += "store = SlotStore.open(*sys.argv[1:]); slot = store.claim(1 << 21)\nos.kill(os.getpid(), 9)"
    assert pair[0].run([sys.executable, "-c", claim, pair[0].memory_dir, pair.job]).returncode == -9
    assert any("its writer is dead" in one for one in pair.check())
    with SlotStore.open(pair[0].memory_dir, pair.job) as store:
        store.reclaim()
    assert pair.check() == []
    (Path(pair[0].memory_dir) / "another-job").mkdir(mode=0o700)
    assert any("another-job" in one for one in pair.check())
    (Path(pair[0].memory_dir) / "another-job").rmdir()
    os.mknod(Path(pair[0].memory_dir) / pair.job / "pool" / "junk", 0o600)
    assert any("not a name of flashckpt" in one for one in pair.check())


def test_check_finds_processes_that_were_left_behind():
    with Cluster(1) as cluster:
        node = cluster[0]
        child = node.start(["sh", "-c", "sleep 60 & echo $!; wait"])
        wait_until(lambda: child.output.strip())
        assert cluster.check() == [], "whoever has a parent that was started is no orphan"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        (problem,) = cluster.check()
        assert f"process {child.output.strip()} was left behind" in problem
        node.kill()
        assert cluster.check() == []


def test_check_waits_for_what_is_still_being_done():
    with Cluster(1) as cluster:
        end = cluster.scratch / "end"
        wait = f"(while [ ! -e {end} ]; do sleep 0.01; done) & exit 0"
        cluster[0].start(["sh", "-c", wait]).wait(10)
        assert len(cluster.check()) >= 1
        cluster[0].start(["touch", str(end)])
        assert cluster.check(timeout=30) == []


def test_check_compares_the_newest_record_with_the_data(pair):
    record = Record(GENERATION, world=2, replicas=1, committed_at=1.0)
    with SlotStore.open(pair[0].memory_dir, pair.job) as store:
        store.write_record(record)
    assert pair.check() == []
    lost = next(path for path in sealed_files(pair[0]) if ".r1-2." in path.name)
    lost.unlink()
    (problem,) = pair.check()
    assert "shard 1/2" in problem
    assert "expected 1 copies on other nodes, found 0" in problem
    # Once a line has killed the generation, its promise is over.
    with SlotStore.open(pair[1].memory_dir, pair.job) as store:
        store.write_line(from_fence(step=9, epoch=6, nonce=1))
    assert pair.check() == []


def test_a_promise_is_kept_only_by_the_right_nodes():
    record = Record(GENERATION, world=2, replicas=1, committed_at=1.0)
    a, b = SHARDS
    assert broken_promises(record, {a: {"n0", "n1"}, b: {"n1", "n0"}}, ["n0", "n1"]) == []
    assert broken_promises(record, {a: {"n1", "n2"}, b: {"n0", "n1"}}, []) == []
    (problem,) = broken_promises(record, {a: {"n1", "n2"}, b: {"n0", "n1"}}, ["n0", "n1"])
    assert "expected on its own node n0, found on ['n1', 'n2']" in problem
    # A node that has lost its memory since may have its copies elsewhere, but no fewer.
    assert broken_promises(record, {a: {"n1", "n2"}, b: {"n0", "n1"}}, ["n0", "n1"], {"n0"}) == []
    (problem,) = broken_promises(record, {a: {"n1"}, b: {"n0", "n1"}}, ["n0", "n1"], {"n0"})
    assert "expected 1 copies on other nodes, found 0" in problem
    (problem,) = broken_promises(record, {a: {"n0", "n1"}, b: {"n1"}}, ["n0", "n1"])
    assert "shard 1/2" in problem
    assert len(broken_promises(record, {}, ["n0", "n1"])) == 4
    # Another number of ranks, another attempt: other shards.
    assert len(broken_promises(record, {ShardId(GENERATION, 0, 3): {"n0", "n1"}, b: {"n0", "n1"}}, [])) == 1


def test_the_newest_record_that_no_line_kills_counts():
    older = Record(GENERATION, 2, 1, 1.0)
    newer = Record(GENERATION._replace(step=20, seq=2), 2, 1, 2.0)
    assert newest_in_force([], None) is None
    assert newest_in_force([newer, older], None) == newer
    assert newest_in_force([newer, older], from_fence(step=15, epoch=6, nonce=1)) == older
    assert newest_in_force([newer, older], from_fence(step=15, epoch=5, nonce=1)) == newer
    assert newest_in_force([newer, older], from_fence(step=-1, epoch=6, nonce=1)) is None


@pytest.mark.slow
def test_check_of_what_a_checkpointer_wrote_and_a_copy_of_it():
    with Cluster(2) as cluster:
        trainers = cluster.trainers(nodes=1, config={"agent": "off"})
        trainers.wait_started()
        trainers.save(1)
        trainers.save(2)
        copy_shards(cluster[0], cluster[1])
        assert len(sealed_files(cluster[1])) >= 1
        assert cluster.check() == []
        path = sealed_files(cluster[1])[-1]
        offset = path.stat().st_size // 2
        overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 128]))
        assert any("crc32c" in one for one in cluster.check())
        assert trainers.stop() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_check_of_what_agents_replicated(kind):
    with Cluster(2, kind) as cluster:
        trainers = cluster.trainers(config={"replicas": 1})
        trainers.wait_started()
        agents = [node.agent_pid() for node in cluster.nodes]
        for node, agent, trainer in zip(cluster.nodes, agents, trainers.launch.processes, strict=True):
            assert set(node.pids()) == {agent, trainer.pid}
        assert {one["level"] for one in trainers.save(7, "replicated").values()} == {"replicated"}
        assert cluster.check(timeout=30) == []
        trainers.kill()
        assert [node.pids() for node in cluster.nodes] == [[pid] for pid in agents]
        assert cluster.check(timeout=30) == []
        for node in cluster.nodes:
            node.pause("agent")  # or they might repair it
        replica = next(path for path in sealed_files(cluster[1]) if ".r0-2." in path.name)
        content = replica.read_bytes()
        replica.unlink()
        (problem,) = cluster.check()
        assert "expected 1 copies on other nodes, found 0; it is on ['node0']" in problem
        replica.write_bytes(content)
        replica.chmod(0o600)
        assert cluster.check() == []
        cluster[0].replace()
        problems = "\n".join(cluster.check())
        assert "shard 0/2" in problems
        # It lost its memory, so that two copies anywhere would do; there is one of each shard left.
        assert problems.count("expected 1 copies on other nodes, found 0; it is on ['node1']") == 2, problems
        assert "shard 1/2" in problems
        assert cluster[0].agent_pid() is None


# --- the proxy


class Echo:
    """Sends back what it gets; counts connections that ended in an orderly way."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.ended = 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self):
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(one,))
            self.threads.append(thread)
            thread.start()

    def _serve(self, one):
        with one, contextlib.suppress(ConnectionError):
            while data := one.recv(1 << 16):
                one.sendall(data)
            self.ended += 1
            one.sendall(b"bye")

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def echo():
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.address) as proxy:
        yield proxy


def dial(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), 20)


def talk_in_vain(proxy):
    """A reset may come at once, or after the first bytes were taken."""
    with dial(proxy) as one:
        while True:
            one.sendall(b"x")
            one.recv(1)


def exchange(one, data):
    one.sendall(data)
    return receive(one, len(data))


def receive(one, count):
    got = b""
    while len(got) < count and (part := one.recv(count - len(got))):
        got += part
    return got


def test_a_proxy_forwards_everything_both_ways(proxy, echo):
    data = os.urandom(1 << 20)
    with dial(proxy) as one, dial(proxy) as other:
        for start in range(0, len(data), 1 << 16):
            assert exchange(one, data[start : start + (1 << 16)]) == data[start : start + (1 << 16)]
        assert exchange(other, b"small") == b"small"
        one.shutdown(socket.SHUT_WR)
        assert receive(one, 10) == b"bye", "the end of one way is passed on, and the other way stays"
    assert proxy.connections == 2
    assert proxy.wait_passed("up", len(data) + 5, 20)
    assert proxy.flipped == 0


def test_a_proxy_flips_the_bit_it_was_told_and_no_other(proxy):
    proxy.flip(100_000, 3)
    proxy.flip(7, 0, way="down")
    data = os.urandom(150_000)
    with dial(proxy) as one:
        got = b"".join(exchange(one, data[start : start + 50_000]) for start in range(0, len(data), 50_000))
    differing = {at: got[at] ^ data[at] for at in range(len(data)) if got[at] != data[at]}
    assert differing == {7: 1, 100_000: 8}
    assert proxy.flipped == 2
    with dial(proxy) as one:
        assert exchange(one, data[:20]) == data[:20], "once is once"
    proxy.flip(0, times=2)
    for expected in (b"`", b"`", b"a"):
        with dial(proxy) as one:
            assert exchange(one, b"a") == expected


def test_a_proxy_cuts_and_heals(proxy):
    with dial(proxy) as one:
        assert exchange(one, b"before") == b"before"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    with pytest.raises(ConnectionError):
        talk_in_vain(proxy)
    proxy.heal()
    with dial(proxy) as one:
        assert exchange(one, b"after") == b"after"


def test_a_proxy_stalls_without_closing(proxy):
    with dial(proxy) as one:
        assert exchange(one, b"before") == b"before"
        proxy.stall()
        one.sendall(b"held")
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.recv(1)
        one.settimeout(20)
        proxy.heal()
        assert receive(one, 4) == b"held"


@pytest.mark.alone
def test_a_proxy_delays_and_keeps_the_rate(proxy):
    with dial(proxy) as one:
        exchange(one, b"warm")
        proxy.delay(0.2)
        began = time.monotonic()
        assert exchange(one, b"late") == b"late"
        assert time.monotonic() - began > 0.35, "both ways"
        data = os.urandom(1 << 20)
        sender = threading.Thread(target=one.sendall, args=(data,))
        began = time.monotonic()
        sender.start()
        assert receive(one, len(data)) == data
        sender.join()
        # Sixteen reads or more: one after the other they would take over three seconds each way.
        assert 0.35 < time.monotonic() - began < 3


def test_a_proxy_closes_one_way_only(proxy, echo):
    with dial(proxy) as one:
        assert exchange(one, b"before") == b"before"
        proxy.half_close("up")
        assert receive(one, 10) == b"bye", "the server saw an end, and its answer came through"
        assert echo.ended == 1


def test_a_proxy_whose_target_is_away_resets(echo):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Proxy(f"127.0.0.1:{unused.getsockname()[1]}") as proxy, pytest.raises(ConnectionError):
            talk_in_vain(proxy)
    with pytest.raises(ConfigError, match="host:port"):
        Proxy("nowhere")


def test_closing_a_proxy_ends_its_threads(echo):
    before = threading.active_count()
    proxy = Proxy(echo.address)
    with dial(proxy) as one:
        exchange(one, b"x")
        proxy.stall()
        one.sendall(b"stuck")
        proxy.close()
        proxy.close()
    wait_until(lambda: threading.active_count() <= before + 1)  # the echo's thread for this connection may linger


def test_torchrun_refuses_what_no_launch_can_be():
    with Cluster(2) as cluster:
        with pytest.raises(ConfigError, match="elastic: expected the fewest and the most nodes, found 3 and 2"):
            cluster.torchrun("train.py", elastic=(3, 2))
        other = cluster.start([sys.executable, "-c", ""])
        with pytest.raises(ConfigError, match="join: expected a launch that torchrun started"):
            cluster.torchrun("train.py", nodes=[cluster[1]], join=other)


def test_torchrun_numbers_ranks_in_any_order_of_loopback_nodes():
    with Cluster(2) as cluster:
        command = "import os; print('rank', os.environ['RANK'], os.environ['FLASHCKPT_NODE_ID'])"
        script = cluster.scratch / "say.py"
        script.write_text(command)
        launch = cluster.torchrun(script, nodes=[cluster[1], cluster[0]])
        assert launch.wait(120) == [0, 0]
        assert [node.name for node in launch.owners] == ["node1", "node0"]
        assert "rank 0 node1" in launch.processes[0].output
        assert "rank 1 node0" in launch.processes[1].output
