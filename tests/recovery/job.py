"""A training job over all its launches on one cluster: starts it, waits for it, and judges what its ranks wrote."""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from flashckpt.testing import processes
from flashckpt.testing.trainers import Trainers

SCRIPT = Path(__file__).parent / "train.py"
# Steps of the run that is never interrupted; no test trains further.
LAST_STEP = 14
# A loaded machine takes long to start ranks; nothing here is waited for in vain.
PATIENCE = 150.0


class Job:
    """What must hold over all launches: a step's state is the same whenever and wherever it was reached or loaded."""

    def __init__(self, cluster, directory, layout="fsdp", **config):
        self.cluster, self.directory, self.layout = cluster, directory, layout
        self.config = {"peer_timeout": 5, "save_timeout": 60, "start_timeout": 120, **config}
        self.attempts = []

    def launch(self, until, *, hold=(), level="replicated", arguments=(), checkpoints=True, direct=False, **where):
        """Starts torchrun on every node; `where` is Cluster.torchrun's. Does not wait."""
        assert until <= LAST_STEP
        directory = self.directory / f"launch{len(self.attempts)}"
        directory.mkdir()
        argv = [f"--directory={directory}", f"--layout={self.layout}", f"--until={until}", f"--level={level}"]
        argv += [f"--config={json.dumps(self.config)}"] if checkpoints else []
        argv += [f"--hold={','.join(map(str, hold))}", *arguments]
        if direct:
            launch = self.cluster.start([sys.executable, str(SCRIPT), *argv], **where)
        else:
            launch = self.cluster.torchrun(SCRIPT, *argv, **where)
        attempt = Attempt(launch, directory, self)
        attempt.argv, attempt.where = argv, where
        self.attempts.append(attempt)
        return attempt

    def states(self):
        """{(step, world): {rank: (own, whole)}} of all launches; asserts that none contradicts another."""
        found = {}
        for attempt in self.attempts:
            for event in attempt.all_events():
                if event["event"] not in ("step", "loaded") or event["step"] is None:
                    continue
                world, rank, state = (
                    event.get("saved_world", event["world"]),
                    event["rank"],
                    (event["own"], event["whole"]),
                )
                ranks = found.setdefault((event["step"], world), {})
                where = f"rank {rank} of {event['world']}, step {event['step']} of {world} ranks, {event['event']}"
                assert {whole for _, whole in ranks.values()} <= {event["whole"]}, where
                # Loaded into another number of ranks: the parts are others, the whole is the same.
                if world == event["world"]:
                    assert ranks.setdefault(rank, state) == state, where
        return found

    def assert_as_uninterrupted(self, reference):
        """Every state that any launch trained or loaded is, bit for bit, that of the run without interruption."""
        for (step, world), ranks in self.states().items():
            for rank, state in ranks.items():
                assert state == reference[rank, step], f"rank {rank} of {world} differs at step {step}"


class Attempt(Trainers):
    """One launch of the job."""

    def __init__(self, launch, directory, job):
        super().__init__(launch, directory)
        self.job = job
        self.elastic = False  # torchrun goes on when it loses nodes
        self.joined = []  # launches of nodes that came later

    def all_events(self):
        """Of all ranks that there ever were: with elastic launches their number changes."""
        for rank in itertools.count():
            events = self.events(rank)
            if not events:
                return
            yield from events

    def holding(self, step, timeout=PATIENCE):
        """Waits until every rank has saved `step` and stands still."""
        self.wait_for("holding", step=step, timeout=timeout)
        return self

    def go_on(self, step):
        (self.directory / f"go-{step}").touch()

    def resumed(self, step, timeout=PATIENCE, **fields):
        """Waits until every rank has loaded `step`, with the state that was saved; returns their events."""
        events = self.wait_for("loaded", timeout=timeout)
        problems = {rank: event for rank, event in events.items() if event["step"] != step}
        assert not problems, f"expected step {step} on all ranks, found {problems}"
        for name, value in fields.items():
            assert {event[name] for event in events.values()} == {value}
        if step is not None:
            self.job.states()
        return events

    def refused(self, timeout=PATIENCE):
        """Waits until load() has raised on every rank; returns the messages, by rank."""
        return {rank: event["message"] for rank, event in self.wait_for("refused", timeout=timeout).items()}

    def finish(self, timeout=PATIENCE):
        """Waits until every rank has come to its end, in order."""
        codes = self.launch.wait(timeout)
        assert set(codes) == {0}, f"exit codes {codes}\n{self.launch.output}"
        return self

    def pid(self, rank):
        """Of the trainer that was started last as this rank."""
        self.wait_for("started", ranks=[rank])
        return [one["pid"] for one in self.events(rank) if one["event"] == "started"][-1]

    def join(self, *nodes):
        """More nodes come to an elastic launch."""
        again = {"nodes": nodes, "join": self.launch}
        self.joined.append(self.job.cluster.torchrun(SCRIPT, *self.argv, **{**self.where, **again}))

    def _ended(self):
        ended = super()._ended()
        return ended if not self.elastic or len(ended) == len(self.launch.processes) else []

    def kill_rank(self, rank):
        """SIGKILL to one trainer; returns once its launcher has noticed."""
        owner = self.launch.nodes.index(self.launch.owners[rank])
        os.kill(self.pid(rank), signal.SIGKILL)
        assert self.launch.processes[owner].wait(PATIENCE) != 0


def lose(*nodes, name=None):
    """The machines are gone with their memory; blank ones take their place."""
    for node in nodes:
        assert held_bytes(node) > 0, f"{node.name} has nothing to lose"
    # All at once: agents that are left begin to make new copies a few seconds after a loss.
    for node in nodes:
        node.kill()
    for node in nodes:
        node.replace(name)
        assert not os.path.exists(node.memory_dir)
        assert node.agent_pid() is None


def held_bytes(node):
    """Of all sealed shards on a node."""
    return sum(path.stat().st_size for path in Path(node.memory_dir).rglob("sealed/*"))


def wait_until(condition, what, timeout=PATIENCE):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"expected within {timeout} s: {what}"
        time.sleep(0.02)


def kill_trainers(node):
    """SIGKILL to a node's launcher and ranks; the agent stays."""
    agents = node.agent_pids()
    processes.kill_all(lambda: [pid for pid in node.pids() if pid not in agents], f"trainers of {node.name}")


def start_agents(*nodes):
    """Agents that know nothing of failpoints: the next one, when such an agent has died, is started by a trainer."""
    for node in nodes:
        done = node.run([sys.executable, "-m", "flashckpt.cli", "agent", "start"])
        assert done.returncode == 0, done.stderr


def arm(node, directory, *, trainer="", agent=""):
    """Failpoints for what is started on the node from now on; returns the file that tells when one fires."""
    fired = directory / f"fired-{node.name}-{time.monotonic_ns()}"
    node.set_environment(
        FLASHCKPT_TESTING="1",
        FLASHCKPT_FAILPOINTS=trainer,
        FLASHCKPT_AGENT_FAILPOINTS=agent,
        FLASHCKPT_FAILPOINTS_LOG=str(fired),
    )
    return fired


def prepare_to_copy_nothing(*nodes, directory):
    """Before a launch: agents that work, and trainers that would start others, which can't copy to other nodes."""
    start_agents(*nodes)
    for node in nodes:
        arm(node, directory, agent="before_push=error(EIO)")


def copy_nothing(*nodes):
    """From now on what is saved stays on its own node."""
    for node in nodes:
        os.kill(node.agent_pid(), signal.SIGKILL)


def disarm(node):
    node.set_environment(FLASHCKPT_TESTING="0", FLASHCKPT_FAILPOINTS="", FLASHCKPT_AGENT_FAILPOINTS="")
