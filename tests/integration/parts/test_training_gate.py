"""The gate: no optimizer of the process takes a step while a copy is under way, whoever calls it and however."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch import nn

from flashckpt import CheckpointConfig, CheckpointManager, Level, failpoints

SLEEP = 0.3


@pytest.fixture
def slow_copy(monkeypatch):
    """Copies take SLEEP seconds; `slow_copy(0)` makes them quick again."""

    def arm(seconds=SLEEP):
        monkeypatch.setattr(failpoints, "_armed", failpoints.parse(f"before_copy=sleep({seconds})"))

    arm()
    return arm


class Setup:
    def __init__(self, memory_dir, make_optimizer=torch.optim.AdamW, **arguments):
        self.model = nn.Linear(16, 16)
        self.optimizer = make_optimizer(self.model.parameters())
        self.step()
        config = CheckpointConfig(job="job", memory_dir=memory_dir, enable_first_step_checkpoint=False)
        self.manager = CheckpointManager(config, model=self.model, **{"optimizer": self.optimizer, **arguments})

    def loss(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return loss

    def step(self):
        self.loss()
        self.optimizer.step()


@pytest.fixture
def setup(memory_dir):
    made = []

    def make(*args, **kwargs):
        made.append(Setup(memory_dir, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.manager.close()
    gc.collect()


def test_every_thread_waits_and_not_only_the_first(memory_dir, slow_copy):
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    config = CheckpointConfig(job="job", memory_dir=memory_dir, enable_first_step_checkpoint=False)
    with CheckpointManager(config, model=model, optimizer=optimizers) as manager:
        for part in model:
            part(torch.ones(1, 8)).sum().backward()
        handle = manager.save(1)
        levels = []

        def step(optimizer):
            optimizer.step()
            levels.append(handle.level)

        threads = [threading.Thread(target=step, args=(optimizer,)) for optimizer in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(levels) == 4
        assert all(level >= Level.STAGED for level in levels)
        assert handle.wait("sealed", timeout=60) == "ok"


def test_an_interrupt_leaves_the_gate_closed(setup, slow_copy):
    one = setup()
    handle = one.manager.save(1)
    one.loss()

    def interrupt(timeout):
        raise KeyboardInterrupt

    waited, handle.wait_until_copied = handle.wait_until_copied, interrupt
    with pytest.raises(KeyboardInterrupt):
        one.optimizer.step()
    handle.wait_until_copied = waited
    one.optimizer.step()
    assert handle.level >= Level.STAGED
    assert handle.wait("sealed", timeout=60) == "ok"


def test_an_optimizer_made_after_the_manager_waits_too(setup, slow_copy):
    one = setup()
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    handle = one.manager.save(1)
    one.step()
    assert handle.level >= Level.STAGED
    assert handle.wait("sealed", timeout=60) == "ok"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_runs_beside_the_copy_and_the_change_waits(memory_dir, slow_copy, make, by_name):
    model = nn.Linear(16, 16)
    optimizer = make(model.parameters(), lr=0.1)
    seen = []

    def closure():
        seen.append(handle.level)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return loss

    config = CheckpointConfig(job="job", memory_dir=memory_dir, enable_first_step_checkpoint=False)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        handle = manager.save(1)
        before = model.weight.detach().clone()
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        assert seen[0] is Level.NONE  # the forward pass did not wait
        assert not torch.equal(before, model.weight)
        assert handle.level >= Level.STAGED
        assert handle.wait("sealed", timeout=60) == "ok"


class ChangesFirst(torch.optim.SGD):
    """As sharpness-aware optimizers do: the parameters move before the closure is called."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)
        with torch.enable_grad():
            closure()
        return super().step()


def test_a_step_that_changes_before_its_closure_waits_before(setup, slow_copy):
    one = setup(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = ChangesFirst(one.model.parameters(), lr=0.1)
    handle = one.manager.save(1)
    optimizer.step(one.loss)
    assert handle.level >= Level.STAGED
    assert handle.wait("sealed", timeout=60) == "ok"


def test_what_changes_outside_of_a_step_is_found_though_the_copy_was_quicker(setup, slow_copy, caplog):
    slow_copy(0)
    one = setup()
    handle = one.manager.save(1)
    assert handle.wait_until_copied(60)
    one.model.weight.data.clamp_(-0.01, 0.01)
    one.step()  # the gate
    assert handle.wait("sealed", timeout=60) == "ok"  # nothing was torn
    assert "model.weight: changed between save() and optimizer.step()" in caplog.text
    slow_copy()
    wanted = one.model.weight.detach().clone()
    handle = one.manager.save(2)
    one.model.weight.data.zero_()  # copied before save() returned
    assert handle.wait("sealed", timeout=60) == "ok"
    one.manager.load(2)
    assert torch.equal(one.model.weight, wanted)


def test_an_open_gate_costs_next_to_nothing(setup):
    one = setup()
    began = time.perf_counter()
    for _ in range(1000):
        one.manager.maybe_wait_for_staging()
    assert time.perf_counter() - began < 1.0


class Slow(torch.optim.Optimizer):
    """Fills all its parameters with the number of the step, slowly; nothing shows before the step has ended."""

    def __init__(self, parameters, began):
        super().__init__(parameters, {"lr": 0.1})
        self.began, self.steps = began, 0

    def step(self, closure=None):
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.data.fill_(self.steps)
            self.began.set()
            time.sleep(SLEEP / 2)


def test_a_step_that_another_thread_is_in_ends_before_the_state_is_taken(memory_dir):
    model, began = nn.Linear(4, 4), threading.Event()
    optimizer = Slow(model.parameters(), began)
    optimizer.step()
    config = CheckpointConfig(job="job", memory_dir=memory_dir, enable_first_step_checkpoint=False)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        for number in range(2, 5):
            began.clear()
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            assert began.wait(60)
            handle = manager.save(number)
            optimizer.step()  # held by the gate, not by the wait for other threads
            thread.join()
            assert handle.wait("sealed", 60) == "ok", handle
            state = {"model": {name: torch.zeros_like(p) for name, p in model.named_parameters()}}
            manager.checkpointer.load(state, number, strict=False, read_only=True)
            assert len({value.item() for p in state["model"].values() for value in p.view(-1)}) == 1, state


def test_a_step_that_does_not_end_holds_a_save_for_a_bounded_time_and_once(memory_dir, monkeypatch, caplog):
    from flashckpt.training import gate

    monkeypatch.setattr(gate, "_PATIENCE", 0.2)
    model, others, release = nn.Linear(4, 4), nn.Linear(4, 4), threading.Event()
    optimizer, stuck = torch.optim.SGD(model.parameters()), torch.optim.SGD(others.parameters())
    stuck.register_step_pre_hook(lambda *_: release.wait(60) and None)
    config = CheckpointConfig(job="job", memory_dir=memory_dir, enable_first_step_checkpoint=False)
    thread = threading.Thread(target=stuck.step)
    try:
        with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
            thread.start()
            held = []
            for number in (1, 2):
                time.sleep(0.05)
                began = time.perf_counter()
                assert manager.save(number).wait("sealed", 60) == "ok"
                held.append(time.perf_counter() - began)
            assert held[0] >= 0.2
            assert sum("save() does not wait for it" in record.message for record in caplog.records) == 1
    finally:
        release.set()
        thread.join()


def test_the_wait_returns_for_how_long_it_held_the_caller_and_reports_it_once():
    from flashckpt.save.handle import SaveHandle
    from flashckpt.training.gate import OptimizerGate

    reported = []
    gate = OptimizerGate(0.01, lambda handle, held: reported.append((handle, held)))
    assert gate.wait() == 0.0
    handle = SaveHandle(1, None, Level.SEALED)
    gate.close_behind(handle)
    assert not gate.is_open
    held = gate.wait()  # nobody copies: given up after the timeout
    assert held >= 0.01
    assert held == handle.blocked_seconds
    assert reported == [(handle, held)]
    assert gate.is_open
    assert gate.wait() == 0.0
    assert len(reported) == 1
