"""Run by torchrun: optimizers and shardings as people use them, saved, and loaded into fresh objects.

wrapper_worker.py resume MEMORY_DIR OUT KIND...       saves step 2 of 4; fresh objects load it and take steps 3 and 4
wrapper_worker.py reload MEMORY_DIR OUT FROM:INTO...  loads what another world saved of kind FROM into kind INTO
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flashckpt
from flashckpt.checkpointer import internals_of


class Rows(torch.optim.Optimizer):
    """As Adafactor: its moments have other shapes than the parameters, and are sharded as they are."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.dim() < 2:
                    continue
                rows = parameter.grad.square().mean(-1)
                state = self.state[parameter]
                if not state:
                    state["rows"], state["step"] = torch.zeros_like(rows), 0
                state["step"] += 1
                state["rows"].lerp_(rows, 0.1)
                parameter.sub_(parameter.grad / (state["rows"].unsqueeze(-1).sqrt() + 1e-3), alpha=group["lr"])


def plain_model(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[2].bias.requires_grad_(False)  # frozen
    return model


def sharded(kind, seed):
    model = plain_model(seed)
    world = dist.get_world_size()
    if kind.startswith("fsdp"):
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return model
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind.startswith("flat"):
        for parameter in model.parameters():
            parameter.requires_grad_(True)  # FSDP1 without original parameters wants them uniform
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=kind.startswith("flat-names")
        )
    return DistributedDataParallel(model)


def build(kind, seed):
    """(model, what is given to the manager, what is stepped)."""
    if kind.startswith("accelerate"):
        import accelerate

        accelerator = accelerate.Accelerator(cpu=True)
        model = plain_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return accelerator.prepare(model, optimizer, scheduler)
    cls = {"sgd": torch.optim.SGD, "rows": Rows}.get(kind.rpartition("-")[2], torch.optim.AdamW)
    if kind.startswith("zero"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = sharded("ddp", seed)
        options = {"parameters_as_bucket_view": True} if kind == "zero-buckets" else {}
        optimizer = ZeroRedundancyOptimizer(groups(model), cls, lr=0.01, **options)
    else:
        model = sharded(kind, seed)
        optimizer = cls(groups(model) if kind.startswith("ddp") else model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def groups(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]


def named_moments(model, optimizer):
    """Of the parameters whose state this rank has, whole, by name; not for FSDP1, which has other parameters."""
    inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", optimizer))
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in inner.state.get(parameter, {}).items():
            found[f"{name.removeprefix('module.')}.{key}"] = value
    return found


def bits(model, optimizer):
    """Of all that this rank holds."""
    found = {f"model.{name}": value for name, value in model.named_parameters()}
    found |= named_moments(model, optimizer)
    found = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in found.items()}
    found = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
    return found | {f"lr.{n}": group["lr"] for n, group in enumerate(optimizer.param_groups)}


def compare(what, found, wanted):
    different = [
        key
        for key in found.keys() | wanted.keys()
        if key not in found
        or key not in wanted
        or not torch.equal(torch.as_tensor(found[key]), torch.as_tensor(wanted[key]))
    ]
    if different:
        sys.exit(f"rank {dist.get_rank()}: {what}: {len(different)} differ, e.g. {sorted(different)[:6]}")


def config(memory_dir, job):
    return flashckpt.CheckpointConfig(job=job, memory_dir=memory_dir, interval=1000, start_timeout=120)


class Run:
    def __init__(self, kind, memory_dir, seed, job=None):
        self.kind = kind
        self.model, self.optimizer, self.scheduler = build(kind, seed)
        self.calls = 0
        inner = getattr(self.optimizer, "optimizer", getattr(self.optimizer, "optim", self.optimizer))
        inner.register_step_post_hook(self.count)
        self.manager = flashckpt.CheckpointManager(
            config(memory_dir, job or kind),
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            rng=False,
        )

    def count(self, *_):
        self.calls += 1

    def step(self, number):
        torch.manual_seed(1000 * number + (0 if self.kind == "tp" else dist.get_rank()))
        self.model.zero_grad()
        self.model(torch.randn(4, 6)).pow(2).mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        return bits(self.model, self.optimizer)


def resume(kind, memory_dir, out):
    first = Run(kind, memory_dir, 1)
    first.manager.prewarm()
    if first.calls:
        sys.exit(f"{kind}: prewarm() took {first.calls} steps")
    first.step(1)
    wanted = {2: first.step(2)}
    handle = first.manager.save(2, force=True)
    if handle.wait("sealed", timeout=60) != "ok":
        sys.exit(f"{kind}: {handle.reason}")
    torch.save(named_moments(first.model, first.optimizer), out / f"{kind}.{dist.get_rank()}")
    if not internals_of(first.manager.checkpointer).saver.preparer._planner.dedup:
        sys.exit(f"{kind}: each rank stores the whole model, because their keys differ")
    for number in (3, 4):
        wanted[number] = first.step(number)
    first.manager._seen = None  # nothing more to save
    first.manager.close()
    again = Run(kind, memory_dir, 77)
    result = again.manager.load()
    if result.step != 2 or again.calls:
        sys.exit(f"{kind}: step {result.step}, {again.calls} steps taken by load()")
    compare(f"{kind}: loaded", bits(again.model, again.optimizer), wanted[2])
    for number in (3, 4):
        compare(f"{kind}: step {number}", again.step(number), wanted[number])
    again.manager.close()


def reload(source, target, memory_dir, out):
    """By name, whatever the number of ranks was."""
    run = Run(target, memory_dir, 77, job=source)
    if run.manager.load().step != 2 or run.calls:
        sys.exit(f"{source} into {target}: {run.calls} steps taken by load()")
    saved = {}
    for path in out.glob(f"{source}.*"):
        saved.update(torch.load(path))
    mine = named_moments(run.model, run.optimizer)
    compare(f"{source} into {target}", mine, {key: saved[key] for key in mine})
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(mine))
    if {key for keys in held for key in keys} != saved.keys():
        sys.exit(f"{source} into {target}: state of {saved.keys() - mine.keys()} is nobody's")
    run.step(3)
    run.manager.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("resume", "reload"))
    parser.add_argument("memory_dir")
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for kind in options.kinds:
        if options.action == "resume":
            resume(kind, options.memory_dir, options.out)
        else:
            reload(*kind.split(":"), options.memory_dir, options.out)
        dist.barrier()
    dist.destroy_process_group()


main()
