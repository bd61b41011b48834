"""Several nodes write one checkpoint together, without the trainers; a node that is gone is written by its buddy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flashckpt.agent.start import look
from flashckpt.testing import Cluster
from flashckpt.testing.trainer import make_state
from flashckpt.testing.trainers import Trainers
from tests.flushes import WAIT, flush_with_a_late_node, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def check(path, step, world, size_bytes):
    """Plain DCP finds what every rank saved."""
    expected = [make_state(step, rank, size_bytes) for rank in range(world)]
    got = {
        "shared": torch.zeros_like(expected[0]["shared"]),
        "__rank__": {
            str(rank): {"mine": {key: torch.zeros_like(value) for key, value in one["mine"].value.items()}}
            for rank, one in enumerate(expected)
        },
    }
    dcp.load(got, checkpoint_id=path, no_dist=True)
    assert torch.equal(got["shared"], expected[0]["shared"])
    for rank, one in enumerate(expected):
        for key, value in one["mine"].value.items():
            assert torch.equal(got["__rank__"][str(rank)]["mine"][key], value), (rank, key)


def test_nodes_write_one_checkpoint_together(tmp_path):
    out = tmp_path / "out"
    with Cluster(2, ranks_per_node=[2, 1]) as cluster:
        trainers = cluster.trainers(config={"persist_dir": str(out), "persist_on_exit": False, "replicas": 1})
        trainers.wait_started()
        levels = trainers.save(1, "persisted", timeout=WAIT)
        assert {one["level"] for one in levels.values()} == {"persisted"}, levels
        check(out / "latest", 1, 3, 1 << 20)
        assert sorted(os.listdir(out)) == ["flashckpt.json", "latest", "step-1"]
        meta = json.loads((out / "step-1" / "meta.json").read_text())
        assert meta["world"] == 3
        assert set(meta["values"]) == {"0", "1", "2"}
        assert not [name for name in os.listdir(out / "step-1") if "__flash_" in name]
        trainers.save(2, "replicated")
        # Both trainers and the agent of a node die: its shards are written by the node that keeps their replicas.
        trainers.kill()
        cluster[1].kill()
        agent = cluster[0].agent_pid()
        assert agent is not None
        command = ("flush", "--job", cluster.job, "--wait", f"{WAIT:g}")
        result = cluster[0].python("-m", "flashckpt.cli", *command, timeout=WAIT + 30)
        assert result.returncode == 0, result.stdout + result.stderr
        check(out / "latest", 2, 3, 1 << 20)
        assert os.readlink(out / "latest") == "step-2"


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_is_late(tmp_path, late):
    with Cluster(2) as cluster:
        flush_with_a_late_node(cluster, late, str(tmp_path / "out"), tmp_path / "fired")
    check(tmp_path / "out" / "latest", 3, 2, 1 << 20)


def test_the_loss_of_the_coordinator_stops_no_flush(tmp_path):
    """Its machine is gone, with its memory: the next member orders, and the buddy writes what was lost."""
    out = tmp_path / "out"
    with Cluster(3) as cluster:
        trainers = cluster.trainers(config={"persist_dir": str(out), "replicas": 1})
        trainers.wait_started()
        trainers.save(6, "replicated")
        cluster[0].kill()
        cluster[0].wipe()
        trainers.kill()
        wait_until(lambda: (out / "latest").exists(), "another member to order the flush")
        check(out / "latest", 6, 3, 1 << 20)
        meta = json.loads((out / "step-6" / "meta.json").read_text())
        assert (meta["world"], meta["reason"]) == (3, "the trainers ended")


# Each node has a disk of its own under the same path: what a job with persist_dir="/scratch/…" would do.
_OWN_DISK = 'mkdir -p "$0" "$1/$FLASHCKPT_NODE_ID" && mount --bind "$1/$FLASHCKPT_NODE_ID" "$0" && shift && exec "$@"'


@pytest.mark.skipif(bool(Cluster.available("netns")), reason=f"mount namespaces: {Cluster.available('netns')}")
def test_nodes_that_do_not_share_the_directory_are_told_so(tmp_path):
    out, disks = tmp_path / "out", tmp_path / "disks"
    config = {"persist_dir": str(out), "persist_on_exit": False, "persist_timeout": 15.0, "replicas": 1}
    with Cluster(2) as cluster:
        directory = cluster.scratch / "trainers"
        trainer = [sys.executable, "-m", "flashckpt.testing.trainer", *Trainers.prepare(directory, config, 1.0)]
        launch = cluster.start(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OWN_DISK, str(out), str(disks), *trainer]
        )
        trainers = Trainers(launch, directory)
        trainers.wait_started()
        assert len(list(disks.iterdir())) == 2
        trainers.save(1, "replicated")
        asked = cluster[1].python("-m", "flashckpt.cli", "flush", "--job", cluster.job, "--wait", "0")
        assert asked.returncode == 0, asked.stderr

        def problem(node):
            seen = look(str(node.memory_dir), cluster.job, timeout=10.0)
            return seen.status["persist"]["problem"] if seen is not None and seen.status is not None else ""

        told = wait_until(lambda: problem(cluster[0]), "the coordinator's reason")
        assert "persist_dir has to be the same directory on every node" in told
        assert cluster[1].name in told
        # Training goes on, and nothing on either disk can be taken for a checkpoint.
        assert {one["level"] for one in trainers.save(2, "replicated").values()} == {"replicated"}
        found = [name for disk in disks.iterdir() for name in os.listdir(disk)]
        assert not [name for name in found if name != "flashckpt.json" and ".tmp-" not in name], found


_SHARED_DISK = 'mkdir -p "$0" "$1" && mount --bind "$1" "$0" && shift && exec "$@"'


@pytest.mark.skipif(bool(Cluster.available("netns")), reason=f"mount namespaces: {Cluster.available('netns')}")
def test_a_node_whose_mount_is_gone_is_named_at_once(tmp_path):
    """Its agent remembers that a step lay there: it writes nothing below the mount point, and tells the others."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    config = {"persist_dir": str(out), "persist_on_exit": False, "replicas": 1}
    with Cluster(2) as cluster:
        directory = cluster.scratch / "trainers"
        trainer = [sys.executable, "-m", "flashckpt.testing.trainer", *Trainers.prepare(directory, config, 1.0)]
        launch = cluster.start(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SHARED_DISK, str(out), str(disk), *trainer]
        )
        trainers = Trainers(launch, directory)
        trainers.wait_started()
        trainers.save(1, "persisted", timeout=WAIT)
        subprocess.run(["nsenter", "--mount", "--target", str(cluster[1].agent_pid()), "umount", str(out)], check=True)
        trainers.save(2, "replicated")
        assert cluster[0].python("-m", "flashckpt.cli", "flush", "--job", cluster.job, "--wait", "0").returncode == 0

        def problem(node):
            seen = look(str(node.memory_dir), cluster.job, timeout=10.0)
            return seen.status["persist"]["problem"] if seen is not None and seen.status is not None else ""

        for node in cluster.nodes:
            told = wait_until(lambda node=node: problem(node), "the reason")
            assert f"{cluster[1].name}: " in told
            assert "persisted step 1 there" in told
        assert os.listdir(out) == []
        assert sorted(name for name in os.listdir(disk) if ".tmp-" not in name) == [
            "flashckpt.json",
            "latest",
            "step-1",
        ]


def test_trainers_that_die_leave_their_newest_step_on_disk(tmp_path):
    out = tmp_path / "out"
    with Cluster(2) as cluster:
        trainers = cluster.trainers(config={"persist_dir": str(out), "replicas": 1})
        trainers.wait_started()
        trainers.save(5, "replicated")
        trainers.kill()
        wait_until(lambda: (out / "latest").exists(), "the agents to flush by themselves")
        check(out / "latest", 5, 2, 1 << 20)
