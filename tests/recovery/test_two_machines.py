"""Two machines are lost at once: what may be lost is known, and what may not is said by name.

Situations 4 and 11: see docs/testing.md.
"""

from __future__ import annotations

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, lose
from tests.recovery.memory import fatal_pairs, holders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_copies_any_two_machines(tmp_path, uninterrupted):
    with Cluster(4) as cluster:
        job = Job(cluster, tmp_path, replicas=2)
        job.launch(14, hold=[2]).holding(2)
        fatal, pairs = fatal_pairs(cluster, 2)
        assert (len(fatal), len(pairs)) == (0, 6)
        lose(*pairs[0])
        job.attempts[-1].kill()

        job.launch(14, hold=[4]).resumed(2)
        job.attempts[-1].holding(4)
        fatal, pairs = fatal_pairs(cluster, 4)
        assert not fatal
        lose(*pairs[-1])
        job.attempts[-1].kill()

        job.launch(5).resumed(4)
        job.attempts[-1].finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 4))


def test_one_copy_buddies_or_not(tmp_path, uninterrupted):
    with Cluster(4) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2]).holding(2)
        _, harmless = fatal_pairs(cluster, 2)
        lose(*harmless[0])
        job.attempts[-1].kill()

        job.launch(14, hold=[4]).resumed(2)
        job.attempts[-1].holding(4)
        fatal, _ = fatal_pairs(cluster, 4)
        pair = fatal[0]
        gone = [rank for rank, names in holders(cluster, 4).items() if names <= {node.name for node in pair}]
        lose(*pair)
        job.attempts[-1].kill()

        attempt = job.launch(14)
        for message in attempt.refused().values():
            assert "step 4" in message, message
            assert all(f"rank {rank} ran on node{rank}, its replicas on" in message for rank in gone), message
            assert all(node.name in message for node in pair), message
        assert all(code != 0 for code in attempt.launch.wait(150))
        job.assert_as_uninterrupted(uninterrupted("fsdp", 4))

        # Only on request, and then from the start.
        fresh = job.launch(2, arguments=["--allow-fresh"])
        fresh.resumed(None)
        fresh.finish()
        assert cluster.check(timeout=60) == []


def test_a_whole_rack(tmp_path, uninterrupted):
    with Cluster(4, domains=["left", "left", "right", "right"]) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2]).holding(2)
        lose(*cluster.nodes[:2])
        job.attempts[-1].kill()
        job.launch(3).resumed(2)
        job.attempts[-1].finish()
        assert cluster.check(timeout=60) == []
        job.assert_as_uninterrupted(uninterrupted("fsdp", 4))
