"""Run by torchrun: trains a small model under a CheckpointManager; every rank writes what it did to a file of its own.

manager_worker.py LAYOUT MEMORY_DIR OUT_DIR STEPS [--kill-after STEP] [--usr1 RANK:STEP] [--linger]
    [--interval STEPS] [--persist-dir DIR]
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashckpt
from flashckpt.checkpointer import internals_of

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.1), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Model(nn.Module):
    """A part of a model, named as in the whole."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x


class Loader:
    """Draws from a generator of its own; its state looks different once it has begun."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.batches = 0

    def next(self):
        self.batches += 1
        return torch.randn(4, WIDTH, generator=self.generator)

    def state_dict(self):
        begun = {"position": {"batch": self.batches}} if self.batches else {}
        return {"batches": self.batches, "generator": self.generator.get_state(), **begun}

    def load_state_dict(self, state):
        self.batches = state["batches"]
        self.generator.set_state(state["generator"])


def build(layout, rank, world):
    torch.manual_seed(1)
    if layout == "pipeline":  # every rank has two of the parts, as interleaved schedules do
        torch.manual_seed(1 + rank)
        return [Model([rank]), Model([rank + world])]
    model = Model(range(4))
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout in ("tp", "fsdp-tp"):
        mesh = init_device_mesh("cpu", (dp := 1 if layout == "tp" else 2, world // dp), mesh_dim_names=("dp", "tp"))
        for block in model.layers.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp-tp":
            for block in model.layers.values():
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    if layout in ("fsdp", "hsdp"):
        names, shape = (("dp",), (world,)) if layout == "fsdp" else (("copies", "dp"), (2, world // 2))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def digest(parts, optimizers, loader):
    """Of every bit that this rank holds."""
    found = hashlib.blake2b(digest_size=8)

    def put(value):
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().contiguous().numpy().tobytes())

    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, parameter in sorted(part.named_parameters()):
            found.update(name.encode())
            put(parameter)
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                found.update(key.encode())
                put(value)
        found.update(repr(optimizer.param_groups[0]["lr"]).encode())
    found.update(torch.get_rng_state().numpy().tobytes() + loader.generator.get_state().numpy().tobytes())
    found.update(repr((random.getstate(), np.random.get_state()[1].tolist(), loader.batches)).encode())
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("layout")
    parser.add_argument("memory_dir")
    parser.add_argument("out_dir")
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill-after", type=int, default=0)
    parser.add_argument("--usr1", default="")
    parser.add_argument("--linger", action="store_true", help="go on until stopped")
    parser.add_argument("--interval", type=int, default=2)
    parser.add_argument("--persist-dir")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(options.layout, rank, world)
    parts = model if isinstance(model, list) else [model]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 50) for one in optimizers]
    # Ranks that hold the same tensors need the same batches and masks; all others have their own.
    own = {"plain": 0, "tp": 0, "fsdp-tp": rank // max(1, world // 2)}.get(options.layout, rank)
    loader, seed = Loader(100 + own), 200 + own
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    out = open(os.path.join(options.out_dir, f"rank{rank}"), "a")  # noqa: SIM115

    def tell(event, step, **more):
        out.write(json.dumps({"event": event, "step": step, **more}) + "\n")
        out.flush()

    config = flashckpt.CheckpointConfig(
        job="job",
        memory_dir=options.memory_dir,
        interval=options.interval,
        persist_dir=options.persist_dir,
        persist_interval=options.interval if options.persist_dir else None,
        persist_on_exit=False,
        agent_linger=120.0,
        start_timeout=120,
    )
    with flashckpt.CheckpointManager(
        config, model=model, optimizer=optimizers, lr_scheduler=schedulers, dataloader=loader
    ) as manager:
        manager.install_signal_handlers(deadline=120)
        resumed = manager.load(expect={"layout": options.layout})
        if resumed:
            tell("resumed", resumed.step, extra=resumed.extra, source=resumed.source, batches=loader.batches)
        for step in range(resumed.step + 1 if resumed else 1, options.steps + 1):
            x = loader.next() + random.random() + np.random.rand()
            for part in parts:
                x = part(x)
            loss = x.pow(2).mean()
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            dist.barrier()  # every layout is synchronous, also those that need nothing of each other
            tell("step", step, digest=digest(parts, optimizers, loader), loss=loss.item().hex())
            if options.usr1 == f"{rank}:{step}":
                os.kill(os.getpid(), signal.SIGUSR1)
            handle = manager.save(step, extra={"tokens": 10 * step}, compat={"layout": options.layout})
            if handle is not None:
                tell("saved", step)
            if step == options.kill_after:
                manager.wait("persisted" if options.persist_dir else None, timeout=240)
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.stop_requested:
                tell("stopped", step, level=handle.level.name.lower(), outcome=handle.outcome)
                break
            if options.linger:
                time.sleep(0.02)
        problems = internals_of(manager.checkpointer).store.check() if rank == 0 and not manager.is_pending else []
    dist.destroy_process_group()
    if problems:
        sys.exit("; ".join(problems))


main()
