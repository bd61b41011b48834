"""Ways to train, one function each. What it returns runs between one save and the next, first right after `save()`.

Those that `may_refuse` change tensors behind the manager's back: a save that can't be proved right may be refused, once
unless the row allows more `refusals`. Then the manager has seen what they do. All others have to be right at every
save.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from flashckpt import CheckpointConfig, CheckpointManager, PerRank
from tests.training.harness import Cycle, Pattern, Run

if TYPE_CHECKING:
    from collections.abc import Callable

PATTERNS: dict[str, Pattern] = {}


def pattern(**facts: Any) -> Callable[[Callable[[Run], Cycle]], Callable[[Run], Cycle]]:
    def register(build: Callable[[Run], Cycle]) -> Callable[[Run], Cycle]:
        PATTERNS[build.__name__] = Pattern(build.__name__, build, **facts)
        return build

    return register


right = functools.partial(pattern)
may_refuse = functools.partial(pattern, refusals=1, overlaps=False)
on_host = {"devices": ("cpu",)}


# --- parts that patterns share ------------------------------------------------------------------------------


def net(run: Run, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device=run.device, **options)


def batch(run: Run, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(sizes or (8, 16)), dtype=dtype).to(run.device)


def backward(run: Run, model: Callable[..., torch.Tensor]) -> torch.Tensor:
    loss = model(batch(run)).square().mean()
    loss.backward()
    return loss


def trained(run: Run, model: nn.Module, *optimizers: Any, before: Cycle | None = None) -> Cycle:
    """`before`, which comes right after `save()`, then a step of training."""

    def cycle() -> None:
        if before is not None and run.saves:
            before()
        backward(run, model)
        for one in optimizers:
            one.step()
            one.zero_grad()

    return cycle


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def misbehaves(run: Run, change: Callable[[nn.Module, torch.optim.Optimizer], object], **settings: Any) -> Cycle:
    """Plain training, and right after each `save()` somebody changes model or optimizer."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer, **settings)
    return trained(run, model, optimizer, before=lambda: change(model, optimizer))


# --- must be right: optimizers ------------------------------------------------------------------------------


def _plain(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Run], Cycle]:
    def build(run: Run) -> Cycle:
        model = net(run)
        optimizer = make(model.parameters())
        run.manage(model, optimizer)
        return trained(run, model, optimizer)

    return build


for _name, _make in {
    "adamw_for_loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_without_state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "averaged_sgd": lambda p: torch.optim.ASGD(p),
}.items():
    PATTERNS[_name] = Pattern(_name, _plain(_make))


@right(devices=("sim",))
def adamw_capturable(run):
    model = net(run)
    optimizer = adamw(model, capturable=True)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def tensor_learning_rate_under_one_cycle(run):
    """The scheduler fills the learning rate in place, outside of step()."""
    model = net(run)
    optimizer = adamw(model, lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    run.manage(model, optimizer, lr_scheduler=scheduler)

    def cycle():
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return cycle


class _TensorSchedule:
    """A scheduler whose state is a tensor that it changes in place."""

    def __init__(self, optimizer):
        self.optimizer, self.factor = optimizer, torch.ones(3)

    def step(self):
        self.factor.mul_(0.9)

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor.copy_(state["factor"])


@right()
def scheduler_of_tensors(run):
    model = net(run)
    optimizer = adamw(model)
    scheduler = _TensorSchedule(optimizer)
    run.manage(model, optimizer, lr_scheduler=scheduler)
    return trained(run, model, optimizer, before=scheduler.step)


@right()
def gradient_scaler(run):
    model = net(run)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(torch.device(run.device).type, init_scale=8.0)
    run.manage(model, optimizer, states={"scaler": scaler})

    def cycle():
        scaler.scale(model(batch(run)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return cycle


def _with_closure(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Run], Cycle]:
    def build(run: Run) -> Cycle:
        model = net(run)
        optimizer = make(model.parameters())
        run.manage(model, optimizer)
        seen: list[bool] = []

        def closure() -> torch.Tensor:
            seen.append(run.copy_is_under_way())
            optimizer.zero_grad()
            return backward(run, model)

        def cycle() -> None:
            seen.clear()
            optimizer.step(closure)
            if run.saves >= 2:
                run.note("the closure ran beside the copy", seen[0])

        return cycle

    return build


for _name, _make in {
    "lbfgs_closure": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "lbfgs_line_search": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    "sgd_closure": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw_closure": lambda p: torch.optim.AdamW(p),
}.items():
    PATTERNS[_name] = Pattern(_name, _with_closure(_make))


@right()
def compiled_step(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    def cycle():
        backward(run, model)
        step()
        optimizer.zero_grad()

    return cycle


@right(slow=True, **on_host)
def compiled_step_by_inductor(run):
    model = net(run)
    optimizer = adamw(model, lr=torch.tensor(1e-2), capturable=True)
    run.manage(model, optimizer)
    step = torch.compile(optimizer.step)

    def cycle():
        backward(run, model)
        step()
        optimizer.zero_grad()

    return cycle


@right()
def compiled_model(run):
    model = torch.compile(net(run), backend="eager")
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def compiled_training_step(run):
    """Forward, backward and step in one compiled function."""
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.manage(model, optimizer)

    @torch.compile(backend="eager")
    def train(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: train(batch(run))


@right()
def gradient_accumulation(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        for _ in range(3):
            backward(run, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return cycle


@right()
def save_before_step(run):
    """Gradients are there at save(), and the step follows at once."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        backward(run, model)

    return cycle


@right()
def gradients_clipped(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return cycle


@right()
def an_optimizer_for_each_parameter(run):
    model = net(run)
    optimizers = [torch.optim.AdamW([p]) for p in model.parameters()]
    run.manage(model, optimizers)
    return trained(run, model, *optimizers)


@right()
def two_optimizers_in_two_threads(run):
    """Both wait for one copy."""
    model = net(run)
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    run.manage(model, optimizers)

    def cycle():
        backward(run, model)
        threads = [threading.Thread(target=one.step) for one in optimizers]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    return cycle


@right()
def optimizers_in_backward(run):
    """One for each parameter, stepped by a hook as soon as its gradient is there."""
    model = net(run)
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    run.manage(model, list(optimizers.values()))
    return lambda: backward(run, model)


@right(devices=("sim",))
def optimizers_in_backward_on_two_devices(run):
    """Autograd runs a thread for each device: the hooks of both wait for one copy."""
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 4).to(run.device)])
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    run.manage(model, list(optimizers.values()))

    def cycle():
        x = torch.randn(8, 16)
        (model[0](x).square().mean().to(run.device) + model[1](x.to(run.device)).square().mean()).backward()

    return cycle


@right()
def interrupted_at_the_gate(run):
    """Ctrl-C while optimizer.step() waits for the copy; then training goes on."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    interrupts = []

    def interrupt(*_):
        interrupts.append(run.copy_is_under_way())
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    run.cleanup.callback(signal.signal, signal.SIGALRM, previous)

    backward(run, model)

    def cycle():
        if run.saves and run.delayed:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                optimizer.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
            run.note("an interrupt came while the step waited", any(interrupts))
        optimizer.step()
        optimizer.zero_grad()
        backward(run, model)  # so that the step comes at once after save()

    return cycle


class _Inside(torch.optim.Optimizer):
    """Keeps a master copy beside each parameter, and swaps its buffers: all of it within step()."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["ahead"] = p.double().clone(), torch.zeros_like(p)
                    state["behind"], state["seen"] = torch.zeros_like(p), 0
                if p.grad is None:
                    continue
                state["ahead"], state["behind"] = state["behind"], state["ahead"]
                state["ahead"].copy_(state["behind"]).lerp_(p.grad, 0.1)
                state["master"].sub_(state["ahead"], alpha=group["lr"])
                state["seen"] += 1
                p.copy_(state["master"])


@right()
def optimizer_of_ones_own(run):
    model = net(run)
    optimizer = _Inside(model.parameters())
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


class _Lookahead(torch.optim.Optimizer):
    """Every second step it goes back half of the way. Steps an optimizer inside, whose state it shares."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if self.steps % 2 == 0:
                    self.slow[p].lerp_(p, 0.5)
                    p.copy_(self.slow[p])


@right()
def lookahead(run):
    model = net(run)
    optimizer = _Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    slow = {name: optimizer.slow[p] for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"lookahead": slow})
    return trained(run, model, optimizer)


@right()
def step_post_hook(run):
    model = net(run)
    optimizer = adamw(model)

    @torch.no_grad()
    def clamp(*_):
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right(**on_host)
def sparse_gradients(run):
    model = nn.ModuleDict({"words": nn.Embedding(20, 8, sparse=True), "head": nn.Linear(8, 2)}).to(run.device)
    optimizers = [
        torch.optim.SparseAdam(model["words"].parameters(), lr=0.1),
        torch.optim.AdamW(model["head"].parameters()),
    ]
    run.manage(model, optimizers)

    def cycle():
        model["head"](model["words"](torch.randint(20, (8,)).to(run.device))).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    return cycle


@right()
def group_added_later(run):
    model = net(run)
    optimizer = torch.optim.AdamW(model[0].parameters())
    run.manage(model, optimizer)

    def cycle():
        if run.saves == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def unfrozen_midway(run):
    model = net(run)
    model[0].requires_grad_(False)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves == 2:
            model[0].requires_grad_(True)
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def optimizer_state_replaced(run):
    """Moments get other tensors after save(); the ones that are being copied stay as they are."""

    def replace(_, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].double().float() * 0.5
            state["exp_avg_sq"] = state["exp_avg_sq"].clone()

    return misbehaves(run, replace)


@right()
def optimizer_state_cleared(run):
    return misbehaves(run, lambda _, optimizer: optimizer.state.clear())


@right()
def model_converted_between_steps(run):
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.manage(model, optimizer)

    def cycle():
        if run.saves % 2:
            model.half()
        else:
            model.to(torch.float32)
        dtype = next(model.parameters()).dtype
        model(batch(run, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def two_saves_of_one_state(run):
    """A save right behind another one; then training goes on."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves:
            run.save_besides()
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


# --- must be right: models ----------------------------------------------------------------------------------


def _model(make: Callable[[Run], nn.Module]) -> Callable[[Run], Cycle]:
    def build(run: Run) -> Cycle:
        model = make(run).to(run.device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        run.manage(model, optimizer)
        return trained(run, model, optimizer)

    return build


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class _Odd(nn.Module):
    """Parameters and buffers of odd shapes, strides and dtypes."""

    def __init__(self):
        super().__init__()
        self.across = nn.Parameter(torch.randn(16, 16).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turning = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.register_buffer("wide", torch.ones(1, 8).expand(4, 8))
        self.register_buffer("every_second", torch.arange(20.0)[::2])
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("tiny", torch.ones(5).to(torch.float8_e4m3fn))

    def forward(self, x):
        return (x @ self.across * self.scale) * self.turning.abs()


class _Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class _Marked(torch.Tensor):
    """A subclass as users write them."""


def _of_a_subclass(run):
    model = net(run)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone().as_subclass(_Marked))
    return model


def _frozen_by_inference(run):
    """Its tensors have no version counter."""
    with torch.inference_mode():
        base = net(run)
        for p in base.parameters():
            p.copy_(torch.randn(p.shape))
    return _Lora(base)


def _pruned(run):
    model = net(run)
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return model


def _observed(run):
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(net(run), MovingAverageMinMaxObserver(), fake)


for _name, _make in {
    "batch_norm": lambda run: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
    "frozen_base_with_adapters": lambda run: _Lora(net(run)),
    "frozen_base_of_inference_tensors": _frozen_by_inference,
    "tied_weights": lambda run: _Tied(),
    "weight_norm": lambda run: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 2)),
    "spectral_norm": lambda run: nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 8)), nn.Linear(8, 2)),
    "old_weight_norm": lambda run: nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 2)),
    "old_spectral_norm": lambda run: nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 8)), nn.Linear(8, 2)),
    "orthogonal": lambda run: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 8)), nn.Linear(8, 2)),
    "pruned": _pruned,
    "odd_tensors": lambda run: _Odd(),
    "tensor_subclass": _of_a_subclass,
    "half_precision": lambda run: nn.Sequential(nn.Linear(16, 4)).bfloat16().float(),
}.items():
    PATTERNS[_name] = Pattern(_name, _model(_make))
PATTERNS["quantization_observers"] = Pattern("quantization_observers", _model(_observed), devices=("cpu",))


@right()
def bfloat16_model(run):
    model = net(run, dtype=torch.bfloat16)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        model(batch(run, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def pruned_midway(run):
    """The weight gets another name after the second save, and a mask beside it."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves == 2:
            prune.l1_unstructured(model[0], "weight", amount=0.3)
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def buffers_set_after_save(run):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def reset():
        model[1].reset_running_stats()

    return trained(run, model, optimizer, before=reset)


@right()
def part_of_the_model_replaced(run):
    """The parameter that is being copied is nobody's any more, and stays as it is."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves == 2:
            for old in model[2].parameters():
                optimizer.state.pop(old)
            model[2] = nn.Linear(32, 4).to(run.device)
            optimizer.param_groups[0]["params"][2:] = list(model[2].parameters())
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right(overlaps=False)
def without_an_optimizer(run):
    """Nothing holds such a job back: it is copied in save()."""
    model = net(run)
    run.manage(model)

    @torch.no_grad()
    def cycle():
        for p in model.parameters():
            p.mul_(0.9)

    return cycle


@right(group=True, **on_host)
def distributed_data_parallel(run):
    model = nn.parallel.DistributedDataParallel(net(run))
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


# --- must be right: further states --------------------------------------------------------------------------


@right()
def average_in_a_dict(run):
    model = net(run)
    optimizer = adamw(model)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"ema": average})

    @torch.no_grad()
    def update():
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.5).add_(1)

    return trained(run, model, optimizer, before=update)


@right()
def averaged_model(run):
    model = net(run)
    optimizer = adamw(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    run.manage(model, optimizer, states={"swa": averaged})

    def update():
        backward(run, model)
        optimizer.step()
        averaged.update_parameters(model)

    return trained(run, model, optimizer, before=update)


@right()
def states_changed_by_another_thread(run):
    model = net(run)
    optimizer = adamw(model)
    table = {"rows": torch.zeros(64, 64), "count": torch.zeros((), dtype=torch.int64)}
    run.manage(model, optimizer, states={"table": table, "own": PerRank({"rows": table["rows"][3]})})

    def change():
        for tensor in table.values():
            tensor.add_(1)

    def in_a_thread():
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()

    return trained(run, model, optimizer, before=in_a_thread)


@right()
def odd_states(run):
    """An inference tensor, and expanded, strided, 0-dim, empty ones; numpy writes behind one of them."""
    model = net(run)
    optimizer = adamw(model)
    with torch.inference_mode():
        inferred = torch.ones(8)
    state = {
        "inferred": inferred,
        "wide": torch.arange(4.0).reshape(4, 1).expand(4, 8),
        "across": torch.randn(8, 4).t(),
        "every_second": torch.arange(20)[::2],
        "scalar": torch.tensor(3),
        "nothing": torch.zeros(0, 5),
        "of_numpy": torch.ones(8),
        "nested": [torch.ones(3), {"deep": (torch.zeros(2), 4)}],
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    }
    behind = state["of_numpy"].numpy()
    run.manage(model, optimizer, states={"odd": state})

    def change():
        with torch.inference_mode():
            inferred.mul_(2)
        for key in ("across", "every_second", "scalar"):
            state[key].add_(1)
        state["nested"][0].add_(1)
        behind[:] += 1

    return trained(run, model, optimizer, before=change)


# --- changed behind the manager's back ----------------------------------------------------------------------


@may_refuse()
def embedding_max_norm(run):
    """Its forward pass changes the weight."""
    model = nn.Embedding(20, 8, max_norm=0.5).to(run.device)
    optimizer = adamw(model, lr=0.5)
    run.manage(model, optimizer)

    def cycle():
        model(torch.arange(20).to(run.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@may_refuse(**on_host)
def embedding_bag_max_norm(run):
    model = nn.EmbeddingBag(20, 8, max_norm=0.5, mode="sum").to(run.device)
    optimizer = adamw(model, lr=0.5)
    run.manage(model, optimizer)

    def cycle():
        model(torch.arange(20).reshape(4, 5).to(run.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def optimizer_made_anew(run):
    """The manager knows the old one."""
    model = net(run)
    old = adamw(model)
    run.manage(model, old)
    optimizer = adamw(model)
    return trained(run, model, optimizer)


@right()
def optimizer_deep_copied(run):
    """The copy has no hooks, and parameters of its own that were put back."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    twin = copy.copy(optimizer)
    twin.__setstate__(optimizer.__getstate__())
    return trained(run, model, twin)


@right()
def adversarial_pair_with_one_optimizer_given(run):
    model = nn.ModuleDict({"generator": nn.Linear(16, 16), "critic": nn.Linear(16, 1)}).to(run.device)
    given, other = adamw(model["generator"]), adamw(model["critic"])
    run.manage(model, given)

    def cycle():
        model["critic"](model["generator"](batch(run)).detach()).square().mean().backward()
        other.step()
        other.zero_grad()
        model["critic"](model["generator"](batch(run))).square().mean().backward()
        given.step()
        given.zero_grad()

    return cycle


class _Nothing(torch.optim.Optimizer):
    """Its update is made in backward; step() is there for the loop only."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad)
        p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        p.grad = None

    def step(self, closure=None):
        pass


@may_refuse()
def step_without_effect(run):
    model = net(run)
    optimizer = _Nothing(model.parameters())
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


def _in_backward(run, model):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-2})
    return [one for p in model.parameters() for one in p._in_backward_optimizers]


@right()
def torch_optimizers_in_backward(run):
    model = net(run)
    run.manage(model, _in_backward(run, model))
    return lambda: backward(run, model)


@right()
def torch_optimizers_in_backward_not_given(run):
    model = net(run)
    given = torch.optim.SGD(model.parameters(), lr=1e-2)
    _in_backward(run, model)
    run.manage(model, given)
    return lambda: backward(run, model)


@may_refuse(group=True, **on_host)
def parallel_with_fused_optimizer(run):
    """DDP runs the optimizer in its communication hook."""
    model = nn.parallel.DistributedDataParallel(net(run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model._register_fused_optim(torch.optim.AdamW, lr=1e-2)
    run.manage(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return lambda: backward(run, model)


@right()
def step_pre_hook_of_the_users(run):
    """Registered before the manager's, it changes parameters before the manager's can wait."""
    model = net(run)
    optimizer = adamw(model)

    @torch.no_grad()
    def decay(*_):
        for p in model.parameters():
            p.mul_(0.9)

    optimizer.register_step_pre_hook(decay)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@may_refuse()
def global_step_pre_hook_of_the_users(run):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model = net(run)
    optimizer = adamw(model)

    @torch.no_grad()
    def decay(*_):
        for p in model.parameters():
            p.mul_(0.9)

    run.cleanup.callback(register_optimizer_step_pre_hook(decay).remove)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@may_refuse()
def step_without_its_hooks(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        torch.optim.AdamW.step.__wrapped__(optimizer)
        optimizer.zero_grad()

    return cycle


@may_refuse()
def functional_update(run):
    """Plain arithmetic on lists of tensors; the optimizer is there, but never steps."""
    model = net(run)
    run.manage(model, adamw(model))

    @torch.no_grad()
    def update():
        parameters = list(model.parameters())
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)

    def cycle():
        backward(run, model)
        update()
        model.zero_grad()

    return cycle


@may_refuse()
def schedule_free(run):
    """Saves happen in eval mode; train() then moves the parameters in place."""
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for p in model.parameters():
        optimizer.state[p]["z"] = torch.randn_like(p)
    run.manage(model, optimizer)

    @torch.no_grad()
    def lerp(weight):
        for p in model.parameters():
            p.lerp_(optimizer.state[p]["z"], weight)

    def cycle():
        if run.saves:
            lerp(-0.1)  # train()
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()
        lerp(0.2)  # eval()

    return cycle


@may_refuse()
def schedule_free_that_is_no_optimizers(run):
    """As above, by pointer: in evaluation `p.data` is another tensor, which is filled anew at each evaluation."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    evaluated = {p: torch.zeros_like(p) for p in model.parameters()}
    kept: dict[Any, torch.Tensor] = {}

    def cycle():
        for p, data in kept.items():
            p.data = data
        for p in model.parameters():
            evaluated[p].mul_(0.5)
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            kept[p] = p.data
            evaluated[p].copy_(p.detach() * 2)
            p.data = evaluated[p]

    return cycle


@may_refuse()
def sharpness_aware(run):
    """SAM: the first step climbs, outside of the base optimizer's step; the second goes back and steps."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        with torch.no_grad():
            climbed = [p.grad * 0.05 for p in model.parameters()]
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        backward(run, model)
        with torch.no_grad():
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@may_refuse()
def sophias_hessian(run):
    """Moments are updated between steps, from a loss of its own."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def update():
        for p in model.parameters():
            optimizer.state[p]["exp_avg_sq"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)

    def before():
        backward(run, model)
        update()
        optimizer.zero_grad()

    return trained(run, model, optimizer, before=before)


class _Momentum(nn.Module):
    """MoCo: forward moves the key encoder towards the query encoder."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, x):
        self.follow()
        return self.query(x) * self.key(x)


@right()
def momentum_encoder(run):
    model = _Momentum().to(run.device)
    optimizer = torch.optim.AdamW(model.query.parameters())
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def momentum_encoder_by_data(run):
    """As it is written where nobody thinks of autograd: in place, on `.data`."""
    model = _Momentum().to(run.device)
    optimizer = torch.optim.AdamW(model.query.parameters())
    run.manage(model, optimizer)

    def follow():
        for q, k in zip(model.query.parameters(), model.key.parameters(), strict=True):
            k.data.mul_(0.9).add_(q.data, alpha=0.1)

    return trained(run, model, optimizer, before=follow)


@right()
def teacher_as_a_part(run):
    """Updated right after save(), by torch's foreach."""
    model = nn.ModuleDict({"student": nn.Linear(16, 4), "teacher": nn.Linear(16, 4)}).to(run.device)
    model["teacher"].requires_grad_(False)
    optimizer = adamw(model["student"])
    run.manage(model, optimizer)

    @torch.no_grad()
    def follow():
        torch._foreach_lerp_(list(model["teacher"].parameters()), list(model["student"].parameters()), 0.5)

    return trained(run, model["student"], optimizer, before=follow)


@right()
def teacher_updated_by_a_thread(run):
    model = nn.ModuleDict({"student": nn.Linear(16, 4), "teacher": nn.Linear(16, 4)}).to(run.device)
    model["teacher"].requires_grad_(False)
    optimizer = adamw(model["student"])
    run.manage(model, optimizer)

    def follow():
        with torch.no_grad():
            for t, s in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                t.lerp_(s, 0.5)

    def in_a_thread():
        thread = threading.Thread(target=follow)
        thread.start()
        thread.join()

    return trained(run, model["student"], optimizer, before=in_a_thread)


@torch.no_grad()
def _fill(model, _):
    for p in model.parameters():
        p.copy_(torch.zeros_like(p))


@may_refuse()
def swapped_for_evaluation(run):
    """copy_ there and back again: only versions tell."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    average = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def swap_and_back():
        kept = [p.detach().clone() for p in model.parameters()]
        for p, a in zip(model.parameters(), average, strict=True):
            p.copy_(a)
        if run.saves % 2:
            run.wait_until_copied()
        for p, k in zip(model.parameters(), kept, strict=True):
            p.copy_(k)

    return trained(run, model, optimizer, before=swap_and_back)


@may_refuse()
def exchanged_by_data(run):
    """`p.data` and the average's change places, and what was the parameter is averaged into."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    average = [torch.zeros_like(p) for p in model.parameters()]

    def exchange():
        for number, p in enumerate(model.parameters()):
            p.data, average[number] = average[number], p.data
        for number, p in enumerate(model.parameters()):
            average[number].lerp_(p.data, 0.5)
        for number, p in enumerate(model.parameters()):
            p.data, average[number] = average[number], p.data

    return trained(run, model, optimizer, before=exchange)


@right()
def vector_to_parameters(run):
    """Parameters become views of one vector; the tensors that are being copied stay as they are."""

    def change(model, _):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(vector, model.parameters())

    return misbehaves(run, change)


@may_refuse()
def parameters_of_one_flat_buffer(run):
    """All are views of one tensor, which is changed as a whole."""
    model = net(run)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = 0
    for module in (model[0], model[2]):
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(flat[start : start + p.numel()].view(p.shape)))
            start += p.numel()
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer, before=lambda: flat.mul_(0.9))


@may_refuse()
def model_loaded_after_save(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    return trained(run, model, optimizer, before=lambda: model.load_state_dict(other))


@right()
def optimizer_loaded_after_save(run):
    """torch puts other tensors in place."""
    kept: list[Any] = []

    def change(_, optimizer):
        if not kept:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        optimizer.load_state_dict(kept[0])

    return misbehaves(run, change)


@may_refuse()
def moments_zeroed_after_save(run):
    def zero(_, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    return misbehaves(run, zero)


@may_refuse()
def head_initialized_anew(run):
    return misbehaves(run, lambda model, _: model[2].reset_parameters())


@may_refuse()
def noise_in_forward(run):
    """A hook perturbs the weights in place for one forward pass."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    noise: list[torch.Tensor] = []

    @torch.no_grad()
    def perturb(*_):
        noise[:] = [torch.randn_like(p) * 0.01 for p in model.parameters()]
        for p, n in zip(model.parameters(), noise, strict=True):
            p.add_(n)

    @torch.no_grad()
    def calm(*_):
        for p, n in zip(model.parameters(), noise, strict=True):
            p.sub_(n)

    model.register_forward_pre_hook(perturb)

    def cycle():
        loss = model(batch(run)).square().mean()
        loss.backward()
        calm()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right()
def meta_learning(run):
    """Reptile: inner steps by an optimizer of the moment, then back to a point between."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def inner():
        start = [p.detach().clone() for p in model.parameters()]
        short = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            backward(run, model)
            short.step()
            short.zero_grad()
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.copy_(s.lerp(p, 0.5))

    return trained(run, model, optimizer, before=inner)


@right()
def inference_parameters_changed(run):
    """No version counter tells of it."""
    with torch.inference_mode():
        base = net(run)
    model = _Lora(base).to(run.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run.manage(model, optimizer)

    @torch.inference_mode()
    def change():
        for p in base.parameters():
            p.add_(1)

    return trained(run, model, optimizer, before=change)


# What no version counter of torch tells: only a checksum does.


@may_refuse()
def clamped_by_data(run):
    """WGAN. `.data` has a version counter of its own."""

    def clamp(model, _):
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)

    return misbehaves(run, clamp)


@may_refuse()
def moments_scaled_by_data(run):
    def scale(_, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].data.mul_(0.5)

    return misbehaves(run, scale)


@may_refuse(**on_host)
def written_by_numpy(run):
    def write(model, _):
        for p in model.parameters():
            p.detach().numpy()[...] *= 0.5

    return misbehaves(run, write)


@may_refuse(**on_host)
def written_by_dlpack(run):
    def write(model, _):
        for p in model.parameters():
            torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).mul_(0.5)

    return misbehaves(run, write)


@may_refuse()
def written_by_storage(run):
    def write(model, _):
        for p in model.parameters():
            alias = torch.empty(0, dtype=p.dtype, device=p.device)
            alias.set_(p.untyped_storage(), 0, p.shape)
            alias.mul_(0.5)

    return misbehaves(run, write)


@may_refuse()
def written_by_storage_bytes(run):
    def write(model, _):
        for p in model.parameters():
            p.untyped_storage().fill_(1)

    return misbehaves(run, write)


def _overwrite(model, _):
    for p in model.parameters():
        zeros = bytes(p.nbytes)
        ctypes.memmove(p.data_ptr(), zeros, p.nbytes)


@may_refuse(**on_host)
def written_by_address(run):
    """What a replayed graph amounts to: bytes change, and torch knows nothing of it."""
    return misbehaves(run, _overwrite)


@may_refuse(**on_host)
def written_by_a_kernel_of_ones_own(run):
    """One element of the last parameter, by a library that got its address once."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    last = list(model.parameters())[-1]
    view = (ctypes.c_float * last.numel()).from_address(last.data_ptr())

    def write():
        view[last.numel() - 1] += 1.0

    return trained(run, model, optimizer, before=write)


@may_refuse(**on_host)
def parameters_in_shared_memory(run):
    """Hogwild: another process writes. A second mapping of the same file stands for it."""
    model = net(run)
    parameters = dict(model.named_parameters())
    files = []
    for name, p in parameters.items():
        path = f"{run.memory_dir}.{name}"
        shared = torch.from_file(path, shared=True, size=p.numel(), dtype=p.dtype).view(p.shape)
        shared.copy_(p.detach())
        module = model[int(name.partition(".")[0])]
        setattr(module, name.rpartition(".")[2], nn.Parameter(shared))
        files.append((os.open(path, os.O_RDWR), p.nbytes))
        run.cleanup.callback(os.unlink, path)
        run.cleanup.callback(os.close, files[-1][0])
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def write():
        for descriptor, length in files:
            os.pwrite(descriptor, bytes([run.saves]) * length, 0)

    return trained(run, model, optimizer, before=write)


@may_refuse(group=True, **on_host)
def written_by_a_collective(run):
    """Averaging of models between steps: gloo writes where the parameter lies."""
    import torch.distributed as dist

    def average(model, _):
        for p in model.parameters():
            dist.scatter(p.detach(), [torch.zeros_like(p)], src=0)

    return misbehaves(run, average)


@may_refuse(**on_host)
def odd_tensors_written_by_data(run):
    """Strided, 0-dim, empty and complex ones: none is contiguous in host memory and of a plain dtype by chance."""
    model = _Odd()
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def write():
        for p in model.parameters():
            p.data.mul_(0.5)

    return trained(run, model, optimizer, before=write)


@may_refuse()
def moments_exchanged_by_data(run):
    """The tensor stays, its memory is another: offloading as some write it."""

    def exchange(_, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].data = torch.zeros_like(state["exp_avg"])

    return misbehaves(run, exchange)


# Large ones: what is copied in save() is cloned only up to a few MiB, and what did not change for long may be deferred.


def _large(run, **options):
    """2 MiB."""
    return torch.zeros(512, 1024, device=run.device, **options)


class _Banked(nn.Module):
    """A memory bank of a few MiB that a forward pass writes to, when it is told to."""

    def __init__(self, run, buffers):
        super().__init__()
        self.net = net(run)
        self.writes = True
        for number in range(buffers):
            self.register_buffer(f"bank{number}", _large(run))

    @torch.no_grad()
    def write(self):
        for bank in self.buffers():
            bank.add_(1)

    def forward(self, x):
        if self.writes:
            self.write()
        return self.net(x)


@right()
def large_buffers_changed_in_forward(run):
    model = _Banked(run, 4)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right(saves=6)
def large_buffer_changed_now_and_then(run):
    """Between some saves nobody writes to it: that it was steady once does not mean that it is."""
    model = _Banked(run, 1)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        model.writes = run.saves % 3 == 0
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@right(saves=6)
def large_states_changed_now_and_then(run):
    """A replay buffer, say."""
    model = net(run)
    optimizer = adamw(model)
    replay = {"rows": _large(run)}
    run.manage(model, optimizer, states={"replay": replay})

    def write():
        if run.saves % 3 == 0:
            replay["rows"].add_(1)

    return trained(run, model, optimizer, before=write)


@right(saves=6, **on_host)
def large_states_written_by_numpy_now_and_then(run):
    """States may change at any time, however it is done."""
    model = net(run)
    optimizer = adamw(model)
    replay = {"rows": _large(run)}
    rows = replay["rows"].numpy()
    run.manage(model, optimizer, states={"replay": replay})

    def write():
        if run.saves % 3 == 0:
            rows[:] += 1

    return trained(run, model, optimizer, before=write)


def _large_teacher(run, **settings):
    model = nn.ModuleDict({"student": nn.Linear(16, 4), "teacher": nn.Linear(1024, 512)}).to(run.device)
    model["teacher"].requires_grad_(False)
    optimizer = adamw(model["student"])
    run.manage(model, optimizer, **settings)
    return model, optimizer


@right(overlaps=False)
def large_teacher(run):
    model, optimizer = _large_teacher(run)

    @torch.no_grad()
    def follow():
        for p in model["teacher"].parameters():
            p.mul_(0.9).add_(1)

    return trained(run, model["student"], optimizer, before=follow)


@may_refuse()
def large_teacher_by_data(run):
    """Its version counters never move: it looks as if it were frozen."""
    model, optimizer = _large_teacher(run)

    def follow():
        for p in model["teacher"].parameters():
            p.data.mul_(0.9).add_(1)

    return trained(run, model["student"], optimizer, before=follow)


@may_refuse(**on_host)
def large_moments_exchanged_by_data(run):
    """The old memory would go back to the system, and a copy that still reads it would end the process."""
    model = nn.Linear(3072, 3072, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run.manage(model, optimizer)

    def exchange():
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        if run.saves % 2:
            momentum.data = torch.zeros(1)
        else:
            momentum.set_(torch.zeros(1))
        run.wait_until_copied()
        optimizer.state.clear()

    def cycle():
        if run.saves:
            exchange()
        model(torch.randn(2, 3072)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cycle


@may_refuse(saves=7)
def large_teacher_from_the_fourth_save_on(run):
    """An average that starts after a warm-up."""
    model, optimizer = _large_teacher(run)

    @torch.no_grad()
    def follow():
        if run.saves >= 4:
            for p in model["teacher"].parameters():
                p.mul_(0.9).add_(1)

    return trained(run, model["student"], optimizer, before=follow)


@may_refuse(saves=7)
def large_teacher_by_data_from_the_fourth_save_on(run):
    model, optimizer = _large_teacher(run, verify="recheck")

    def follow():
        if run.saves >= 4:
            for p in model["teacher"].parameters():
                p.data.mul_(0.9).add_(1)

    return trained(run, model["student"], optimizer, before=follow)


@may_refuse(saves=7, **on_host)
def written_by_numpy_from_the_fourth_save_on(run):
    """Later than the saves that are checksummed by themselves: only `verify="recheck"` finds it."""

    def write(model, _):
        if run.saves >= 4:
            for p in model.parameters():
                p.detach().numpy()[...] *= 0.5

    return misbehaves(run, write, verify="recheck")


@right(overlaps=False)
def large_pair_with_one_optimizer_given(run):
    """The critic is larger than what save() clones."""
    model = nn.ModuleDict({"generator": nn.Linear(16, 1024), "critic": nn.Linear(1024, 1536)}).to(run.device)
    given = adamw(model["generator"])
    other = torch.optim.SGD(model["critic"].parameters(), lr=0.1)
    run.manage(model, given)

    def cycle():
        model["critic"](model["generator"](batch(run)).detach()).square().mean().backward()
        other.step()
        other.zero_grad()
        model["critic"](model["generator"](batch(run))).square().mean().backward()
        given.step()
        given.zero_grad()

    return cycle


@may_refuse()
def large_model_clamped_by_data(run):
    model = nn.Sequential(nn.Linear(16, 1024), nn.Linear(1024, 1024)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def clamp():
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)

    return trained(run, model, optimizer, before=clamp)


# Where the manager has to remember whom it caught.


@may_refuse(refusals=2)
def another_tensor_each_time(run):
    """Two saves are refused, one for each; then both are known."""

    @torch.no_grad()
    def change(model, _):
        list(model.parameters())[run.saves % 2].zero_()

    return misbehaves(run, change)


@may_refuse()
def moments_made_anew_and_zeroed(run):
    """What was caught is another tensor by now, under the same key."""

    def change(_, optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg"] = torch.ones_like(state["exp_avg"])

    return misbehaves(run, change)


@may_refuse(saves=9)
def changed_now_and_then(run):
    @torch.no_grad()
    def change(model, _):
        if run.saves % 3 == 0:
            model[0].weight.zero_()

    return misbehaves(run, change)


@may_refuse(saves=9)
def changed_from_the_sixth_save_on(run):
    @torch.no_grad()
    def change(model, _):
        if run.saves >= 6:
            model[0].weight.zero_()

    return misbehaves(run, change)


@may_refuse()
def moments_updated_in_backward(run):
    """KFAC: a hook on the gradient gathers statistics in the optimizer's state."""
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def gather(p):
        state = optimizer.state[p]
        if "statistics" not in state:
            state["statistics"] = torch.zeros_like(p)
        state["statistics"].addcmul_(p.grad, p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(gather)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@may_refuse()
def changed_in_inference_mode(run):
    @torch.inference_mode()
    def change(model, _):
        model[0].weight.mul_(0.5)

    return misbehaves(run, change)


def _compiled(run, backend):
    @torch.compile(backend=backend)
    def halve(parameters):
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.5)

    halve(list(net(run).parameters()))  # compiles it: later it is quick enough to come before the copy
    return misbehaves(run, lambda model, _: halve(list(model.parameters())))


@may_refuse()
def changed_in_a_compiled_function(run):
    return _compiled(run, "aot_eager")


@may_refuse(slow=True, **on_host)
def changed_in_a_function_by_inductor(run):
    return _compiled(run, "inductor")


@may_refuse()
def step_replaced(run):
    """Somebody puts a function of his own in the place of optimizer.step, after the manager was made."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def step():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)

    optimizer.step = step
    return trained(run, model, optimizer)


@right()
def hooks_cleared(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    optimizer._optimizer_step_pre_hooks.clear()
    return trained(run, model, optimizer)


@right()
def inner_optimizer_stepped(run):
    """The wrapper was given and does not step; the loop steps what is inside."""
    model = net(run)
    wrapper = _Lookahead(adamw(model))
    run.manage(model, wrapper)
    return trained(run, model, wrapper.base)


class _WithoutInit(torch.optim.Optimizer):
    """As many wrappers are written: torch's own __init__ is never called, and torch runs no hooks at its step()."""

    def __init__(self, base):
        self.base = base
        self.defaults, self.param_groups, self.state = base.defaults, base.param_groups, base.state

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        self.base.step()


@may_refuse()
def wrapper_without_init(run):
    model = net(run)
    wrapper = _WithoutInit(adamw(model))
    run.manage(model, wrapper.base)
    return trained(run, model, wrapper)


@may_refuse()
def closure_that_changes_parameters(run):
    """It climbs before it differentiates."""
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.manage(model, optimizer)

    def closure():
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        return backward(run, model)

    return lambda: optimizer.step(closure)


def _step_compiled_early(run, backend):
    model = net(run)
    optimizer = adamw(model, lr=torch.tensor(1e-2))
    step = torch.compile(optimizer.step, backend=backend)

    def train():
        backward(run, model)
        step()
        optimizer.zero_grad()

    for _ in range(2):
        train()
    run.manage(model, optimizer)
    return train


@may_refuse()
def step_compiled_before_the_manager(run):
    """Whether it learns of the manager's hook is torch's affair."""
    return _step_compiled_early(run, "eager")


@may_refuse(slow=True, **on_host)
def step_compiled_by_inductor_before_the_manager(run):
    return _step_compiled_early(run, "inductor")


@right()
def closure_that_raises(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def failing():
        backward(run, model)
        raise ValueError("not finite")

    def closure():
        optimizer.zero_grad()
        return backward(run, model)

    def cycle():
        with contextlib.suppress(ValueError):
            optimizer.step(failing)
        optimizer.step(closure)

    return cycle


@right(saves=6)
def interrupted_in_save(run):
    """Ctrl-C within save(); then training goes on. What was interrupted is gone, or right."""
    model = _Banked(run, 4)  # more than is cloned: save() waits for it
    optimizer = adamw(model)
    run.manage(model, optimizer)
    interrupts = []

    def interrupt(*_):
        interrupts.append(True)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    run.cleanup.callback(signal.signal, signal.SIGALRM, previous)

    def cycle():
        if run.saves and run.delayed:
            with contextlib.suppress(KeyboardInterrupt):
                run.wait_until_copied()
                signal.setitimer(signal.ITIMER_REAL, (0.0005, 0.002, 0.01)[run.saves % 3])
                run.save_besides()
            signal.setitimer(signal.ITIMER_REAL, 0)
            run.note("an interrupt came within save()", bool(interrupts))
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    return cycle


# --- must be right: what looks like a change and is none, and users who do as they are told -------------------


@right()
def changed_inside_lock(run):
    model = net(run)
    optimizer = adamw(model)
    manager = run.manage(model, optimizer)

    def change():
        with manager.lock(), torch.no_grad():
            for p in model.parameters():
                p.zero_()

    return trained(run, model, optimizer, before=change)


@right()
def changed_after_waiting(run):
    model = net(run)
    optimizer = adamw(model)
    manager = run.manage(model, optimizer)

    def change():
        manager.maybe_wait_for_staging()
        for p in model.parameters():
            p.data.zero_()

    return trained(run, model, optimizer, before=change)


@right()
def changed_as_soon_as_staged(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def change():
        run.handle.wait("staged", timeout=60)
        for p in model.parameters():
            p.zero_()

    return trained(run, model, optimizer, before=change)


@right(overlaps=False)
def changed_without_overlap(run):
    def write(model, optimizer):
        for p in model.parameters():
            p.data.mul_(0.5)
            optimizer.state[p]["exp_avg"].zero_()

    return misbehaves(run, write, overlap=False)


@right()
def not_a_number(run):
    """Equal to the bit, though not to itself."""
    model = net(run)
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def read_by_others(run):
    """Evaluation, a deep copy, a state dict and views, while the copy is under way."""

    def read(model, optimizer):
        with torch.inference_mode():
            model(batch(run))
        copy.deepcopy(model)
        copy.deepcopy(optimizer.state_dict())
        model[0].weight.detach().view(-1).sum()
        model.zero_grad()

    return misbehaves(run, read)


@right()
def frozen_and_thawed_after_save(run):
    def toggle(model, _):
        for p in model.parameters():
            p.requires_grad_(False).requires_grad_(True)

    return misbehaves(run, toggle)


@right()
def saved_before_the_first_step(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        if run.saves:
            backward(run, model)
            optimizer.step()
            optimizer.zero_grad()

    return cycle


@right()
def trained_in_another_thread(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def train():
        backward(run, model)
        optimizer.step()
        optimizer.zero_grad()

    def cycle():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    return cycle


@right()
def two_managers(run):
    """Another job saves the same model, a step later."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    config = CheckpointConfig(job="other", memory_dir=run.memory_dir, interval=1, agent="off")
    other = run.cleanup.enter_context(contextlib.closing(CheckpointManager(config, model=model, optimizer=optimizer)))
    return trained(run, model, optimizer, before=lambda: other.save(run.handle.step, force=True))


@right()
def tensors_swapped(run):
    """As `module.to()` may do it. torch refuses it where somebody holds a weak reference to the parameter."""

    def swap(model, _):
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(torch.randn_like(p)))

    return misbehaves(run, swap)


@right()
def options_changed_after_save(run):
    def change(_, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["notes"] = [*group.get("notes", []), run.saves]
            group["notes"].append(7)

    return misbehaves(run, change)


@right()
def tensor_betas(run):
    """Options that are tuples of tensors, changed in place."""
    model = net(run)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False, lr=torch.tensor(1e-2)
    )
    run.manage(model, optimizer)

    def change():
        for beta in optimizer.param_groups[0]["betas"]:
            beta.mul_(0.99)

    return trained(run, model, optimizer, before=change)


class _Shampoo(torch.optim.Optimizer):
    """Its state is nested: a list of factors, and a dict beside it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.eye(size, device=p.device) for size in p.shape]
                    state["grafted"] = {"norm": torch.zeros((), device=p.device), "steps": 0}
                for axis, factor in enumerate(state["factors"]):
                    flat = p.grad.transpose(0, axis).reshape(p.shape[axis], -1)
                    factor.add_(flat @ flat.t())
                state["grafted"]["norm"].add_(p.grad.norm())
                state["grafted"]["steps"] += 1
                p.sub_(p.grad, alpha=group["lr"])


@right()
def nested_optimizer_state(run):
    model = net(run)
    optimizer = _Shampoo(model.parameters())
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right()
def batch_norm_updated_after_save(run):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    data = [batch(run) for _ in range(2)]

    def update():
        torch.optim.swa_utils.update_bn(data, model)

    return trained(run, model, optimizer, before=update)


@right()
def generator_of_ones_own(run):
    """Random numbers beside torch's own, whose state is a tensor."""
    model = net(run)
    optimizer = adamw(model)
    generator = torch.Generator()

    class Noise:
        def state_dict(self):
            return {"generator": generator.get_state()}

        def load_state_dict(self, state):
            generator.set_state(state["generator"])

    run.manage(model, optimizer, states={"noise": Noise()})
    return trained(run, model, optimizer, before=lambda: torch.randn(3, generator=generator))
