"""Processes die and machines are lost, one after the other; the job goes on as if nothing had happened.

Situations 1 and 2: see docs/testing.md.
"""

from __future__ import annotations

import os
import signal

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, kill_trainers, lose, wait_until
from tests.recovery.memory import holders

pytestmark = pytest.mark.timeout(900)
NO_NETNS = Cluster.available("netns")


def test_a_lost_machine_comes_back_from_its_buddy(tmp_path):
    with Cluster(2) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(3, hold=[2], direct=True).holding(2)
        assert holders(cluster, 2) == {0: {"node0", "node1"}, 1: {"node0", "node1"}}
        lose(cluster[1])
        job.attempts[-1].kill()
        again = job.launch(3, direct=True)
        assert again.resumed(2)[1]["source"] == "peer"
        again.finish()
        assert cluster.check(timeout=60) == []


@pytest.mark.slow
def test_processes_die(tmp_path, uninterrupted):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path)

        job.launch(14, hold=[2]).holding(2)
        assert cluster.check(timeout=60) == []
        job.attempts[-1].kill_rank(1)
        job.attempts[-1].kill()

        job.launch(14, hold=[4]).resumed(2, source="memory")
        job.attempts[-1].holding(4).kill()

        job.launch(14, hold=[6]).resumed(4, source="memory")
        job.attempts[-1].holding(6)
        agent = cluster[1].agent_pid()
        cluster[1].kill()
        assert cluster[1].agent_pid() is None
        job.attempts[-1].kill()

        job.launch(7).resumed(6, source="memory")
        job.attempts[-1].finish()
        assert cluster[1].agent_pid() not in (None, agent)
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


@pytest.mark.slow
def test_machines_are_lost_and_ranks_move(tmp_path, uninterrupted):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2]).holding(2)
        lose(cluster[1])
        job.attempts[-1].kill()

        sources = {rank: one["source"] for rank, one in job.launch(14, hold=[4]).resumed(2).items()}
        assert sources == {0: "memory", 1: "peer", 2: "memory"}
        job.attempts[-1].holding(4)
        assert cluster.check(timeout=60) == []
        # The coordinator's machine goes; another one becomes rank 0, and no rank is where it was.
        lose(cluster[0], name="newcomer")
        job.attempts[-1].kill()

        job.launch(6, nodes=[cluster[1], cluster[2], cluster[0]]).resumed(4)
        job.attempts[-1].finish()
        assert set(holders(cluster, 6)) == {0, 1, 2}
        assert all(len(names) == 2 for names in holders(cluster, 6).values())
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(NO_NETNS), reason=NO_NETNS)
def test_other_machines_with_other_names_and_addresses(tmp_path, uninterrupted):
    with Cluster(4, "netns") as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[3], nodes=cluster.nodes[:3]).holding(3)
        lose(cluster[0])
        job.attempts[-1].kill()
        # One that stayed is restarted under another name: what it holds is known by what it is.
        cluster[1].kill()
        cluster[1].rename("renamed")
        job.launch(5, nodes=cluster.nodes[1:]).resumed(3)
        job.attempts[-1].finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


@pytest.mark.slow
def test_one_machine_alone(tmp_path, uninterrupted):
    with Cluster(1, ranks_per_node=2) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2], level="sealed").holding(2)
        kill_trainers(cluster[0])
        job.launch(14, hold=[4], level="sealed").resumed(2, source="memory")
        job.attempts[-1].holding(4)
        os.kill(cluster[0].agent_pid(), signal.SIGKILL)
        kill_trainers(cluster[0])
        wait_until(lambda: not cluster[0].pids(), "all processes of the node ended")
        job.launch(5, level="sealed").resumed(4, source="memory")
        job.attempts[-1].finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 2))
        # Nothing is left and nobody else has a copy: a fresh start, and no error.
        lose(cluster[0])
        job.launch(1, level="sealed").resumed(None)
