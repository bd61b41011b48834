"""A machine is lost at the worst moments: while saving, copying, committing, recovering, healing.

Situations 3 and 7: see docs/testing.md.
"""

from __future__ import annotations

import os
import signal

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, arm, disarm, held_bytes, lose, start_agents, wait_until
from tests.recovery.memory import fatal_pairs, holders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("victim", "trainer", "agent", "resumes_at"),
    [
        pytest.param(1, "mid_copy=stop@4", "", 3, id="saving"),
        pytest.param(1, "", "mid_push=stop", 3, id="replicating"),
        # Rank 0's node writes the record; all copies are there, so the step counts though nobody heard of it.
        pytest.param(0, "", "after_record=stop", 4, id="committed"),
    ],
)
def test_lost_while(victim, trainer, agent, resumes_at, tmp_path, uninterrupted):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path)
        start_agents(*cluster.nodes)
        fired = arm(cluster[victim], tmp_path, trainer=trainer, agent=agent)
        attempt = job.launch(14, hold=[3]).holding(3)
        assert cluster.check(timeout=60) == []
        if agent:
            # The next agent is started by a trainer, and has the failpoints.
            os.kill(cluster[victim].agent_pid(), signal.SIGKILL)
        attempt.go_on(3)
        wait_until(fired.exists, "the failpoint fires")
        attempt.wait_for("step", step=4)
        if resumes_at == 3:
            # The others are about to save, or have saved.
            wait_until(lambda: holders(cluster, 4).keys() >= {0, 1, 2} - {victim}, "the other ranks have saved step 4")
            assert victim not in {rank for rank, names in holders(cluster, 4).items() if len(names) > 1}
        lose(cluster[victim])
        disarm(cluster[victim])
        attempt.kill()

        again = job.launch(6)
        again.resumed(resumes_at)
        again.finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


def test_lost_while_recovering_and_while_healing(tmp_path, uninterrupted):
    with Cluster(4) as cluster:
        # By way of the agents' memory, so that copies come back with the load and a third node can be spared.
        job = Job(cluster, tmp_path, fetch="memory")
        job.launch(14, hold=[3]).holding(3)
        _, harmless = fatal_pairs(cluster, 3)
        first, second = harmless[0]
        lose(first)
        job.attempts[-1].kill()

        # The second one goes right after the first, when all have agreed on what to fetch.
        fired = arm(second, tmp_path, trainer="after_plan=stop")
        attempt = job.launch(14)
        wait_until(fired.exists, "the failpoint fires")
        lose(second)
        disarm(second)
        attempt.kill()

        # Recovered; and while the lost copies are being made again, one more is lost that has the only copy of nothing.
        for node in cluster.nodes:
            node.kill()
        fired = [arm(node, tmp_path, agent="mid_push=stop") for node in cluster.nodes]
        attempt = job.launch(14, arguments=["--hold-loaded"])
        attempt.resumed(3)
        wait_until(lambda: any(one.exists() for one in fired), "an agent is making a copy")
        held = holders(cluster, 3).values()
        third = next(node for node in cluster.nodes if held_bytes(node) and {node.name} not in held)
        lose(third)
        for node in cluster.nodes:
            node.kill()
            disarm(node)
        attempt.kill()

        job.launch(5).resumed(3)
        job.attempts[-1].finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 4))


def test_copies_come_back_without_a_save(tmp_path):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2]).holding(2)
        # Before the loss: agents that are left begin to copy a few seconds after it.
        assert any(len(names) == 2 and cluster[1].name in names for names in holders(cluster, 2).values())
        lose(cluster[1])
        job.attempts[-1].kill()
        attempt = job.launch(14, arguments=["--hold-loaded"])
        attempt.resumed(2)
        wait_until(lambda: all(len(names) >= 2 for names in holders(cluster, 2).values()), "every shard has a copy")
        assert cluster.check(timeout=60) == []
        # So another one may go, whichever it is.
        fatal, _ = fatal_pairs(cluster, 2)
        lose(fatal[0][0])
        attempt.kill()
        job.launch(3).resumed(2)
        job.attempts[-1].finish()


@pytest.mark.parametrize(
    ("trainer", "agent"),
    [pytest.param("before_seal=kill", "", id="trainer"), pytest.param("", "mid_push=stop", id="machine")],
)
def test_crash_of_the_first_save_after_a_restore(trainer, agent, tmp_path, uninterrupted):
    with Cluster(2) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[3]).holding(3).kill()
        victim = cluster[0]
        fired = arm(victim, tmp_path, trainer=trainer, agent=agent)
        if agent:
            os.kill(victim.agent_pid(), signal.SIGKILL)
        attempt = job.launch(14)
        attempt.resumed(3)
        wait_until(fired.exists, "the failpoint fires")
        if agent:
            lose(victim)
        disarm(victim)
        attempt.kill()

        again = job.launch(5)
        again.resumed(3)
        again.finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 2))
