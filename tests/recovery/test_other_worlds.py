"""The job comes back with other numbers of ranks and nodes; what it loads is, bit for bit, what it had saved.

Situation 5: see docs/testing.md. Job.states compares the gathered state after each load with that before the save.
"""

from __future__ import annotations

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, lose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def change(job, counts, until):
    """The next launch, on the first so many nodes with these numbers of ranks; it ends holding its last step."""
    previous = job.attempts[-1].launch.world
    nodes = job.cluster.nodes[: len(counts)]
    level = "replicated" if len(counts) > 1 else "sealed"
    attempt = job.launch(14, hold=[until], level=level, nodes=nodes, nproc_per_node=counts)
    attempt.resumed(until - 2, saved_world=previous)
    attempt.holding(until)
    return attempt


def test_fsdp(tmp_path):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path)
        job.launch(14, hold=[2], nodes=2, nproc_per_node=[2, 1]).holding(2).kill()
        # 3 → 5, on a node more; one of those who had it is blank.
        lose(cluster[0])
        change(job, [2, 1, 2], 4).kill()
        # 5 → 4, with another number on each node.
        change(job, [1, 3], 6).kill()
        # 4 → 2
        change(job, [2], 8).kill()
        # 2 → 4
        change(job, [1, 1, 2], 10)
        assert cluster.check(timeout=60) == []


@pytest.mark.parametrize("layout", ["hsdp", "fsdp_tp"])
def test_meshes(layout, tmp_path):
    with Cluster(3) as cluster:
        job = Job(cluster, tmp_path, layout)
        job.launch(14, hold=[2], nodes=2, nproc_per_node=[2, 2]).holding(2)
        lose(cluster[0])
        job.attempts[-1].kill()
        change(job, [1, 1], 4)
        lose(cluster[1])
        job.attempts[-1].kill()
        change(job, [1, 1, 2], 6)
        assert cluster.check(timeout=60) == []


@pytest.mark.parametrize("layout", ["tp", "ddp"])
def test_other_ways(layout, tmp_path):
    with Cluster(2) as cluster:
        job = Job(cluster, tmp_path, layout)
        job.launch(14, hold=[2], nproc_per_node=[1, 1]).holding(2)
        lose(cluster[1])
        job.attempts[-1].kill()
        change(job, [3, 1], 4)
        assert cluster.check(timeout=60) == []
