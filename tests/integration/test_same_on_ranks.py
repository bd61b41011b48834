"""Tensors that differ between ranks come back whole from one rank, on every rank, and somebody says so once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flashckpt.testing import Cluster

WORKER = Path(__file__).parent / "same_worker.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def reports(out, world):
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]


def common(owners):
    """The ranks that every one of these tensors may come from."""
    return set.intersection(*map(set, owners.values()))


def warnings(told, kind):
    return [message for one in told for message in one[kind]["warnings"]]


def test_two_ranks_of_a_node(tmp_path, memory_dir, torchrun):
    differing = ["plain", "prewarmed", "mixed", "ddp", "ddp:broadcast"]
    silent = ["equal", "stages", "plain:ignore", "dcp"]
    code, output = torchrun(2, WORKER, tmp_path, memory_dir, *differing, *silent)
    assert code == 0, output
    told = reports(tmp_path, 2)
    for kind in [*differing, "plain:ignore", "dcp"]:
        for rank, one in enumerate(told):
            assert 0 in common(one[kind]["owners"]), (kind, rank, one[kind]["owners"])
    for kind in differing:
        (message,) = warnings(told, kind)
        assert "ranks [0] against [1]" in message
        assert "PerRank" in message
    assert "'states.t0'" in warnings(told, "plain")[0]
    assert "1.running_mean" in warnings(told, "ddp")[0]
    for kind in silent:
        assert warnings(told, kind) == []
    # Each stage has keys of its own: what its rank loads comes from it, as a whole.
    assert [common(one["stages"]["owners"]) for one in told] == [{0}, {1}]


def test_ranks_that_come_to_differ_later(tmp_path, memory_dir, torchrun):
    """The first save saw nothing, a sample does."""
    code, output = torchrun(2, WORKER, tmp_path, memory_dir, "later")
    assert code == 0, output
    (message,) = warnings(reports(tmp_path, 2), "later")
    assert "ranks [0] against [1]" in message
    assert "'t" in message


def test_two_nodes_with_two_ranks_each(tmp_path):
    kinds = ["plain", "mixed", "partly", "ddp", "equal", "stages"]
    with Cluster(2, job="same", ranks_per_node=2) as cluster:
        launch = cluster.start([sys.executable, str(WORKER), str(tmp_path), "-", *kinds])
        assert launch.wait(300) == [0] * 4, launch.output
    told = reports(tmp_path, 4)
    for kind in ("plain", "mixed", "partly", "ddp"):
        for rank, one in enumerate(told):
            assert 0 in common(one[kind]["owners"]), (kind, rank, one[kind]["owners"])
        # Ranks at the save, and nodes at the load, each once.
        at_save, at_load = warnings(told, kind)
        assert "ranks [0] against [1] against [2]" in at_save
        assert "were stored by ranks [2] with other values than by rank 0" in at_load
    # Without replicas the second node has to fetch what differs.
    assert [one["partly"]["source"] for one in told] == ["memory", "memory", "peer", "peer"]
    assert warnings(told, "equal") == []
    assert [one["equal"]["source"] for one in told] == ["memory"] * 4
    for rank, one in enumerate(told):
        assert rank % 2 in common(one["stages"]["owners"]), one["stages"]["owners"]
