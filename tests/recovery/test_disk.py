"""Every machine is lost with its memory: the job goes on from persist_dir, bit for bit, also with other worlds.

Situation 12: see docs/testing.md. Nobody but the agents writes there, every so many steps, while the job trains.
"""

from __future__ import annotations

import os

import pytest

from flashckpt.testing import Cluster
from tests.flushes import WAIT
from tests.recovery.job import Job, lose, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def persisted(out, step):
    """Waits until the agents have brought this step, or one after it, to the disk; returns which."""

    def newest():
        name = os.readlink(out / "latest") if (out / "latest").is_symlink() else "step-0"
        return int(name.removeprefix("step-"))

    wait_until(lambda: newest() >= step, f"step {step} in {out}", timeout=WAIT)
    return newest()


# DDP sums the gradients of more than two ranks in an order that changes after its first step.
@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", [2, 1]), ("ddp", [1, 1])])
def test_all_machines_are_lost(layout, ranks, tmp_path, uninterrupted):
    out = tmp_path / "out"
    config = {"persist_dir": str(out), "persist_interval": 3, "persist_on_exit": False, "keep_latest_k": 2}
    with Cluster(2) as cluster:
        job = Job(cluster, tmp_path, layout, **config)
        first = job.launch(14, hold=[4], nproc_per_node=ranks).holding(4)
        step = persisted(out, 3)
        lose(*cluster.nodes)
        first.kill()
        # The same number of ranks: not a bit differs from the run without an interruption.
        second = job.launch(14, hold=[8], nproc_per_node=ranks)
        second.resumed(step, source="persist", saved_world=sum(ranks))
        second.holding(8)
        step = persisted(out, 6)
        job.assert_as_uninterrupted(uninterrupted(layout, sum(ranks)))
        lose(*cluster.nodes)
        second.kill()
        # Another number, on one machine less: the state of all ranks together is the one that was saved.
        third = job.launch(14, hold=[10], level="sealed", nodes=1, nproc_per_node=5 - sum(ranks))
        third.resumed(step, source="persist", saved_world=sum(ranks))
        third.holding(10)
