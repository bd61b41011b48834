"""Run by torchrun: every way in which DCP drives a storage writer and reader.

dcp_worker.py MEMORY_DIR
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import flashckpt
from flashckpt.dcp import FlashReader, FlashWriter

warnings.simplefilter("ignore")


def state(version):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = torch.arange(40.0).reshape(8, 5) * version
    return {
        "w": distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None),
        "plain": torch.full((3,), float(version)),
        "deep": {"list": [torch.full((2,), float(version)), version], "pair": (torch.ones(2) * version, "x")},
        "n": version,
    }


def check(got, version, what):
    wanted = state(version)
    same = (
        torch.equal(got["w"].to_local(), wanted["w"].to_local())
        and torch.equal(got["plain"], wanted["plain"])
        and torch.equal(got["deep"]["list"][0], wanted["deep"]["list"][0])
        and got["deep"]["list"][1] == version
        and torch.equal(got["deep"]["pair"][0], wanted["deep"]["pair"][0])
        and got["n"] == version
    )
    if not same:
        sys.exit(f"rank {dist.get_rank()}: {what}: found {got}")


def newest(checkpointer, version, what):
    got = state(0)
    reader = FlashReader(checkpointer)
    dcp.load(got, storage_reader=reader)
    check(got, version, what)
    print(f"{what}: ok", flush=True)


def main(memory_dir):
    dist.init_process_group("cpu:gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="dcp", memory_dir=memory_dir)) as checkpointer:
        dcp.save(state(1), checkpoint_id="step-1", storage_writer=FlashWriter(checkpointer))
        newest(checkpointer, 1, "save")
        dcp.save(state(2), storage_writer=FlashWriter(checkpointer, step=2))
        newest(checkpointer, 2, "save with step=")

        writer = FlashWriter(checkpointer)
        for version in (3, 4):
            live = state(version)
            future = dcp.async_save(live, checkpoint_id=f"run/step-{version}", storage_writer=writer)
            live["plain"].fill_(-1)
            future.result()
        newest(checkpointer, 4, "async_save in a thread")

        for version in (5, 6):
            future = dcp.async_save(
                state(version),
                checkpoint_id=f"step-{version}",
                storage_writer=FlashWriter(checkpointer),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            future.result()
        newest(checkpointer, 6, "async_save in a process")

        for version in (7, 8, 9):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(
                state(version),
                checkpoint_id=f"step-{version}",
                storage_writer=FlashWriter(checkpointer),
                planner=planner,
            )
        newest(checkpointer, 9, "cached plans")

        dcp.save(state(10), checkpoint_id="step-10", storage_writer=FlashWriter(checkpointer), use_collectives=False)
        newest(checkpointer, 10, "without collectives")

        ours, got, by_dcp = state(11), state(0), state(0)
        for one in (ours, got, by_dcp):
            one["deep"].pop("pair")  # a tuple of tensors is one value to DCP and several tensors to us
        if checkpointer.save(11, ours).outcome != "ok":
            sys.exit("a save of our own after DCP's")
        dcp.load(by_dcp, storage_reader=FlashReader(checkpointer))
        result = checkpointer.load(got)
        for one in (got, by_dcp):
            one["deep"]["pair"] = state(11)["deep"]["pair"]
            check(one, 11, "own save")
        if result.step != 11:
            sys.exit(f"own load: {result}")

    with flashckpt.Checkpointer(
        flashckpt.CheckpointConfig(job=f"alone-{rank}", memory_dir=memory_dir), process_group=dist.new_subgroups(1)[0]
    ) as alone:
        plain = {"t": torch.full((4,), 5.0 + rank), "r": rank}
        dcp.save(plain, checkpoint_id="step-5", storage_writer=FlashWriter(alone), no_dist=True)
        got = {"t": torch.zeros(4), "r": -1}
        dcp.load(got, storage_reader=FlashReader(alone), no_dist=True)
        if got["r"] != rank or not torch.equal(got["t"], plain["t"]):
            sys.exit(f"no_dist: {got}")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="helpers", memory_dir=memory_dir)) as checkpointer:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id="step-1", storage_writer=FlashWriter(checkpointer))
        torch.manual_seed(1)
        fresh = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        fully_shard(fresh)
        other = torch.optim.AdamW(fresh.parameters())
        weights2, moments2 = get_state_dict(fresh, other)
        dcp.load({"model": weights2, "optim": moments2}, storage_reader=FlashReader(checkpointer))
        set_state_dict(fresh, other, model_state_dict=weights2, optim_state_dict=moments2)
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
            moment, moment2 = optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"]
            if not (torch.equal(a.to_local(), b.to_local()) and torch.equal(moment.to_local(), moment2.to_local())):
                sys.exit("get_state_dict: parameters or moments differ")
        full = {}
        dcp.state_dict_loader._load_state_dict(
            full,
            storage_reader=FlashReader(checkpointer),
            planner=dcp.default_planner._EmptyStateDictLoadPlanner(keys={"model"}),
            no_dist=True,
        )
        if set(full) != {"model"} or full["model"]["0.weight"].shape != (6, 4):
            sys.exit(f"load of keys: {full}")
    print(f"all ok on rank {rank} of {world}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # the process that async_save spawns imports this file
    main(sys.argv[1])
