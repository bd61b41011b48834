"""Run by each rank: saves tensors that differ between ranks, loads them, and writes down whose values came back.

same_worker.py OUT_DIR MEMORY_DIR KIND...      MEMORY_DIR "-": the one of the environment

Each rank writes OUT_DIR/rank<N>.json: for each kind, the ranks whose values every tensor may be, and the warnings.
"""

import json
import logging
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import flashckpt

TENSORS = 12


class Heard(logging.Handler):
    """Keeps the warnings about ranks that differ."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        if "count as the same on all ranks" in record.getMessage():
            self.messages.append(record.getMessage())


def numbered(step, mark, size=5):
    """Tensors of several sizes that name their rank."""
    return {f"t{i}": torch.full((size * (i + 1),), 1000.0 * step + 10 * mark + i) for i in range(TENSORS)}


def plain_states(kind, step):
    """(state, keys to look at) of the kinds that have no model."""
    rank = dist.get_rank()
    if kind == "equal":
        return numbered(step, 0)
    if kind == "mixed":
        # Sharded and replicated tensors between plain ones, as under FSDP2.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {}
        for number, (key, value) in enumerate(numbered(step, rank).items()):
            state[key] = value
            whole = torch.full((8, 3), float(step + number))
            state[f"{key}.sharded"] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            state[f"{key}.replicated"] = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
        return state
    if kind == "partly":
        # One of many differs, the others are large: their copies near by are good enough.
        return {**{f"large{i}": torch.full((70_000,), float(step + i)) for i in range(8)}, **numbered(step, rank)}
    if kind == "stages":
        # Other keys on odd ranks, as with a pipeline.
        return {f"stage{rank % 2}": numbered(step, rank), "shared": numbered(step, rank)}
    return {"states": numbered(step, rank), "own": flashckpt.PerRank(torch.full((3,), float(rank)))}


def flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, flashckpt.PerRank):
            if value.value[0] != dist.get_rank():
                sys.exit(f"{prefix}{key}: PerRank came back as {value.value}")
        else:
            yield f"{prefix}{key}", value.to_local() if hasattr(value, "to_local") else value


def zero(state):
    for _, tensor in flat(state):
        tensor.zero_()


def owners(saved, loaded):
    """For each tensor the ranks that had saved it with this value."""
    mine = dict(flat(loaded))
    found = {}
    for key, value in mine.items():
        if key.endswith(".sharded"):
            if not torch.equal(value, saved[dist.get_rank()][key]):
                sys.exit(f"{key}: is not what was saved")
            continue
        found[key] = [rank for rank, one in enumerate(saved) if key in one and torch.equal(one[key], value)]
    return found


def gathered(state):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, {key: value.clone() for key, value in flat(state)})
    return every


def by_checkpointer(kind, config):
    with flashckpt.Checkpointer(config) as checkpointer:
        if kind == "prewarmed":
            checkpointer.prewarm({"states": numbered(0, 0), "own": flashckpt.PerRank(torch.zeros(3))})
        for step in (1, 2):
            state = plain_states(kind, step)
            handle = checkpointer.save(step, state)
            if handle.outcome != "ok":
                sys.exit(f"{kind}: {handle}")
            handle.wait("sealed" if config.agent == "off" or not config.replicas else "replicated", timeout=60)
            dist.barrier()
        saved = gathered(state)
        live = plain_states(kind, 0)
        zero(live)
        result = checkpointer.load(live)
    return {"owners": owners(saved, live), "source": result.source}


def by_sample(config):
    """Ranks that hold the same at the first save and differ from the tenth on."""
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, 41):
            state = numbered(0, dist.get_rank() if step >= 10 else 0)
            if checkpointer.save(step, state).outcome != "ok":
                sys.exit("later: a save failed")
            dist.barrier()
    return {"owners": {}}


def by_dcp(config):
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in (1, 2):  # the second time by the plan that DCP has kept
            state = numbered(step, dist.get_rank())
            planner = DefaultSavePlanner(enable_plan_caching=True)
            writer = flashckpt.dcp.FlashWriter(checkpointer)
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
        saved = gathered(state)
        zero(state)
        dcp.load(state, storage_reader=flashckpt.dcp.FlashReader(checkpointer))
    return {"owners": owners(saved, state)}


def by_manager(config, broadcast):
    rank = dist.get_rank()
    torch.manual_seed(1)
    bare = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = DistributedDataParallel(bare, broadcast_buffers=broadcast)
    optimizer = torch.optim.AdamW(model.parameters())
    ema = {f"ema{i}": torch.zeros(6) for i in range(6)}

    def state():
        return {"model": dict(bare.state_dict()), "ema": ema}

    with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer, states={"ema": ema}) as manager:
        manager.load()
        generator = torch.Generator().manual_seed(rank)
        for step in (1, 2, 3):
            model(torch.randn(8, 6, generator=generator) * (rank + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for value in ema.values():
                value += rank + 1
            handle = manager.save(step)
            handle.wait("sealed", timeout=60)
            dist.barrier()
        saved = gathered(state())
    fresh = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer, states={"ema": ema})
    with fresh as manager, torch.no_grad():
        zero(state())
        manager.load()
    return {"owners": owners(saved, state())}


def main():
    out, memory_dir, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    heard = Heard()
    logging.getLogger("flashckpt").addHandler(heard)
    report = {}
    for kind in kinds:
        name, _, how = kind.partition(":")
        settings = {} if memory_dir == "-" else {"memory_dir": memory_dir, "agent": "off"}
        if name == "partly":
            settings["replicas"] = 0
        if how == "ignore":
            settings["same_on_ranks"] = "ignore"
        config = flashckpt.CheckpointConfig(job=f"same-{kind}".replace(":", "-"), start_timeout=60, **settings)
        heard.messages.clear()
        if name == "dcp":
            found = by_dcp(config)
        elif name == "later":
            found = by_sample(config)
        elif name == "ddp":
            found = by_manager(config, how == "broadcast")
        else:
            found = by_checkpointer(name, config)
        report[kind] = {**found, "warnings": list(heard.messages)}
        dist.barrier()
    with open(f"{out}/rank{rank}.json", "w") as file:
        json.dump(report, file)
    dist.destroy_process_group()


main()
