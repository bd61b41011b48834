"""Saves sharded tensors up to "persisted", or loads them in another sharding. Run by torchrun."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashckpt


def full(key):
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    return torch.randn(13, 10, generator=generator)


def main(mode, memory_dir, out):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    # Other placements on the way back.
    kinds = [Shard(0), Shard(1), Replicate()] if mode == "save" else [Shard(1), Replicate(), Shard(0)]
    keys = ["rows", "columns", "copies"]

    def state(fill):
        made = {key: distribute_tensor(fill(key), mesh, [kind]) for key, kind in zip(keys, kinds, strict=True)}
        made["plain"] = fill("plain")
        made["lr"] = 0.125 if mode == "save" else None
        made["own"] = flashckpt.PerRank({"rank": rank if mode == "save" else None})
        return made

    config = flashckpt.CheckpointConfig(
        job="run1", memory_dir=memory_dir, node_id="a", agent="auto", persist_dir=out, persist_on_exit=False
    )
    with flashckpt.Checkpointer(config) as checkpointer:
        if mode == "save":
            handle = checkpointer.save(7, state(full), extra={"tokens": 9})
            outcome = handle.wait("persisted", timeout=350)
            assert outcome == "ok", handle.reason
        else:
            live = state(lambda key: torch.zeros(13, 10))
            result = checkpointer.load(live)
            assert (result.step, result.source, result.extra) == (7, "persist", {"tokens": 9}), result
            assert result.saved_world_size == int(mode.removeprefix("load"))
            for key in keys:
                assert torch.equal(live[key].full_tensor(), full(key)), key
            assert torch.equal(live["plain"], full("plain"))
            assert live["lr"] == 0.125
            assert live["own"].value["rank"] == (rank if rank < result.saved_world_size else None)
            assert checkpointer.save(8, live).outcome == "ok"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
