"""Run by torchrun: saves or loads the same global tensors in many layouts, at any world size.

layout_worker.py save MEMORY_DIR            one job for each layout, named "<layout>-<world>"
layout_worker.py load MEMORY_DIR WORLD...   loads what those worlds saved into this world's layouts
"""

import argparse
import hashlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import flashckpt

SHAPES = {
    "rows": (7, 5),
    "vector": (13,),
    "one": (1, 3),
    "square": (16, 16),
    "deep": (6, 4, 5),
    "large": (1024, 1100),  # above the size from which shared tensors are cut into rows
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def reference(key, version):
    """The global tensor under `key`: the same bits on every rank, at every world size."""
    name, dtype = key.split("/")
    seed = int.from_bytes(hashlib.blake2b(f"{key}{version}".encode(), digest_size=6).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[name]
    raw = torch.randn(shape, generator=generator)
    dtype = getattr(torch, dtype)
    if dtype.is_complex:
        return torch.complex(raw, raw.flip(0))
    if dtype == torch.bool:
        return raw > 0
    return (raw * 1000).to(dtype)


def keys():
    for name in SHAPES:
        for dtype in DTYPES:
            if name == "large" and dtype != torch.float32:
                continue
            yield f"{name}/{str(dtype).removeprefix('torch.')}"


def factors(world):
    return (2, world // 2) if world % 2 == 0 else (1, world)


def build(layout, version, world):
    """The layout's state dict at this world size, filled with the reference of `version`."""
    state = {key: reference(key, version) for key in keys()}
    if layout == "plain":
        return {"nested": {"list": [state.pop("vector/float32"), 5 + version]}, **state, "step": version}
    if layout == "sharded":
        return {key: to_sharded_tensor(tensor) for key, tensor in state.items()}
    mesh1 = init_device_mesh("cpu", (world,))
    mesh2 = init_device_mesh("cpu", factors(world))
    place = {
        "fsdp": (mesh1, [Shard(0)]),
        "columns": (mesh1, [Shard(1)]),
        "hsdp": (mesh2, [Replicate(), Shard(0)]),
        "tp2d": (mesh2, [Shard(0), Shard(1)]),
        "strided": (mesh2, [_StridedShard(0, split_factor=mesh2.size(1)), Shard(0)]),
        "replicated": (mesh1, [Replicate()]),
    }[layout]
    result = {}
    for key, tensor in state.items():
        mesh, placements = place
        if any(getattr(p, "dim", 0) >= tensor.dim() for p in placements):
            mesh, placements = mesh1, [Shard(0)]
        if layout == "strided" and tensor.shape[0] % world:
            mesh, placements = mesh1, [Shard(0)]
        result[key] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return result


def to_sharded_tensor(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = tensor.shape[0]
    start, stop = rows * rank // world, rows * (rank + 1) // world
    shards = []
    if stop > start:
        offsets = [start] + [0] * (tensor.dim() - 1)
        shards = [LocalShard.from_tensor_and_offsets(tensor[start:stop].clone(), offsets, rank)]
    return sharded_tensor.init_from_local_shards(shards, *tensor.shape)


def flat(state, prefix=""):
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, (dict, list)):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def same(a, b):
    if isinstance(a, ShardedTensor):
        return all(same(x.tensor, y.tensor) for x, y in zip(a.local_shards(), b.local_shards(), strict=True))
    if isinstance(a, DTensor):
        return same(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def check(what, loaded, expected):
    for (key, value), (_, wanted) in zip(flat(loaded), flat(expected), strict=True):
        if not same(value, wanted):
            sys.exit(f"rank {dist.get_rank()}: {what}: {key} differs")


LAYOUTS = ("plain", "fsdp", "columns", "hsdp", "tp2d", "strided", "replicated", "sharded")
# DCP itself rejects strided shards as overlapping.
DCP_LAYOUTS = ("plain", "fsdp", "columns", "hsdp", "tp2d", "replicated")


def config(memory_dir, job):
    return flashckpt.CheckpointConfig(job=job, memory_dir=memory_dir, start_timeout=120)


def save(memory_dir):
    world = dist.get_world_size()
    for layout in LAYOUTS:
        with flashckpt.Checkpointer(config(memory_dir, f"{layout}-{world}")) as checkpointer:
            for version in (1, 2):
                state = build(layout, version, world)
                state["per_rank"] = flashckpt.PerRank({"noise": torch.full((3,), 10.0 * version + dist.get_rank())})
                handle = checkpointer.save(version, state, extra={"layout": layout})
                if handle.outcome != "ok":
                    sys.exit(f"{layout}: {handle}")
    for layout in DCP_LAYOUTS:
        with flashckpt.Checkpointer(config(memory_dir, f"dcp-{layout}-{world}")) as checkpointer:
            for version in (1, 2):
                dcp.save(
                    build(layout, version, world),
                    checkpoint_id=f"step-{version}",
                    storage_writer=flashckpt.dcp.FlashWriter(checkpointer),
                )


def load(memory_dir, saved_worlds):
    world, rank = dist.get_world_size(), dist.get_rank()
    for saved in saved_worlds:
        for layout in LAYOUTS:
            with flashckpt.Checkpointer(config(memory_dir, f"{layout}-{saved}")) as checkpointer:
                for step, version in ((None, 2), (1, 1)):
                    state = build(layout, 0, world)
                    state["per_rank"] = flashckpt.PerRank({"noise": torch.zeros(3)})
                    result = checkpointer.load(state, step=step)
                    if (result.step, result.saved_world_size, result.source) != (version, saved, "memory"):
                        sys.exit(f"{layout} from {saved}: {result}")
                    if result.extra != {"layout": layout}:
                        sys.exit(f"{layout} from {saved}: extra {result.extra}")
                    noise = state.pop("per_rank").value["noise"]
                    wanted = 10.0 * version + rank if rank < saved else 0.0
                    if not torch.equal(noise, torch.full((3,), wanted)):
                        sys.exit(f"{layout} from {saved}: per-rank noise {noise}, wanted {wanted}")
                    check(f"{layout} from {saved} step {version}", state, build(layout, version, world))
        # Either API reads what the other wrote; from the smallest and the largest world is enough to see it.
        for layout in DCP_LAYOUTS if saved in (1, 4) else ():
            with flashckpt.Checkpointer(config(memory_dir, f"dcp-{layout}-{saved}")) as checkpointer:
                state = build(layout, 0, world)
                checkpointer.load(state)
                check(f"dcp-{layout} from {saved}", state, build(layout, 2, world))
                for step, version in ((None, 2), (1, 1)):
                    state = build(layout, 0, world)
                    dcp.load(state, storage_reader=flashckpt.dcp.FlashReader(checkpointer, step=step))
                    check(f"dcp-{layout} from {saved} by dcp.load", state, build(layout, version, world))
            with flashckpt.Checkpointer(config(memory_dir, f"{layout}-{saved}")) as checkpointer:
                state = build(layout, 0, world)
                # The reader above went back to step 1 and put up a line.
                dcp.load(state, storage_reader=flashckpt.dcp.FlashReader(checkpointer))
                check(f"{layout} from {saved} by dcp.load", state, build(layout, 1, world))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("memory_dir")
    parser.add_argument("worlds", type=int, nargs="*")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if arguments.action == "save":
        save(arguments.memory_dir)
    else:
        load(arguments.memory_dir, arguments.worlds)
    dist.barrier()
    dist.destroy_process_group()


main()
