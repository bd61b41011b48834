"""Further ways to train, rarer than those in patterns.py; they join the same table."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from flashckpt import CheckpointConfig, CheckpointManager
from tests.training.patterns import (
    PATTERNS,
    _Lora,
    _Tied,
    adamw,
    backward,
    batch,
    may_refuse,
    misbehaves,
    net,
    on_host,
    right,
    trained,
)

__all__ = ["PATTERNS"]


def _step(*optimizers):
    for one in optimizers:
        one.step()
        one.zero_grad()


@right()
def retied_after_save(run):
    """The second weight becomes one of its own after one save, and the first's again after the next."""
    model = _Tied().to(run.device)
    model.second.weight = model.first.weight  # moving it may have parted them
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def change():
        if run.saves % 2:
            model.second.weight = nn.Parameter(model.first.weight.detach().clone())
            optimizer.add_param_group({"params": [model.second.weight]})
        else:
            optimizer.state.pop(model.second.weight, None)
            optimizer.param_groups.pop()
            model.second.weight = model.first.weight

    return trained(run, model, optimizer, before=change)


@right()
def parametrized_midway(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def change():
        if run.saves in (2, 3):
            optimizer.state.clear()
            if run.saves == 2:
                parametrizations.weight_norm(model[0])
            else:
                parametrize.remove_parametrizations(model[0], "weight")
            optimizer.param_groups[0]["params"][:] = list(model.parameters())

    return trained(run, model, optimizer, before=change)


@may_refuse()
def pruning_made_permanent(run):
    model = net(run)
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def change():
        if run.saves == 1:
            prune.l1_unstructured(model[0], "weight", amount=0.2)
        if run.saves == 2:
            old = model[0].weight_orig
            prune.remove(model[0], "weight")
            optimizer.state.pop(old, None)
            optimizer.param_groups[0]["params"][:] = list(model.parameters())

    return trained(run, model, optimizer, before=change)


@may_refuse()
def masked_by_data(run):
    """Lottery tickets: weights that were zeroed are zeroed again, through .data, before each step."""

    def mask(model, _):
        for p in model.parameters():
            p.data.mul_(p.data.abs() > 0.1)

    return misbehaves(run, mask)


def _merging(run, merge):
    base = nn.Sequential(nn.Linear(16, 32768), nn.Linear(32768, 4)).to(run.device)
    model = _Lora(base).to(run.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run.manage(model, optimizer)

    @torch.no_grad()
    def around_evaluation():
        merge(base[0].weight, 0.25)
        base(batch(run))
        if run.saves % 2:
            run.wait_until_copied()
        merge(base[0].weight, -0.25)

    return trained(run, model, optimizer, before=around_evaluation)


@may_refuse()
def adapters_merged_for_evaluation(run):
    """Into a large frozen base, and out of it again."""
    return _merging(run, lambda weight, delta: weight.add_(delta))


@may_refuse(saves=8)
def adapters_merged_by_data_from_the_fourth_save_on(run):
    """Whatever becomes of it: no save may hold the merged weight, or a part of it."""

    def merge(weight, delta):
        if run.saves >= 4:
            weight.data.add_(delta)

    return _merging(run, merge)


@may_refuse()
def projected_in_a_backward_hook(run):
    """Gradient surgery that also writes the weight."""
    model = net(run)
    optimizer = adamw(model)

    def surgery(p):
        def hook(grad):
            p.data.sub_(grad, alpha=0.01)
            return grad.clamp(-1, 1)

        return hook

    for p in model.parameters():
        p.register_hook(surgery(p))
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@may_refuse(undone=True)
def binary_connect(run):
    """Forward and backward with signs in the place of weights, by copies through .data there and back."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        kept = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.copy_(p.data.sign())
        backward(run, model)
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data.copy_(k)
        _step(optimizer)

    return cycle


@right()
def binary_connect_by_pointer(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data.sign()
        backward(run, model)
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data = k
        _step(optimizer)

    return cycle


@may_refuse()
def rows_exchanged_by_data(run):
    """Experts change places: the same numbers in another order."""

    def exchange(model, _):
        for p in model.parameters():
            p.data.copy_(p.data.flip(0))

    return misbehaves(run, exchange)


@may_refuse()
def signs_flipped_by_data(run):
    """A symmetry of the network: half of the numbers are negative before and after."""
    model = net(run)
    with torch.no_grad():
        for p in model.parameters():
            flat = p.view(-1)
            flat.copy_(flat.abs() + 0.1)
            flat[::2].neg_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    run.manage(model, optimizer)

    def flip():
        for p in model.parameters():
            p.data.neg_()

    return trained(run, model, optimizer, before=flip)


@may_refuse()
def strided_tensors_reversed_by_data(run):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(run.device)
    for one in model:
        one.weight = nn.Parameter(one.weight.detach().t().contiguous().t())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.manage(model, optimizer)

    def reverse():
        for p in model.parameters():
            p.data.copy_(p.data.flip(0))

    return trained(run, model, optimizer, before=reverse)


@may_refuse(saves=7)
def new_group_clamped_by_data(run):
    """Layers join the optimizer late, and are clamped from then on; they are few among many."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60))).to(run.device)
    late = model[30]
    optimizer = torch.optim.AdamW([p for m in model if m is not late for p in m.parameters()], lr=1e-3)
    run.manage(model, optimizer)

    def cycle():
        if run.saves == 3:
            optimizer.add_param_group({"params": list(late.parameters())})
        if run.saves >= 4:
            for p in late.parameters():
                p.data.mul_(0.5).add_(1)
        model(batch(run, 4, 8)).square().mean().backward()
        _step(optimizer)

    return cycle


@may_refuse(saves=9, refusals=2)
def replayed_from_the_fourth_save_on(run):
    """Training as a graph that was captured after a warm-up: all tensors change, and torch knows nothing of it.

    First a sample shows it of some tensors, then the checksums of all.
    """
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def replay():
        if run.saves >= 4:
            for p in model.parameters():
                alias = torch.empty(0, dtype=p.dtype, device=p.device)
                alias.set_(p.untyped_storage(), 0, p.shape)
                alias.mul_(0.5).add_(1)

    return trained(run, model, optimizer, before=replay)


@may_refuse()
def functional_adamw(run):
    """torch's functional optimizer on the given optimizer's own moments."""
    from torch.optim.adamw import adamw as functional

    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def step():
        states = [optimizer.state[p] for p in model.parameters()]
        functional(
            list(model.parameters()),
            [p.grad for p in model.parameters()],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.99,
            lr=0.01,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )

    def cycle():
        backward(run, model)
        if run.saves:
            step()
        else:
            optimizer.step()
        optimizer.zero_grad()

    return cycle


class _PlainClass:
    """No torch optimizer at all."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        torch._foreach_add_(self.parameters, [p.grad for p in self.parameters], alpha=-0.01)


@may_refuse()
def optimizer_that_is_none_of_torchs(run):
    model = net(run)
    run.manage(model, adamw(model))
    own = _PlainClass(model.parameters())

    def cycle():
        backward(run, model)
        own.step()
        model.zero_grad()

    return cycle


@may_refuse(saves=6)
def slow_weights_every_second_step(run):
    """Lookahead by hand: after every second step the weights go half of the way back."""
    model = net(run)
    optimizer = adamw(model)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"slow": slow})

    @torch.no_grad()
    def look():
        if run.saves % 2:
            for name, p in model.named_parameters():
                slow[name].lerp_(p, 0.5)
                p.copy_(slow[name])

    return trained(run, model, optimizer, before=look)


@right()
def gradients_accumulated_across_a_save(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        if run.saves % 2 == 0:
            _step(optimizer)
        backward(run, model)

    return cycle


@right()
def scaler_that_skips_steps(run):
    model = net(run)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(torch.device(run.device).type, init_scale=8.0, growth_interval=1)
    run.manage(model, optimizer, states={"scaler": scaler})

    def cycle():
        loss = model(batch(run)).square().mean()
        scaler.scale(loss * (float("inf") if run.saves % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return cycle


@right()
def activations_recomputed(run):
    """Checkpointed layers draw their random numbers twice."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        checkpoint(model, batch(run), use_reentrant=False).square().mean().backward()
        _step(optimizer)

    return cycle


@right()
def functional_call_of_states(run):
    """The weights that are trained lie in a dict beside the model, and are replaced at each step."""
    model = net(run)
    optimizer = adamw(model)
    fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"fast": fast})

    def inner():
        loss = torch.func.functional_call(model, fast, batch(run)).square().mean()
        grads = torch.autograd.grad(loss, list(fast.values()))
        for (name, p), grad in zip(list(fast.items()), grads, strict=True):
            if run.saves % 2:
                fast[name] = (p - 0.1 * grad).detach().requires_grad_()
            else:
                with torch.no_grad():
                    p.sub_(grad, alpha=0.1)

    return trained(run, model, optimizer, before=inner)


@right()
def ensemble_by_vmap(run):
    models = [net(run) for _ in range(3)]
    params, _ = torch.func.stack_module_state(models)
    holder = nn.Module()
    for name, p in params.items():
        holder.register_parameter(name.replace(".", "_"), nn.Parameter(p.detach()))
    names = {name: name.replace(".", "_") for name in params}
    optimizer = adamw(holder)
    run.manage(holder, optimizer)

    def call(params, x):
        return torch.func.functional_call(models[0], (params, {}), (x,))

    def cycle():
        stacked = {name: getattr(holder, to) for name, to in names.items()}
        torch.vmap(call, in_dims=(0, None))(stacked, batch(run)).square().mean().backward()
        _step(optimizer)

    return cycle


def _fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@may_refuse(**on_host)
def shared_parameters_changed_by_another_process(run):
    """Hogwild, as torch.multiprocessing does it."""
    model = net(run)
    model.share_memory()
    optimizer = adamw(model)
    run.manage(model, optimizer)
    views = [p.detach().numpy() for p in model.parameters()]

    def work():
        for view in views:
            view *= 0.5

    return trained(run, model, optimizer, before=lambda: _fork(work))


@right(**on_host)
def shared_states_changed_by_another_process(run):
    """A data loader's worker writes how often it has seen what."""
    model = net(run)
    optimizer = adamw(model)
    seen = torch.zeros(1000).share_memory_()
    view = seen.numpy()
    run.manage(model, optimizer, states={"seen": {"counts": seen}})

    def work():
        view[:] += 1

    return trained(run, model, optimizer, before=lambda: _fork(work))


@may_refuse(**on_host)
def sent_to_another_process(run):
    """What a queue of torch.multiprocessing does to tensors it is given: their memory becomes another."""

    def send(model, optimizer):
        if run.saves % 2:
            model.share_memory()
        for state in optimizer.state.values():
            state["exp_avg"].share_memory_()

    return misbehaves(run, send)


def _memmapped(run, model):
    maps = []
    for module in (model[0], model[2]):
        for name, p in list(module.named_parameters()):
            path = f"{run.memory_dir}.{len(maps)}"
            run.cleanup.callback(os.unlink, path)
            array = np.memmap(path, dtype=np.float32, mode="w+", shape=tuple(p.shape))
            array[...] = p.detach().numpy()
            maps.append(array)
            setattr(module, name, nn.Parameter(torch.from_numpy(array)))
    return maps


@may_refuse(**on_host)
def parameters_in_a_file_that_is_written_to(run):
    model = net(run)
    maps = _memmapped(run, model)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def write():
        for one in maps:
            np.multiply(one, 0.5, out=one)

    return trained(run, model, optimizer, before=write)


@may_refuse()
def moments_resized(run):
    """In place, to another number of elements and back: the memory is another, what it holds is chance."""

    def resize(_, optimizer):
        for state in optimizer.state.values():
            shape = state["exp_avg"].shape
            state["exp_avg"].resize_(100_000).fill_(7.0).resize_(shape)

    return misbehaves(run, resize)


@may_refuse(undone=True)
def moments_freed_and_refilled(run):
    """Offloading by hand: the storage is emptied, and filled again before the step."""

    def offload(_, optimizer):
        kept = []
        for state in optimizer.state.values():
            storage = state["exp_avg"].untyped_storage()
            kept.append((state["exp_avg"], state["exp_avg"].clone(), storage.nbytes()))
            storage.resize_(0)
        if run.saves % 2:
            run.wait_until_copied()
        for tensor, saved, size in kept:
            tensor.untyped_storage().resize_(size)
            tensor.data.copy_(saved)

    return misbehaves(run, offload)


@right(devices=("sim",))
def parameters_on_the_host_and_compute_on_the_device(run):
    """As with CPU offload: master weights and moments stay on the host, a step copies them over and gradients back."""
    model = net(run).to("cpu")
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        there = {name: p.detach().to(run.device).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, there, batch(run)).square().mean().backward()
        for name, p in model.named_parameters():
            p.grad = there[name].grad.to("cpu")
        _step(optimizer)

    return cycle


@right()
def moments_offloaded(run):
    """To the host after each step, and back before the next."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def move(device):
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(device, copy=True)

    def cycle():
        backward(run, model)
        move(run.device)
        _step(optimizer)
        move("cpu")

    return cycle


@right()
def model_converted_for_evaluation(run):
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def there_and_back():
        model.to(torch.float64)
        model.to(torch.float32)

    return trained(run, model, optimizer, before=there_and_back)


@right()
def buffer_that_is_a_view_of_a_parameter(run):
    model = net(run)
    model.register_buffer("head", model[0].weight.detach()[:4])
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@may_refuse()
def written_through_a_buffer(run):
    """A buffer shares its memory with a parameter, and has a version counter of its own."""
    model = net(run)
    model.register_buffer("alias", model[0].weight.data)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer, before=lambda: model.alias.mul_(0.5))


@right()
def managers_of_two_models(run):
    """Each has its own model and thread; one is closed midway, the other's gate stays."""
    model, other = net(run), net(run)
    optimizer, others = adamw(model), adamw(other)
    run.manage(model, optimizer)
    config = CheckpointConfig(job="other", memory_dir=run.memory_dir, interval=1, agent="off")
    second = run.cleanup.enter_context(contextlib.closing(CheckpointManager(config, model=other, optimizer=others)))

    def besides():
        if run.saves == 3:
            second.close()
        if run.saves < 3:
            second.save(run.saves, force=True)
        backward(run, other)
        _step(others)

    def cycle():
        thread = threading.Thread(target=besides)
        thread.start()
        backward(run, model)
        _step(optimizer)
        thread.join()

    return cycle


@right()
def saved_in_another_thread(run):
    model = net(run)
    optimizer = adamw(model)
    manager = run.manage(model, optimizer)
    save = manager.save
    pool = run.cleanup.enter_context(ThreadPoolExecutor(1))
    manager.save = lambda step: pool.submit(save, step).result()
    return trained(run, model, optimizer)


@right()
def average_updated_by_a_pool(run):
    """Nobody waits for it before the step."""
    model = net(run)
    optimizer = adamw(model)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.manage(model, optimizer, states={"ema": average})
    pool = run.cleanup.enter_context(ThreadPoolExecutor(1))

    @torch.no_grad()
    def update(latest):
        for name, p in latest.items():
            average[name].lerp_(p, 0.5)

    def cycle():
        latest = {name: p.detach().clone() for name, p in model.named_parameters()}
        done = pool.submit(update, latest)
        backward(run, model)
        _step(optimizer)
        done.result()

    return cycle


@may_refuse()
def teacher_updated_by_a_pool(run):
    model = nn.ModuleDict({"student": nn.Linear(16, 4), "teacher": nn.Linear(16, 4)}).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    pool = run.cleanup.enter_context(ThreadPoolExecutor(1))

    @torch.no_grad()
    def update(latest):
        for t, s in zip(model["teacher"].parameters(), latest, strict=True):
            t.lerp_(s, 0.5)

    def cycle():
        latest = [p.detach().clone() for p in model["student"].parameters()]
        done = pool.submit(update, latest)
        backward(run, model["student"])
        _step(optimizer)
        done.result()

    return cycle


@right()
def numpy_values_in_states(run):
    model = net(run)
    optimizer = adamw(model)
    table = {"counts": np.zeros(64), "names": ["a"], "nested": {"deep": np.arange(5)}}
    run.manage(model, optimizer, states={"table": table})

    def change():
        table["counts"] += 1
        table["names"].append("b")
        table["nested"]["deep"][:] = run.saves

    return trained(run, model, optimizer, before=change)


@right()
def model_assigned_after_save(run):
    """load_state_dict(assign=True): the optimizer is made for the new parameters in place."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def assign():
        state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        optimizer.state.clear()
        optimizer.param_groups[0]["params"][:] = list(model.parameters())

    return trained(run, model, optimizer, before=assign)


@may_refuse()
def parameters_set_to_other_memory(run):
    @torch.no_grad()
    def change(model, _):
        for p in model.parameters():
            p.set_(torch.randn_like(p))

    return misbehaves(run, change)


@may_refuse()
def weights_written_in_place_by_index(run):
    @torch.no_grad()
    def change(model, _):
        model[0].weight[3:5, ::2] = 0
        model[2].weight.view(-1)[0] += 1
        model[2].bias.index_fill_(0, torch.tensor([0], device=run.device), 1.0)

    return misbehaves(run, change)


@right()
def bfloat16_moments_with_rounding(run):
    """Parameters and moments of two bytes, written by stochastic rounding within a step of one's own."""

    class Rounding(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32).to(p.device)
                wide = (p.float() - 0.01 * state["momentum"].float()).view(torch.int32)
                p.copy_((wide + noise).view(torch.float32).bfloat16())

    model = net(run, dtype=torch.bfloat16)
    optimizer = Rounding(model.parameters())
    run.manage(model, optimizer)

    def cycle():
        model(batch(run, dtype=torch.bfloat16)).square().mean().backward()
        _step(optimizer)

    return cycle


@right()
def step_skipped_for_many_saves(run):
    """Gradients are only gathered; parameters are saved again and again as they are."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        if run.saves in (0, 3):
            _step(optimizer)

    return cycle


@right()
def optimizer_pickled_and_put_back(run):
    """The loop goes on with a copy of the optimizer that has the same parameters; both are torch's."""
    model = net(run)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def cycle():
        fresh = adamw(model)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer.__setstate__(fresh.__getstate__())
        backward(run, model)
        _step(optimizer)

    return cycle


@right()
def other_optimizer_from_the_second_save_on(run):
    """The manager knows both from the start; the second begins when the first one ends."""
    model = net(run)
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), adamw(model[2])
    run.manage(model, [first, second])

    def cycle():
        backward(run, model)
        _step(first if run.saves < 2 else second)

    return cycle


@right()
def step_captured_before_the_manager(run):
    """The loop holds a bound method that it took when nobody saved yet."""
    model = net(run)
    optimizer = adamw(model)
    step = optimizer.step
    run.manage(model, optimizer)

    def cycle():
        backward(run, model)
        step()
        optimizer.zero_grad()

    return cycle


class _InBackward(torch.optim.Optimizer):
    """As torchtitan's container: an optimizer per parameter, which steps in backward. Its own step() does nothing."""

    def __init__(self, parts):
        each = {p: torch.optim.AdamW([p], lr=1e-2) for part in parts for p in part.parameters()}

        def update(p):
            each[p].step()
            each[p].zero_grad()

        for p in each:
            p.register_post_accumulate_grad_hook(update)
        self.optimizers = list(each.values())
        super().__init__(list(each), {"lr": 1e-2})

    def step(self, closure=None):
        pass

    def zero_grad(self, set_to_none=True):
        pass


@right()
def container_of_optimizers_in_backward(run):
    """It is given as it is, for a model of two parts."""
    model = nn.ModuleDict({"first": nn.Linear(16, 32), "second": nn.Linear(32, 4)}).to(run.device)
    parts = [nn.ModuleDict({name: one}) for name, one in model.items()]
    container = _InBackward(parts)
    run.manage(parts, container, members=container.optimizers)

    def cycle():
        model["second"](torch.tanh(model["first"](batch(run)))).square().mean().backward()
        _step(container)

    return cycle


class _Sam(torch.optim.Optimizer):
    """SAM as it is published: it climbs in first_step(); second_step() goes back, and steps the optimizer inside."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


@may_refuse()
def sharpness_aware_optimizer(run):
    """The manager gets the optimizer inside: the outer one has a state of its own, which the manager refuses."""
    model = net(run)
    optimizer = _Sam(model.parameters(), torch.optim.AdamW, lr=1e-2)
    run.manage(model, optimizer.base_optimizer)

    def cycle():
        backward(run, model)
        optimizer.first_step()
        backward(run, model)
        optimizer.second_step()

    return cycle


class _ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: train() and eval() move the parameters in place, from an average to where it trains."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, train_mode, weight):
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["train_mode"] = train_mode

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@may_refuse()
def schedule_free_optimizer_saved_in_eval_mode(run):
    """As its authors ask for. train() comes right after save()."""
    model = net(run)
    optimizer = _ScheduleFree(model.parameters())
    run.manage(model, optimizer)

    def cycle():
        optimizer.train()
        for _ in range(2):  # after the first step of all, the average is where it trains
            backward(run, model)
            _step(optimizer)
        optimizer.eval()

    return cycle


@right()
def schedule_free_optimizer_saved_in_train_mode(run):
    """Parameters are moved for evaluation only after step() has waited for the copy."""
    model = net(run)
    optimizer = _ScheduleFree(model.parameters())
    run.manage(model, optimizer)

    def cycle():
        optimizer.train()
        backward(run, model)
        _step(optimizer)
        optimizer.eval()
        model(batch(run))
        optimizer.train()

    return cycle


# Changes that begin when save() no longer checksums every tensor, in one of more tensors than it takes samples of.


def _deep(run, layer=nn.Linear):
    return nn.Sequential(*[layer(16, 16) for _ in range(24)]).to(run.device)


def _from_the_fourth_save_on(run, model, change):
    optimizer = adamw(model)
    run.manage(model, optimizer)

    @torch.no_grad()
    def late():
        if run.saves >= 4:
            change(model[5].weight, optimizer)

    return trained(run, model, optimizer, before=late)


def _sharded(run):
    model = _deep(run)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@may_refuse(saves=7, group=True, **on_host)
def sharded_parameter_changed_from_the_fourth_save_on(run):
    """torch counts it for the DTensor, but neither for its local tensor nor for that of the state dict's alias."""
    return _from_the_fourth_save_on(run, _sharded(run), lambda p, _: p.mul_(0.5))


@may_refuse(saves=7, group=True, **on_host)
def local_tensor_changed_from_the_fourth_save_on(run):
    """torch counts it for the parameter's local tensor, but neither for the DTensor nor for the alias."""
    return _from_the_fourth_save_on(run, _sharded(run), lambda p, _: p.to_local().mul_(0.5))


@may_refuse(saves=7, group=True, **on_host)
def sharded_moments_zeroed_from_the_fourth_save_on(run):
    return _from_the_fourth_save_on(run, _sharded(run), lambda p, optimizer: optimizer.state[p]["exp_avg"].zero_())


class _ToldByData(nn.Linear):
    """Its state dict holds `.data`, which has a version counter of its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.data
        destination[prefix + "bias"] = self.bias.data


@may_refuse(saves=7)
def state_dict_of_data_changed_from_the_fourth_save_on(run):
    return _from_the_fourth_save_on(run, _deep(run, _ToldByData), lambda p, _: p.mul_(0.5))


@right(saves=7, **on_host)
def shared_parameter_changed_by_another_process_from_the_fourth_save_on(run):
    """No version counter of this process shows it, so what is in shared memory is never deferred."""
    model = _deep(run)
    model.share_memory()
    view = model[5].weight.detach().numpy()

    def halve():
        view[...] *= 0.5

    return _from_the_fourth_save_on(run, model, lambda *_: _fork(halve))


class _WrappedMomentum(torch.optim.Optimizer):
    """Keeps its moments in tensors that are made of tensors, as quantized moments are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
                if p.grad is not None:
                    state["moment"].mul_(0.9).add_(TwoTensor(p.grad, p.grad.square()))
                    p.sub_(state["moment"].a, alpha=group["lr"])


@may_refuse(saves=7, **on_host)
def wrapped_moments_changed_from_the_fourth_save_on(run):
    """torch counts it for the tensor around them, but for none of the tensors that it is made of."""
    model = _deep(run)
    optimizer = _WrappedMomentum(model.parameters())
    run.manage(model, optimizer)

    @torch.no_grad()
    def late():
        if run.saves >= 4:
            optimizer.state[model[5].weight]["moment"].mul_(0.5)

    return trained(run, model, optimizer, before=late)


# Modules that take other places or forms, and saves from within something else.


@right(saves=5)
def layers_reordered(run):
    """The same parameters, each with another one's name."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def reorder():
        if run.saves == 2:
            model[0], model[2] = model[2], model[0]

    return trained(run, model, optimizer, before=reorder)


@right(**on_host)  # torch infers no shape on the simulated device
def lazy_modules_of_which_the_manager_sees_no_shape(run):
    model = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.LazyLinear(4)).to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


class _Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(16))])

    def forward(self, x):
        return sum(x * factor for factor in self.factors)


@right(saves=5)
def list_of_parameters_that_grows(run):
    model = _Growing().to(run.device)
    optimizer = adamw(model)
    run.manage(model, optimizer)

    def grow():
        model.factors.append(nn.Parameter(torch.randn(16).to(run.device)))
        optimizer.add_param_group({"params": [model.factors[-1]]})

    return trained(run, model, optimizer, before=grow)


class _Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.quantize = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.observer = PerChannelMinMaxObserver(ch_axis=0)  # its buffers are empty before the first forward

    def forward(self, x):
        self.observer(self.linear.weight.detach())
        return self.quantize(self.linear(x))


@right(**on_host)
def observers_and_spectral_norm(run):
    model = _Observed()
    optimizer = adamw(model)
    run.manage(model, optimizer)
    return trained(run, model, optimizer)


@right(saves=6)
def saved_from_hooks_and_closures(run):
    """Before a step, behind one, in a backward pass and in a closure, by turns."""
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.manage(model, optimizer)

    def save(turn):
        if run.saves and run.saves % 4 == turn:
            run.save_besides()

    optimizer.register_step_pre_hook(lambda *_: save(0))
    optimizer.register_step_post_hook(lambda *_: save(1))
    model[0].bias.register_post_accumulate_grad_hook(lambda _: save(2))

    def closure():
        optimizer.zero_grad()
        loss = backward(run, model)
        save(3)
        return loss

    return lambda: optimizer.step(closure)


@right()
def saved_in_inference_mode(run):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(run.device)
    optimizer = adamw(model)
    manager = run.manage(model, optimizer)
    save = manager.save

    def within(step):
        with torch.inference_mode(), torch.device("meta"):
            return save(step)

    manager.save = within
    return trained(run, model, optimizer)
