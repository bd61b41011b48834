"""Optimizers as people have them: wrapped, in containers, with hooks; and what a load leaves as it was."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager, ConfigError

SEED = 7


def model_of(seed=SEED):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def backward(model, step):
    model.zero_grad()
    model(batch(step)).pow(2).mean().backward()


def bits(model, optimizer):
    """Of all that a step changes, as comparable values."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{number}.{key}"] = copy.deepcopy(value)
    return found


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


@pytest.fixture
def config(memory_dir):
    return CheckpointConfig(job="job", memory_dir=memory_dir, interval=1, enable_first_step_checkpoint=False)


# --- load() takes no step and changes nothing but what it loads ---------------------------------------------

MAKERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "tensor-rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.01, max_iter=3),
}


class Blocks(torch.optim.Optimizer):
    """As Shampoo: nested state, with numbers as keys, and strings."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["blocks"] = {n: {"mean": torch.zeros(p.shape[0])} for n in range(2)}
                    state["kind"] = "row"
                if state["kind"] != "row":
                    raise ValueError(state["kind"])
                for n in range(2):
                    state["blocks"][n]["mean"].lerp_(p.grad.reshape(p.shape[0], -1).mean(1), 0.1 * (n + 1))
                p.sub_(state["blocks"][1]["mean"].reshape(-1, *[1] * (p.dim() - 1)), alpha=group["lr"])


class Precise(torch.optim.Optimizer):
    """Keeps its moments in another dtype than its parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                state["mean"].lerp_(p.grad.double(), 0.3)
                p.sub_(state["mean"].to(p.dtype), alpha=group["lr"])


MAKERS |= {"blocks": Blocks, "precise": Precise}


def step(model, optimizer, number):
    backward(model, number)
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure():
            optimizer.zero_grad()
            loss = model(batch(number)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        optimizer.step()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_goes_on_bit_for_bit(kind, fresh, config):
    model = model_of()
    optimizer = MAKERS[kind](model.parameters())
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        for number in (1, 2, 3):
            step(model, optimizer, number)
        assert manager.save(3).wait("sealed", timeout=60) == "ok"
        wanted = bits(model, optimizer)
        step(model, optimizer, 4)
        later = bits(model, optimizer)
    other = model_of(99)
    again = MAKERS[kind](other.parameters())
    if not fresh:
        step(other, again, 77)
    calls = []
    again.register_step_pre_hook(lambda *_: calls.append(1))
    again.register_step_post_hook(lambda *_: calls.append(1))
    with CheckpointManager(config, model=other, optimizer=again) as manager:
        assert manager.load().step == 3
        assert not calls
        assert same(bits(other, again), wanted)
        step(other, again, 4)
        assert same(bits(other, again), later)


class Mean:
    """A moving average of the parameters, kept in a hook as many people do."""

    def __init__(self, model, optimizer):
        self.model, self.calls = model, 0
        self.mean = [p.detach().clone() for p in model.parameters()]
        optimizer.register_step_post_hook(self)

    def __call__(self, *_):
        self.calls += 1
        for mean, p in zip(self.mean, self.model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.5)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "blocks"])
@pytest.mark.parametrize("path", ["load", "nothing", "exclude", "mismatch", "save", "prewarm", "peek"])
def test_nobody_sees_a_step_and_what_is_not_loaded_stays(path, kind, with_gradients, config):
    if path not in ("nothing", "save"):
        model = model_of()
        optimizer = MAKERS[kind](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with CheckpointManager(config, model=model, optimizer=optimizer, lr_scheduler=scheduler) as manager:
            step(model, optimizer, 1)
            scheduler.step()
            manager.save(1, compat={"x": 1})
    model = model_of(3)
    optimizer = MAKERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mean, stepped = Mean(model, optimizer), []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    if with_gradients:
        backward(model, 5)
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    versions = [g._version for g in gradients if g is not None]
    state, counted, before = torch.get_rng_state(), optimizer.step, bits(model, optimizer)
    weights = [p._version for p in model.parameters()]
    with (
        warnings.catch_warnings(),
        CheckpointManager(config, model=model, optimizer=optimizer, lr_scheduler=scheduler, rng=False) as manager,
    ):
        warnings.simplefilter("error")
        if path == "load":
            assert manager.load().step == 1
            assert scheduler.last_epoch == 1
        elif path == "nothing":
            assert manager.load() is None
        elif path == "exclude":
            assert manager.load(exclude_from_loading=["optimizer", "lr_scheduler"]).step == 1
        elif path == "mismatch":
            with pytest.raises(flashckpt.MismatchError):
                manager.load(expect={"x": 2})
        elif path == "save":
            manager.save(1)
        elif path == "prewarm":
            manager.prewarm()
        else:
            manager.peek_saved_step()
        if path not in ("load", "exclude"):
            assert same(bits(model, optimizer), before)
            assert [p._version for p in model.parameters()] == weights
            assert optimizer.param_groups[0]["lr"] == MAKERS[kind](model.parameters()).param_groups[0]["lr"]
        if path != "load":
            assert not optimizer.state
        assert not stepped
        assert mean.calls == 0
        assert optimizer.step == counted
        assert not getattr(optimizer, "_opt_called", False)
        assert torch.equal(torch.get_rng_state(), state)
        assert [p.grad for p in model.parameters()] == gradients or all(
            a is b for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True)
        )
        assert [g._version for g in gradients if g is not None] == versions
        assert all(a is None or torch.equal(a, b) for a, b in zip(values, gradients, strict=True))
        if path != "load":
            step(model, optimizer, 2)
            scheduler.step()  # no warning: it saw one step


def test_an_average_in_a_hook_resumes_bit_for_bit(config):
    def run(first, last, manager=None, mean=None, model=None, optimizer=None):
        for number in range(first, last + 1):
            step(model, optimizer, number)
            if manager is not None:
                manager.save(number)

    def build():
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, Mean(model, optimizer)

    model, optimizer, mean = build()
    states = {"mean": {"values": mean.mean}}
    with CheckpointManager(config, model=model, optimizer=optimizer, states=states) as manager:
        run(1, 3, manager, mean, model, optimizer)
    run(4, 5, None, mean, model, optimizer)
    other, fresh, resumed = build()
    with CheckpointManager(config, model=other, optimizer=fresh, states={"mean": {"values": resumed.mean}}) as manager:
        assert manager.load().step == 3
    run(4, 5, None, resumed, other, fresh)
    assert same(resumed.mean, mean.mean)


def test_another_kind_of_optimizer_is_refused_before_anything_is_written(config):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 1)
        manager.save(1)
    other = model_of(5)
    before = bits(other, fresh := torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9))
    refused = pytest.raises(flashckpt.StructureError, match=r"expected the options of SGD.*'momentum'.*found.*'betas'")
    with CheckpointManager(config, model=other, optimizer=fresh) as manager, refused:
        manager.load()
    assert same(bits(other, fresh), before)
    assert fresh.param_groups[0]["lr"] == 0.5


def test_options_of_the_checkpoint_decide_what_moments_there_are(config):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 1)
        manager.save(1)
    other = model_of(5)
    fresh = torch.optim.AdamW(other.parameters(), amsgrad=False)
    step(other, fresh, 9)
    with CheckpointManager(config, model=other, optimizer=fresh) as manager:
        manager.load()
    assert same(bits(other, fresh), bits(model, optimizer))
    assert fresh.param_groups[0]["amsgrad"]


# --- wrappers -----------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def world_of_one(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(accelerator, seed):
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def test_what_accelerate_has_prepared_is_saved_and_restored(accelerator, config, caplog):
    model, optimizer, scheduler, loader = prepared(accelerator, SEED)
    arguments = {"optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    with CheckpointManager(config, model=model, **arguments) as manager:
        assert "DataLoaderShard has no state_dict()" in caplog.text
        assert "use_stateful_dataloader" in caplog.text
        for number in (1, 2):
            step(model, optimizer, number)
            scheduler.step()
            assert manager.save(number).wait("sealed", timeout=60) == "ok"
        wanted, rate = bits(model, optimizer), scheduler.get_last_lr()
    model, optimizer, scheduler, loader = prepared(accelerator, 9)
    with CheckpointManager(config, model=model, optimizer=optimizer, lr_scheduler=scheduler) as manager:
        assert manager.load().step == 2
    assert same(bits(model, optimizer), wanted)
    assert scheduler.get_last_lr() == rate
    assert optimizer.param_groups[0]["lr"] == rate[0]


def test_a_load_after_layers_were_reordered_gives_each_parameter_its_own_state(config):
    """The optimizer's parameters are the same, with each other's names."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 1)
        manager.save(1).wait("sealed", timeout=60)
        wanted = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        model[0], model[1] = model[1], model[0]
        manager.load()
        found = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        assert same(found, wanted)
        assert not torch.equal(wanted["0.weight"], wanted["1.weight"])


def test_parameters_that_fsdp2_left_gathered_keep_their_names(world_of_one, config):
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 1)
        manager.save(1).wait("sealed", timeout=60)
        for call in (lambda: manager.save(2).wait("sealed", timeout=60) == "ok", lambda: manager.load().step == 2):
            with torch.no_grad():
                model(batch(1))
            assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
            assert call()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_post_local_sgd_gets_its_averagers_step_back(world_of_one, config):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def build(seed):
        model = model_of(seed)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=100))

    model, optimizer = build(SEED)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        for number in (1, 2, 3):
            step(model, optimizer, number)
            manager.save(number)
        wanted = bits(model, optimizer)
    other, again = build(5)
    with CheckpointManager(config, model=other, optimizer=again) as manager:
        assert manager.load().step == 3
    assert again.averager.step == 3
    assert same(bits(other, again), wanted)
    # Without the wrapper, what it kept itself has no owner; with it, but from a checkpoint without, it keeps its own.
    plain = model_of(6)
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(config, model=plain, optimizer=inner) as manager:
        assert manager.load().step == 3
        manager.save(4, force=True)
    assert same(bits(plain, inner), wanted)
    again.averager.step = 11
    with CheckpointManager(config, model=other, optimizer=again) as manager:
        assert manager.load().step == 4
    assert again.averager.step == 11


class Container(torch.optim.Optimizer):
    """As TorchTitan's: a torch optimizer over all parameters that only hands on what is asked of it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for one in self.optimizers for g in one.param_groups for p in g["params"]], {})

    def step(self, closure=None):
        for one in self.optimizers:
            one.step()

    def state_dict(self):
        raise AssertionError("its optimizers are asked")


class Plain:
    def __init__(self, optimizers):
        self.optimizers = optimizers


def per_part(model):
    return [torch.optim.AdamW(model[n].parameters(), lr=0.1 * (n + 1)) for n in (0, 2)]


def per_parameter(model):
    return {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}


CONTAINERS = {
    "list": (per_part, lambda held: held),
    "tuple": (per_part, tuple),
    "dict": (per_parameter, lambda held: held),
    "by name": (per_part, lambda held: dict(zip("ab", held, strict=True))),
    "container": (per_part, Container),
    "no optimizer": (per_part, Plain),
    "nested": (per_part, lambda held: [Container(held[:1]), held[1]]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_optimizers(kind, config):
    make, wrap = CONTAINERS[kind]

    def build(seed):
        model = model_of(seed)
        held = make(model)
        return model, list(held.values()) if isinstance(held, dict) else held, wrap(held)

    model, held, given = build(SEED)
    with CheckpointManager(config, model=model, optimizer=given) as manager:
        for number in (1, 2):
            backward(model, number)
            for one in held:
                one.step()
            manager.save(number)
    other, again, given = build(4)
    with CheckpointManager(config, model=other, optimizer=given) as manager:
        assert manager.load().step == 2
    for a, b in zip(held, again, strict=True):
        assert same(bits(model, a), bits(other, b))
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]


class WithStateOfItsOwn(torch.optim.Optimizer):
    """As Lookahead or SAM: shares its inner optimizer's groups and keeps a state beside its."""

    def __init__(self, inner):
        self.base_optimizer = inner
        super().__init__(inner.param_groups, {})


class OtherParameters:
    """As wrappers that keep a copy of the parameters in float32."""

    def __init__(self, inner):
        self.optimizer = inner
        self.param_groups = [{"params": [nn.Parameter(torch.ones(1))]}]


class TwoInside:
    def __init__(self, one):
        self.first, self.second = one, torch.optim.SGD([nn.Parameter(torch.ones(1))])


class SomeOf(torch.optim.Optimizer):
    def __init__(self, inner):
        self.optimizers = [inner]
        super().__init__([nn.Parameter(torch.ones(1))], {})


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (WithStateOfItsOwn, r"(?s)a WithStateOfItsOwn around a SGD.*keeps a state of its own.*base_optimizer"),
        (OtherParameters, r"(?s)a OtherParameters around a SGD.*other parameters.*\.optimizer"),
        (TwoInside, r"a TwoInside.*2 optimizers.*'first', 'second'"),
        (SomeOf, r"(?s)a SomeOf.*'optimizers'.*other parameters.*as a list"),
        (lambda inner: object(), r"expected a torch optimizer.*found a object"),
        (lambda inner: [], r"at least one optimizer, found none"),
        (lambda inner: [inner, 5], r"expected a torch optimizer.*found a int"),
    ],
)
def test_what_can_not_be_understood_is_named(wrap, message, config):
    model = model_of()
    given = wrap(torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=message) as caught:
        CheckpointManager(config, model=model, optimizer=given)
    assert caught.value.hint


def test_a_parameter_that_joined_the_optimizer_later_is_named(config):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 1)
        manager.save(1)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(ConfigError, match=r"1 of 5 parameters of SGD are not the model's"):
            manager.save(2)
        del optimizer.param_groups[1]


class TellsMore(torch.optim.SGD):
    """Whose state_dict() has an entry of its own, and whose state has one that belongs to no parameter."""

    rounds = 0

    def step(self, closure=None):
        super().step(closure)
        self.rounds += 1
        self.state["seen"] = self.rounds * 10

    def state_dict(self):
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state):
        state = dict(state)
        self.rounds = state.pop("rounds")
        super().load_state_dict(state)


def test_what_a_state_dict_has_beside_states_and_groups_comes_back(config, caplog):
    model = model_of()
    optimizer = TellsMore(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        for number in (1, 2):
            step(model, optimizer, number)
        manager.save(2)
    other = model_of(8)
    fresh = TellsMore(other.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(config, model=other, optimizer=fresh) as manager, caplog.at_level(logging.WARNING):
        assert manager.load().step == 2
    assert fresh.rounds == 2
    assert fresh.state["seen"] == 20
    assert same(bits(other, fresh), bits(model, optimizer))
