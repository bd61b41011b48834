"""Copies with a flipped bit: another copy is taken, an older step, or none; never the bit.

Situation 8: see docs/testing.md.
"""

from __future__ import annotations

import pytest

from flashckpt.testing import Cluster
from tests.recovery.job import Job, copy_nothing, disarm, lose, prepare_to_copy_nothing
from tests.recovery.memory import flip_bit, holders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_flipped_bits(tmp_path, uninterrupted):
    with Cluster(2) as cluster:
        job = Job(cluster, tmp_path)
        prepare_to_copy_nothing(*cluster.nodes, directory=tmp_path)
        job.launch(14, hold=[2]).holding(2).kill()
        flip_bit(cluster[0], rank=0, step=2)

        # A good copy is elsewhere.
        attempt = job.launch(14, hold=[4, 5], arguments=["--level-until=4"])
        assert attempt.resumed(2)[0]["source"] == "peer"
        attempt.holding(4)
        assert cluster.check(timeout=60) == []
        # Step 5 lies on its own nodes alone, and the only copy of one shard is bad: back to step 4.
        copy_nothing(*cluster.nodes)
        attempt.go_on(4)
        attempt.holding(5)
        for node in cluster.nodes:
            node.kill()
            disarm(node)
        assert holders(cluster, 5) == {0: {"node0"}, 1: {"node1"}}
        flip_bit(cluster[0], rank=0, step=5)
        attempt = job.launch(14, hold=[6])
        for event in attempt.resumed(4).values():
            assert "step 5" in " ".join(event["stepped_over"])
        attempt.holding(6)

        # The owner is lost and the only copy is bad: nothing is usable, and the message says what is bad.
        lose(cluster[0])
        attempt.kill()
        flip_bit(cluster[1], rank=0, step=6)
        for message in job.launch(14).refused().values():
            assert "step 6" in message, message
            assert "shard 0/2" in message, message
        job.assert_as_uninterrupted(uninterrupted("fsdp", 2))
