"""Real agents on several nodes of this machine, light ranks in front of them, and a ledger of what was promised.

    with World(3) as world:
        launch = world.launch()
        launch.save(1)                  # every rank, up to "replicated"
        world.kill_agent(1)
        world.start_agent(1)
        launch.save(2)
        world.check()                   # invariants over all nodes, and every promise kept

Agents are processes of their own with mutual TLS between them; so are ranks (see agent_ranks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from flashckpt.agent.process import Options
from flashckpt.agent.start import look
from flashckpt.errors import FlashError, NotFoundError
from flashckpt.format.shard import read_envelope
from flashckpt.protocol.line import newer
from flashckpt.protocol.placement import place
from flashckpt.rpc.credentials import Authority, make_request
from flashckpt.rpc.session import encode_session
from flashckpt.start.launch import next_launch
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster, processes
from flashckpt.testing.check import find_problems, newest_in_force
from flashckpt.types import Generation, Member, Session, age_order
from tests.conftest import environment
from tests.fault.agent_ranks import content, digest

JOB = "cluster"
MIB = 1 << 20
PATIENCE = 20.0  # for what takes a fraction of a second on an idle machine


def wait_until(condition, what, timeout=PATIENCE):
    """What `condition` returns once it is true. The test fails, saying `what` was waited for, where it never is."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for: {what}; last found {found!r}")
        time.sleep(0.01)
    return found


class Nursery:
    """The test's end of agent_ranks.py."""

    _shared = None

    @classmethod
    def shared(cls):
        """One for the whole run; it ends with it."""
        if cls._shared is None:
            cls._shared = cls()
            atexit.register(cls._shared.close)
        return cls._shared

    def __init__(self):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.agent_ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(),
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parent.parent.parent,
            )

    def fork(self, request):
        """The pid and the channel of a new process."""
        channel, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
        return int(self._control.recv(64)), channel

    def close(self):
        self._control.close()
        self._process.wait(timeout=20)


class Refused(Exception):
    """A rank's command raised; the error's class, code and message."""

    def __init__(self, error, code, message):
        super().__init__(f"{error}: {message}")
        self.error, self.code, self.message = error, code, message


class Rank:
    """A light rank's test end."""

    def __init__(self, world, number, node, pid, channel):
        self.world, self.number, self.node, self.pid = world, number, node, pid
        self._channel = channel
        self._lines = channel.makefile("rw")
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def send(self, do, **arguments):
        """Starts a command; `result` has its answer."""
        self._lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self._lines.flush()

    def result(self, timeout=PATIENCE):
        self._channel.settimeout(timeout)
        line = self._lines.readline()
        if not line:
            raise EOFError(f"rank {self.number} ended")
        found = json.loads(line)
        if "error" in found:
            raise Refused(**found)
        return found["answer"]

    def ask(self, do, timeout=PATIENCE, **arguments):
        self.send(do, **arguments)
        return self.result(timeout)

    def signal(self, number):
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def stop(self):
        self.signal(signal.SIGSTOP)
        processes.wait_stopped([self.pid], PATIENCE)

    def wait_stopped(self):
        """By a failpoint."""
        wait_until(lambda: processes.state_of(self.pid) in ("T", ""), f"rank {self.number} to stop")

    def wait_gone(self, timeout=PATIENCE):
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise AssertionError(f"rank {self.number} is alive after {timeout} s")

    def kill(self):
        self.signal(signal.SIGKILL)
        self.wait_gone()

    def close(self):
        if self._pidfd is not None:
            self.kill()
            os.close(self._pidfd)
            self._pidfd = None
        with contextlib.suppress(OSError):
            self._lines.close()
        self._channel.close()


class Launch:
    """One start of the job's light ranks."""

    def __init__(self, world, session, ranks, nodes):
        self.world, self.session, self.ranks, self.nodes = world, session, ranks, nodes

    @property
    def launch(self):
        return self.session.launch

    def generation(self, step, seq=1):
        return Generation(self.launch.epoch, self.launch.nonce, step, seq)

    def buddy(self, rank):
        """The node, by number, that gets the first replica of a rank's shard."""
        name = place(self.session.members, self.session.replicas, self.session.strategy).buddies(rank)[0]
        return next(index for index, node in enumerate(self.world.nodes) if node.name == name)

    def begin(self):
        for rank in self.ranks:
            rank.ask("begin")

    def send_save(self, step, ranks=None, size_bytes=None, seq=1):
        for rank in self.ranks if ranks is None else ranks:
            rank.send("save", step=step, size_bytes=size_bytes or self.world.size_bytes, seq=seq)

    def saved(self, ranks=None, timeout=PATIENCE):
        """What became of the saves that were sent."""
        return [rank.result(timeout) for rank in (self.ranks if ranks is None else ranks)]

    def save_nowait(self, step, **options):
        self.send_save(step, **options)
        return self.saved(options.get("ranks"))

    def wait(self, step, level="replicated", timeout=10.0, ranks=None):
        """The outcome on each rank; notes what was promised."""
        ranks = self.ranks if ranks is None else ranks
        for rank in ranks:
            rank.send("wait", step=step, level=level, timeout=timeout)
        found = [rank.result(timeout + PATIENCE) for rank in ranks]
        for one in found:
            if one["level"] == "replicated":
                self.world.promised.add(Generation(*one["generation"]))
        return found

    def save(self, step, level="replicated", timeout=10.0, **options):
        """On every rank; fails the test unless every one gets there."""
        saved = self.save_nowait(step, **options)
        if {one["outcome"] for one in saved} != {"ok"}:
            raise AssertionError(f"step {step}: {saved}")
        found = self.wait(step, level, timeout)
        if {one["outcome"] for one in found} != {"ok"}:
            states = [json.dumps(self.world.status(index), indent=1) for index in range(len(self.world.nodes))]
            raise AssertionError(f"step {step}: {found}\n" + "\n".join(states) + self.world.logs())
        return found

    def exit(self):
        for rank in self.ranks:
            rank.ask("exit")
            rank.wait_gone()

    def kill(self):
        for rank in self.ranks:
            rank.kill()


class World:
    """Nodes with agents. A context manager; everything it started is gone when it ends, however it ends."""

    def __init__(self, nodes=2, *, ranks=1, replicas=1, kind="loopback", size_bytes=MIB, start=True, **options):
        """`ranks` of each node; options beyond `memory_bytes`, `domains` and `rate_mbit` are the agents'."""
        cluster = {name: options.pop(name) for name in ("memory_bytes", "domains", "rate_mbit") if name in options}
        self.cluster = Cluster(nodes, kind, ranks_per_node=ranks, job=JOB, **cluster)
        self.replicas, self.size_bytes = replicas, size_bytes
        self.options = {"beat_interval": 0.1, "peer_timeout": 2.0, "linger": 120.0, "drain_timeout": 5.0, **options}
        self.promised = set()  # generations that a rank was told to be replicated
        self.launches = []
        self._start = start
        self._forked = 0
        self._owners = {}

    def __enter__(self):
        self.cluster.start_nodes()
        try:
            self.nodes = self.cluster.nodes
            self._failpoints_log = self.cluster.scratch / "failpoints"
            if self._start:
                for index in range(len(self.nodes)):
                    self.start_agent(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for launch in self.launches:
            for rank in launch.ranks:
                rank.close()
        self.cluster.close()

    # --- agents

    def agent_options(self, index, **changes):
        node = self.nodes[index]
        options = {**self.options, **changes}
        return Options(job=JOB, memory_dir=node.memory_dir, node_id=node.name, **options)

    def start_agent(self, index, failpoints="", **changes):
        """As an operator would; returns once it answers."""
        arguments = ["run", "--daemon", "--start-timeout=20", *self.agent_options(index, **changes).arguments()]
        _, channel = self._fork(index, {"agent": arguments}, f"agent{index}", {"FLASHCKPT_FAILPOINTS": failpoints})
        with channel:
            channel.settimeout(30.0)
            code = channel.recv(16)
        if code != b"0\n":
            raise AssertionError(f"agent of node {index}: exit code {code!r}\n{self.logs()}")
        return self.agent_pid(index)

    def agent_pid(self, index):
        return self.nodes[index].agent_pid()

    def signal_agent(self, index, number):
        pid = self.agent_pid(index)
        if pid is None:
            raise AssertionError(f"node {index} has no agent")
        os.kill(pid, number)
        return pid

    def kill_agent(self, index):
        processes.wait_gone(self.signal_agent(index, signal.SIGKILL), time.monotonic() + PATIENCE)

    def stop_agent(self, index):
        processes.wait_stopped([self.signal_agent(index, signal.SIGSTOP)], PATIENCE)

    def wait_agent_gone(self, index, pid):
        wait_until(lambda: self.agent_pid(index) != pid, f"agent {pid} of node {index} to end")

    def status(self, index):
        """What the agent says of itself; None where none runs or answers."""
        try:
            seen = look(self.nodes[index].memory_dir, JOB)
        except NotFoundError:
            return None
        return None if seen is None else seen.status

    def peer_state(self, index, of):
        """How node `index` sees node `of`: the entry of its status."""
        status = self.status(index)
        peers = status["peers"] if status else []
        return next((one for one in peers if one["node"] == self.nodes[of].name), None)

    def log(self, index):
        paths = sorted(Path(self.nodes[index].memory_dir).glob("*/agent.log*"), reverse=True)
        return "".join(path.read_text(errors="replace") for path in paths)

    def logs(self):
        found = [f"\n--- log of agent {index}\n{self.log(index)[-6000:]}" for index in range(len(self.nodes))]
        found += [f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in self.cluster.scratch.glob("*.out")]
        return "".join(found)

    # --- faults

    def fired(self, name):
        """Processes that failpoint `name` fired in, in order."""
        try:
            lines = self._failpoints_log.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [int(line.split()[1]) for line in lines if line.split()[0] == name]

    def wait_fired(self, name, times=1):
        return wait_until(lambda: len(self.fired(name)) >= times and self.fired(name), f"failpoint {name} to fire")

    def paths(self, index, state, generation=None, rank=None):
        """Files of the node's slots in `sealed`, `writing`, `pool` or `quarantine`."""
        folder = next(Path(self.nodes[index].memory_dir).glob(f"*/{state}"), None)
        if folder is None:
            return []
        if generation is None:
            return sorted(folder.iterdir())
        with self._store(index) as store:
            names = {s.name for s in store.scan() if s.shard.generation == generation and s.shard.rank == rank}
        return sorted(folder / name for name in names)

    def flip(self, index, generation, rank, offset=-1):
        """A bit of a sealed shard on node `index`: rot."""
        (path,) = self.paths(index, "sealed", generation, rank)
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))

    # --- ranks

    def launch(
        self,
        *,
        nodes=None,
        failpoints=None,
        agent_failpoints="",
        begin=True,
        addresses=None,
        epoch=None,
        **config,
    ):
        """Starts the ranks and brings the agents together, as join() does. `failpoints`: of ranks, by number.

        `addresses` may replace what nodes tell each other, to put a proxy in between.
        """
        chosen = list(range(len(self.nodes)) if nodes is None else nodes)
        counts = [self.nodes[index].ranks for index in chosen]
        config = {"save_timeout": 8.0, "replicas": self.replicas, **config}
        ranks = []
        for index, count in zip(chosen, counts, strict=True):
            for local in range(count):
                armed = {
                    "FLASHCKPT_FAILPOINTS": (failpoints or {}).get(len(ranks), ""),
                    "FLASHCKPT_AGENT_FAILPOINTS": agent_failpoints,
                }
                pid, channel = self._fork(index, {}, f"rank{len(ranks)}", armed)
                rank = Rank(self, len(ranks), index, pid, channel)
                rank.is_leader = local == 0
                ranks.append(rank)
        # Known before anything can fail, so that they are ended.
        session = Session(next_launch(0), len(ranks), (), self.replicas, "ring", config.get("slots_per_rank", 2))
        launch = Launch(self, session, ranks, chosen)
        self.launches.append(launch)
        for rank in ranks:
            options = dataclasses.asdict(self.agent_options(rank.node)) if rank.is_leader else None
            node = self.nodes[rank.node]
            rank.send("open", job=JOB, memory_dir=node.memory_dir, rank=rank.number, agent=options, config=config)
        highest = max(rank.result()["epoch"] for rank in ranks)
        members, bundles, first = [], {}, 0
        authority = Authority.create(JOB)
        leaders = {rank.node: rank for rank in ranks if rank.is_leader}
        for index, count in zip(chosen, counts, strict=True):
            node = self.nodes[index]
            key, request = make_request(JOB, node.name)
            certificate = authority.sign(request, JOB, node.name)
            bundles[index] = [pem.decode() for pem in (certificate, key, authority.certificate_pem)]
            address = leaders[index].ask("listen", bundle=bundles[index], host=node.address)
            address = (addresses or {}).get(index, lambda told: told)(address)
            members.append(Member(node.name, address, node.domain, tuple(range(first, first + count))))
            first += count
        began = next_launch(highest)
        began = dataclasses.replace(began, epoch=epoch or began.epoch)
        launch.session = dataclasses.replace(session, launch=began, members=tuple(members))
        self._owners.setdefault(len(ranks), tuple(self.nodes[rank.node].name for rank in ranks))
        for rank in ranks:
            text = encode_session(launch.session).hex()
            rank.ask("enter", session=text, bundle=bundles[rank.node] if rank.is_leader else None)
        if begin:
            launch.begin()
        return launch

    def _fork(self, index, request, what, variables):
        self._forked += 1
        host = self.nodes[index].host
        keeper = getattr(host, "_namespace", None)
        request = {
            **request,
            "log": str(self.cluster.scratch / f"{self._forked}-{what}.out"),
            "environment": {
                "FLASHCKPT_TESTING": "1",
                "FLASHCKPT_FAILPOINTS_LOG": str(self._failpoints_log),
                "FLASHCKPT_LOG": os.environ.get("FLASHCKPT_LOG", "info"),
                **variables,
            },
            "network": "" if keeper is None else f"/proc/{keeper.pid}/ns/net",
        }
        return Nursery.shared().fork(request)

    # --- looking

    def check(self, timeout=PATIENCE):
        """Waits until all invariants hold, and fails the test where they never do."""
        deadline = time.monotonic() + timeout
        while problems := self.problems():
            if time.monotonic() > deadline:
                raise AssertionError("\n".join(problems) + self.logs())
            time.sleep(0.05)

    def problems(self):
        memory = {node.name: node.memory_dir for node in self.nodes}
        try:
            return find_problems(JOB, memory, self._owners) + self._broken_promises() + self._surplus()
        except FlashError as error:
            return [f"something moved during the check: {error}"]

    def _broken_promises(self):
        """What a rank was told to be replicated, or something newer, is in force; and bytes are those of the ranks."""
        records, line, problems, shards = set(), None, [], []
        for index in range(len(self.nodes)):
            with self._store(index) as store:
                records.update(store.read_records())
                line = newer(line, store.read_line())
                for sealed in store.scan():
                    fd = store.open_shard(sealed)
                    try:
                        envelope = read_envelope(fd)
                        data = os.pread(fd, envelope.data_length_bytes, envelope.data_offset_bytes)
                    finally:
                        os.close(fd)
                    shards.append((index, sealed.shard.generation))
                    if digest(data) != digest(content(sealed.shard, len(data))):
                        problems.append(f"node {index}: {sealed.shard} is not what its rank wrote")
        alive = [one for one in self.promised if line is None or not line.kills(one)]
        newest, record = max(alive, key=age_order, default=None), newest_in_force(records, line)
        if newest is not None and (record is None or age_order(record.generation) < age_order(newest)):
            problems.append(f"{newest} was promised to be replicated, found the record {record}")
        return problems + self._garbage(record, shards)

    def _garbage(self, record, shards):
        """What lies below a record of the present launch goes, wherever an agent runs."""
        session = self.launches[-1].session if self.launches else None
        if record is None or session is None or record.generation[:2] != (session.launch.epoch, session.launch.nonce):
            return []
        return [
            f"node {index}: {generation} is still there, though {record.generation} is committed"
            for index, generation in shards
            if age_order(generation) < age_order(record.generation) and self.agent_pid(index) is not None
        ]

    def _surplus(self):
        """Slots beyond what the launch needs: each rank has its slots, and those who host it one more."""
        session = self.launches[-1].session if self.launches else None
        if session is None or not session.members:
            return []
        problems = []
        placement = place(session.members, session.replicas, session.strategy)
        for member in session.members:
            index = next(i for i, node in enumerate(self.nodes) if node.name == member.node_id)
            hosted = placement.held_by(member.node_id)
            most = len(member.ranks) * (session.slots_per_rank + 1) + len(hosted) * (session.slots_per_rank + 2)
            count = sum(len(self.paths(index, state)) for state in ("sealed", "writing", "pool"))
            if count > most:
                problems.append(f"node {index}: expected at most {most} slots, found {count}")
        return problems

    def _store(self, index):
        return SlotStore.open(self.nodes[index].memory_dir, JOB, create=False)
