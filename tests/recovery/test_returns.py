"""Machines that were away come back with what they had: old generations, dead ones, another history.

Situations 6 and 10: see docs/testing.md.
"""

from __future__ import annotations

import re

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, copy_nothing, disarm, kill_trainers, lose, prepare_to_copy_nothing
from tests.recovery.memory import holders, scan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NO_NETNS = Cluster.available("netns")


def steps_on(node):
    return {shard.generation.step for shard in scan(node)}


def test_a_stale_machine_with_a_higher_step(tmp_path, uninterrupted):
    with Cluster(4) as cluster:
        job = Job(cluster, tmp_path, slots_per_rank=3)
        team = cluster.nodes[:3]
        prepare_to_copy_nothing(*team, directory=tmp_path)
        attempt = job.launch(14, hold=[2, 4], nodes=team, arguments=["--level-until=2"]).holding(2)
        # What follows is sealed on each node and nowhere else.
        copy_nothing(*team)
        attempt.go_on(2)
        attempt.holding(4)
        for node in team:
            node.kill()
            disarm(node)
        assert holders(cluster, 4) == {0: {"node0"}, 1: {"node1"}, 2: {"node2"}}

        # Without it 3 and 4 lack a rank. Its place is taken; the job trains the third step once more, and stops there.
        again = job.launch(14, hold=[3], nodes=[cluster[0], cluster[1], cluster[3]])
        again.resumed(2)
        again.holding(3)
        lose(cluster[3])
        again.kill()

        # It returns with step 4 of a past that was given up.
        assert 4 in steps_on(cluster[2])
        last = job.launch(5, nodes=team)
        last.resumed(3)
        last.finish()
        assert cluster.check(timeout=60) == []
        assert steps_on(cluster[2]) <= {4, 5}
        job.assert_as_uninterrupted(uninterrupted("fsdp", 3))


def test_two_histories_never_mix(tmp_path, uninterrupted):
    with Cluster(4) as cluster:
        job = Job(cluster, tmp_path)
        old, new = cluster.nodes[:2], cluster.nodes[2:]
        job.launch(14, hold=[3], nodes=old).holding(3)
        for node in old:
            node.kill()

        # Blank machines that know of nothing: a fresh start, which is shorter than what was there.
        fresh = job.launch(2, nodes=new, arguments=["--allow-fresh"])
        fresh.resumed(None)
        fresh.finish()

        # The old ones return, as members and even with the first rank: which history is meant, nobody can know.
        assert 3 in steps_on(old[0])
        both = job.launch(14, nodes=[old[0], new[0]])
        message = both.refused()[0]  # on all ranks alike
        assert "expected one history, found 2" in message
        assert both.launch.wait(150) != {0: 0}
        (shorter,) = re.findall(r"history ([0-9a-f]{16}): newest step 2 ", message)
        (longer,) = re.findall(r"history ([0-9a-f]{16}): newest step 3 ", message)
        assert shorter != longer

        # A person chooses, on each pair of machines: none knows of what was said on the others.
        chosen = job.launch(14, hold=[3], nodes=[old[0], new[0]], arguments=[f"--history={shorter}"])
        chosen.resumed(2)
        chosen.holding(3).kill()
        last = job.launch(4, nodes=[old[1], new[1]], arguments=[f"--history={shorter}"])
        last.resumed(2)
        last.finish()
        # All together: the one that was chosen last goes on from the same step as the other, and neither knew of it.
        assert "expected one history, found 2" in job.launch(14).refused()[0]
        job.assert_as_uninterrupted(uninterrupted("fsdp", 2))


@pytest.mark.root
@pytest.mark.skipif(bool(NO_NETNS), reason=NO_NETNS)
def test_a_machine_that_is_cut_off(tmp_path):
    with Cluster(3, "netns") as cluster:
        job = Job(cluster, tmp_path)
        first = job.launch(14, hold=[2], arguments=["--hold-unsaved=3", "--level-until=2"]).holding(2)
        first.go_on(2)
        first.holding(3)
        cluster[2].cut()
        for node in cluster.nodes[:2]:
            kill_trainers(node)

        rest = job.launch(14, hold=[4], nodes=2)
        rest.resumed(2, saved_world=3)
        rest.holding(4)
        there = holders(cluster, 4)

        # It returns: its agent, and its trainer, which still runs and saves a step of its own.
        cluster[2].heal()
        first.go_on(3)
        assert first.launch.processes[2].wait(150) != 0
        assert [one["step"] for one in first.events(2) if one["event"] == "saved"] == [1, 2, 3]
        assert holders(cluster, 4) == there
        rest.kill()
        last = job.launch(5)
        last.resumed(4, saved_world=2)
        last.finish()
        assert cluster.check(timeout=60) == []
