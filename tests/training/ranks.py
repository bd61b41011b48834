"""Run by torchrun: the table's patterns of several ranks. Each rank writes what it found to a file.

ranks.py MEMORY_DIR OUT_DIR [NAME…]
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard

from tests.training.harness import Pattern, Result, run_pattern
from tests.training.patterns import adamw, net, trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.training.harness import Cycle, Run

PATTERNS: dict[str, Pattern] = {}


def pattern(**facts: Any) -> Callable[[Callable[[Run], Cycle]], Callable[[Run], Cycle]]:
    def register(build: Callable[[Run], Cycle]) -> Callable[[Run], Cycle]:
        PATTERNS[build.__name__] = Pattern(build.__name__, build, **facts)
        return build

    return register


right = pattern
may_refuse = functools.partial(pattern, refusals=1, overlaps=False)


def sharded(run, model=None):
    """By FSDP2, layer by layer."""
    model = net(run) if model is None else model
    for module in model:
        if any(True for _ in module.parameters()):
            fully_shard(module)
    return fully_shard(model)


@right()
def data_parallel(run):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def fsdp1(run):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = FullyShardedDataParallel(
        net(run),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
    )
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def fsdp2(run):
    model = sharded(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def fsdp2_clipped_and_scheduled(run):
    model = sharded(run)
    optimizer = adamw(model, foreach=False, lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    run.manage(model, optimizer, lr_scheduler=scheduler)

    def cycle():
        model(torch.randn(8, 16)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return cycle


@right()
def fsdp2_offloaded(run):
    """Sharded parameters, gradients and moments stay in host memory between the passes."""
    policy = CPUOffloadPolicy(pin_memory=False)
    model = net(run)
    for module in model:
        if any(True for _ in module.parameters()):
            fully_shard(module, offload_policy=policy)
    model = fully_shard(model, offload_policy=policy)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def fsdp2_optimizers_in_backward(run):
    model = sharded(run)
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    run.manage(model, list(optimizers.values()))
    return lambda: model(torch.randn(8, 16)).square().mean().backward()


@right()
def fsdp2_average_in_states(run):
    """Of DTensors, changed right after save()."""
    model = sharded(run)
    optimizer = adamw(model)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"ema": average})

    @torch.no_grad()
    def update():
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.5)

    return trained(run, model, optimizer, before=update)


class _Pair(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher


@may_refuse()
def fsdp2_teacher_as_a_part(run):
    model = _Pair(sharded(run), sharded(run).requires_grad_(False))
    optimizer = adamw(model.student)
    run.manage(model, optimizer)

    @torch.no_grad()
    def follow():
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.lerp_(s, 0.5)

    return trained(run, model.student, optimizer, before=follow)


@may_refuse()
def fsdp2_swapped_for_evaluation(run):
    model = sharded(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def swap():
        for p in model.parameters():
            p.copy_(p * 0.5)

    return trained(run, model, optimizer, before=swap)


@may_refuse()
def fsdp2_local_tensors_changed(run):
    """By the tensor inside, and by its `.data`."""
    model = sharded(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def change():
        for number, p in enumerate(model.parameters()):
            local = p.to_local().detach()
            (local if number % 2 else local.data).mul_(0.5)

    return trained(run, model, optimizer, before=change)


@may_refuse()
def one_rank_changes_its_tensors(run):
    model = sharded(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def change():
        if dist.get_rank() == 1:
            for p in model.parameters():
                p.to_local().mul_(0.5)

    return trained(run, model, optimizer, before=change)


@may_refuse()
def models_averaged_between_steps(run):
    """Local SGD: parameters are all-reduced where they lie, right after save()."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def average():
        for p in model.parameters():
            dist.all_reduce(p.detach())

    return trained(run, model, optimizer, before=average)


@may_refuse()
def data_parallel_with_fused_optimizer(run):
    model = nn.parallel.DistributedDataParallel(net(run))
    model._register_fused_optim(torch.optim.AdamW, lr=1e-2)
    run.manage(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return lambda: model(torch.randn(8, 16)).square().mean().backward()


@right()
def accelerated(run):
    accelerate = importlib.import_module("accelerate")  # its test is skipped where there is none
    accelerator = accelerate.Accelerator(cpu=True)
    model = net(run)
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.manage(model, optimizer.optimizer)

    def cycle():
        accelerator.backward(model(torch.randn(8, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def accelerated_and_given_as_it_is(run):
    """The manager gets accelerate's wrapper."""
    accelerate = importlib.import_module("accelerate")  # its test is skipped where there is none
    accelerator = accelerate.Accelerator(cpu=True)
    model = net(run)
    model, optimizer = accelerator.prepare(model, adamw(model))
    run.manage(model, optimizer)

    def cycle():
        if run.saves:
            optimizer.step()
            optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 16)).square().mean())

    return cycle


def stepped_right_after_save(run, model, optimizer):
    """Gradients are there at save(), so that the step comes first. Each rank has its own data."""

    def cycle():
        if run.saves:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.randn(8, 16) + dist.get_rank()).square().mean().backward()

    return cycle


def _zero_redundancy(run, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its module warns where it is imported

    model = nn.parallel.DistributedDataParallel(net(run))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    run.manage(model, optimizer)
    return stepped_right_after_save(run, model, optimizer)


@right()
def zero_redundancy(run):
    """Each rank steps its own parameters, and then sends them to the others."""
    return _zero_redundancy(run)


@right()
def zero_redundancy_in_buckets(run):
    """The parameters are views of a few large tensors, into which the other ranks' are received."""
    return _zero_redundancy(run, parameters_as_bucket_view=True)


@right()
def post_local_sgd(run):
    """Each rank steps on its own gradients, and step() then averages the parameters where they lie, by `.data`."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # its module warns where it is imported

    model = net(run)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=1))
    run.manage(model, optimizer)
    return stepped_right_after_save(run, model, optimizer)


def gather(told: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def tell(name: str, delayed: bool, directory: str) -> list[str]:
    """What is wrong with a row, as this rank sees it."""
    one = PATTERNS[name]
    Path(directory).mkdir(mode=0o700, exist_ok=True)
    result: Result = run_pattern(one, "cpu", delayed=delayed, memory_dir=directory, gather=gather)
    # A rank whose thread was quick says nothing of the others: overlap is asked of all ranks together.
    problems = [p for p in result.problems(one, delayed=delayed) if not p.startswith("every copy")]
    overlapped = gather(any(saved.overlapped for saved in result.saves[1:]))
    if delayed and one.overlaps and not any(overlapped):
        problems.append("every copy was over when save() returned: nothing is overlapped")
    return problems


def main() -> None:
    memory_dir, out_dir, *only = sys.argv[1:]
    os.environ.pop("FLASHCKPT_VERIFY", None)
    dist.init_process_group("gloo")
    found = {}
    for name in only or PATTERNS:
        for delayed in (True, False):
            row = f"{name}-{'delayed' if delayed else 'at_once'}"
            try:
                found[row] = tell(name, delayed, f"{memory_dir}/{row}")
            except Exception:  # the others go on; torch's timeout ends them where they wait for this rank
                found[row] = [traceback.format_exc()]
            dist.barrier()
    Path(f"{out_dir}/rank{dist.get_rank()}.json").write_text(json.dumps(found))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
