"""Every replica is its primary, byte for byte, whatever the number of nodes, ranks and copies."""

from __future__ import annotations

import pytest

from tests.fault.agents import MIB, World


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [([1, 1], 1), ([2, 1], 1), ([1, 3, 1], 1), ([1, 1, 1], 2), ([2, 1, 1, 2], 2), ([1, 1, 2, 1, 1], 1)],
)
def test_replicas_are_their_primaries(ranks, replicas):
    with World(len(ranks), ranks=ranks, replicas=replicas, size_bytes=MIB + 12345) as world:
        launch = world.launch()
        for step in (1, 2, 3):
            launch.save(step)
        world.check()
        copies = sum(len(world.paths(index, "sealed")) for index in range(len(ranks)))
        assert copies == sum(ranks) * (1 + replicas)
