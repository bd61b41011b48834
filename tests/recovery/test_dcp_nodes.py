"""Plain DCP on several nodes: what FlashWriter saved comes back through FlashReader when a node was lost.

This file is also the script that the ranks run.
"""

from __future__ import annotations

import sys
import time

import pytest


def state_of(rank, world, fill):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(40_000, dtype=torch.float32).reshape(400, 100) * fill
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "plain": torch.full((7,), float(fill)),
        "step": 3 * fill,
        "name": "saved" if fill else "",
    }


def work(doing):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import flashckpt
    from flashckpt.checkpointer import internals_of

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(replicas=1)) as checkpointer:
        if doing == "save":
            state = state_of(rank, world, 1)
            dcp.save(state, checkpoint_id="step-3", storage_writer=flashckpt.dcp.FlashWriter(checkpointer))
            deadline = time.monotonic() + 60
            while not internals_of(checkpointer).store.read_records():
                assert time.monotonic() < deadline, checkpointer.status()
                time.sleep(0.02)
        else:
            state = state_of(rank, world, 0)
            reader = flashckpt.dcp.FlashReader(checkpointer)
            dcp.load(state, storage_reader=reader)
            expected = state_of(rank, world, 1)
            assert reader.generation.step == 3
            assert state["sharded"].to_local().equal(expected["sharded"].to_local())
            assert state["plain"].equal(expected["plain"])
            assert (state["step"], state["name"]) == (3, "saved")
            # What is saved from here on follows what was loaded.
            handle = checkpointer.save(4, state)
            assert handle.wait("replicated", timeout=60) == "ok", handle.reason
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1])
    raise SystemExit


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [[2, 2], [1, 2]], ids=["same-world", "fewer-ranks"])
def test_dcp_comes_back_from_peers(ranks):
    from flashckpt.testing import Cluster

    with Cluster(2, ranks_per_node=2) as cluster:
        launch = cluster.torchrun(__file__, "save")
        assert launch.wait(120) == [0, 0], launch.output
        cluster[1].replace("blank")
        launch = cluster.torchrun(__file__, "load", nproc_per_node=ranks)
        assert launch.wait(120) == [0, 0], launch.output
        assert cluster.check(timeout=30) == []
