"""torchrun restarts the workers by itself, also with other numbers of nodes; they recover with no script around them.

Situation 9: see docs/testing.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, lose, wait_until
from tests.recovery.memory import holders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def loads(attempt, world):
    """What each rank of a world of that size has loaded, in order."""
    return {
        rank: [one["step"] for one in attempt.events(rank) if one["event"] == "loaded" and one["world"] == world]
        for rank in range(world)
    }


def test_torchrun_restarts_workers_that_were_killed(tmp_path, uninterrupted):
    with Cluster(2, ranks_per_node=[2, 1]) as cluster:
        job = Job(cluster, tmp_path)
        attempt = job.launch(6, hold=[2, 4], max_restarts=3).holding(2)
        agents = [node.agent_pid() for node in cluster.nodes]
        os.kill(attempt.pid(1), signal.SIGKILL)
        attempt.holding(4)
        assert loads(attempt, 3) == {rank: [None, 2] for rank in range(3)}
        os.kill(attempt.pid(2), signal.SIGKILL)
        attempt.finish()
        assert loads(attempt, 3) == {rank: [None, 2, 4] for rank in range(3)}
        assert [node.agent_pid() for node in cluster.nodes] == agents
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


@pytest.fixture
def rendezvous():
    """Of a machine that does not train, so that any of those that do may be lost."""
    code = (
        "import sys, time; from torch.distributed import TCPStore;"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], **pipes) as process:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"


def test_torchrun_shrinks_and_grows(tmp_path, rendezvous):
    with Cluster(4) as cluster:
        job = Job(cluster, tmp_path)
        attempt = job.launch(8, hold=[2, 4, 6], max_restarts=5, elastic=(2, 4), endpoint=rendezvous).holding(2)
        lose(cluster[0])
        attempt.elastic = True
        attempt.go_on(2)
        attempt.wait_for("holding", step=4, ranks=range(3), world=3, timeout=240)
        assert loads(attempt, 3) == {rank: [2] for rank in range(3)}
        wait_until(lambda: all(len(names) == 2 for names in holders(cluster, 4).values()), "step 4 is replicated")

        attempt.join(cluster[0])
        attempt.wait_for("holding", step=6, ranks=range(4), world=4, timeout=240)
        assert loads(attempt, 4) == {rank: [None, 4] for rank in range(4)}
        attempt.go_on(6)
        assert [attempt.launch.processes[index].wait(150) for index in (1, 2, 3)] == [0, 0, 0]
        assert attempt.joined[0].wait(150) == [0]
        job.states()
        assert cluster.check(timeout=60) == []
