"""CheckpointManager as its users meet it, in one process and on a real tmpfs."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager, Level, PerRank, failpoints
from flashckpt.checkpointer import internals_of
from flashckpt.start.internals import Internals


class Loader:
    """Whose state has other keys in the middle of an epoch than at its start."""

    def __init__(self):
        self.batches = 0
        self.generator = torch.Generator().manual_seed(3)

    def next(self):
        self.batches += 1
        return torch.randn(8, 8, generator=self.generator)

    def state_dict(self):
        middle = {"inside": {"worker": [1, 2]}} if self.batches else {}
        return {"batches": self.batches, "generator": self.generator.get_state(), **middle}

    def load_state_dict(self, state):
        self.batches = state["batches"]
        self.generator.set_state(state["generator"])


class Job:
    """A small training whose every random choice shows in its losses."""

    def __init__(self, memory_dir, seed=0, **settings):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=100)
        self.loader = Loader()
        self.arguments = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }
        self.config = CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, "interval": 3, **settings})

    def manager(self, **arguments):
        return CheckpointManager(self.config, **{**self.arguments, **arguments})

    def step(self):
        loss = self.model(self.loader.next()).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def run(self, steps, save=lambda manager, step: manager.save(step), **arguments):
        losses = []
        with self.manager(**arguments) as manager:
            resumed = manager.load()
            for step in range(resumed.step + 1 if resumed else 1, steps + 1):
                losses.append(self.step())
                save(manager, step)
        return losses


@pytest.fixture
def job(memory_dir):
    return lambda **settings: Job(memory_dir, **settings)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- a run that is interrupted is the run that is not ------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_fresh_objects_go_on_bit_for_bit(job, overlap):
    whole = job(job="whole", overlap=overlap).run(12)
    first = job(overlap=overlap).run(5)
    resumed = job(seed=99, overlap=overlap)
    assert first + resumed.run(12) == whole


def test_the_quickstart_saves_its_last_step_at_the_end(job):
    job().run(5)
    with job().manager() as manager:
        assert manager.load().step == 5


def test_an_exception_saves_nothing_more(job):
    def save(manager, step):
        manager.save(step)
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job().run(9, save)
    with job().manager() as manager:
        assert manager.load().step == 3


# --- the gate ---------------------------------------------------------------------------------------------


def test_hooks_go_with_the_manager(job):
    one = job()
    before = dict(_global_optimizer_pre_hooks)
    manager = one.manager()
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    manager.close()
    manager.close()
    assert dict(_global_optimizer_pre_hooks) == before
    with pytest.raises(flashckpt.ClosedError):
        manager.save(1)


# --- what comes back --------------------------------------------------------------------------------------


def test_extra_and_further_states(job):
    class Counter:
        tokens = 0

        def state_dict(self):
            return {"tokens": self.tokens}

        def load_state_dict(self, state):
            self.tokens = state["tokens"]

    counter, plain = Counter(), {"best": 1.5, "history": [1, 2]}
    counter.tokens = 77
    one = job()
    with one.manager(states={"counter": counter, "plain": plain, "own": PerRank({"x": 3})}) as manager:
        one.step()
        manager.save(3, extra={"wandb_run_id": "abc"})
    fresh, target = Counter(), {"best": 0.0, "history": []}
    with job().manager(states={"counter": fresh, "plain": target, "own": PerRank({"x": 0})}) as manager:
        result = manager.load()
    assert result.extra == {"wandb_run_id": "abc"}
    assert fresh.tokens == 77
    assert target == plain


def test_the_extra_of_a_step_that_was_not_due_is_saved_at_the_end(job):
    job().run(5, lambda manager, step: manager.save(step, extra={"at": step}))
    with job().manager() as manager:
        assert manager.load().extra == {"at": 5}


def test_a_loader_that_comes_later(job):
    job().run(4)
    one = job()
    with one.manager(dataloader=None) as manager:
        manager.load()
        assert manager.pending_states["dataloader"]["batches"] == 4
        assert manager.apply_dataloader_state(one.loader)
        assert one.loader.batches == 4
        assert not manager.pending_states
        assert not manager.apply_dataloader_state(one.loader)
        one.step()
        manager.save(6)
    with job().manager(dataloader=None) as manager:
        manager.load()
        assert manager.pending_states["dataloader"]["batches"] == 5
        assert not manager.apply_dataloader_state(None)
        assert not manager.pending_states


def test_a_parameter_that_never_had_a_gradient(job, memory_dir):
    def build():
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters())

    config = CheckpointConfig(job="job", memory_dir=memory_dir)
    model, optimizer = build()
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        manager.save(1)
    model, optimizer = build()
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        assert manager.load().step == 1
    assert set(optimizer.state) == {model["used"].weight, model["used"].bias}


def test_pipeline_parts_and_several_optimizers(memory_dir):
    class Part(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4)})

    def build():
        parts = [Part(0), Part(1)]
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1 * (n + 1)) for n, part in enumerate(parts)]
        return parts, optimizers, [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]

    config = CheckpointConfig(job="job", memory_dir=memory_dir)
    parts, optimizers, schedulers = build()
    for part, optimizer, scheduler in zip(parts, optimizers, schedulers, strict=True):
        next(iter(part.layers.values()))(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    with CheckpointManager(config, model=parts, optimizer=optimizers, lr_scheduler=schedulers) as manager:
        manager.save(1)
    others, fresh, later = build()
    with CheckpointManager(config, model=others, optimizer=fresh, lr_scheduler=later) as manager:
        assert manager.load().step == 1
    for a, b in zip(parts, others, strict=True):
        assert same(weights(a), weights(b))
    assert [one.param_groups[0]["lr"] for one in fresh] == [one.param_groups[0]["lr"] for one in optimizers]
    assert torch.equal(
        fresh[1].state[others[1].layers["1"].weight]["exp_avg"],
        optimizers[1].state[parts[1].layers["1"].weight]["exp_avg"],
    )
    # The same state as one module: the split is not part of the checkpoint.
    joined = nn.Module()
    joined.layers = nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})
    with CheckpointManager(config, model=joined) as manager:
        manager.load()
    assert torch.equal(joined.layers["1"].weight, parts[1].layers["1"].weight)


# --- choosing what to load --------------------------------------------------------------------------------


def test_nothing_saved_is_none_and_leaves_no_trace(job):
    one = job()
    before = weights(one.model)
    with one.manager() as manager:
        assert manager.load() is None
        assert manager.peek_saved_step() is None
        assert manager.all_steps() == ()
        assert not one.optimizer.state
    assert same(weights(one.model), before)


def test_steps(job):
    one = job()
    with one.manager() as manager:
        for step in (3, 6):
            one.step()
            manager.save(step)
        manager.wait()
        assert manager.all_steps() == (3, 6)
        assert manager.latest_step() == manager.peek_saved_step() == 6
        assert not manager.is_pending
        assert manager.load(step=-1).step == 6
        assert manager.load(3).step == 3
        with pytest.raises(flashckpt.NotFoundError, match="step 4"):
            manager.load(4)


def test_parts_that_are_left_as_they_are(job):
    job().run(4)
    one = job()
    with one.manager() as manager:
        assert manager.load(exclude_from_loading=["optimizer", "lr_scheduler"]).step == 4
        assert not one.optimizer.state
        assert one.scheduler.last_epoch == 0
        assert one.loader.batches == 4
        with pytest.raises(flashckpt.ConfigError, match="'optimiser' is no part of the state"):
            manager.load(exclude_from_loading=["optimiser"])
        with pytest.raises(flashckpt.ConfigError, match="found the string"):
            manager.load(exclude_from_loading="optimizer")


def test_a_part_that_is_missing_in_the_checkpoint(job, caplog):
    one = job()
    with one.manager(optimizer=None, lr_scheduler=None) as manager:
        manager.save(3)
    other = job()
    with other.manager() as manager:
        with pytest.raises(flashckpt.MissingKeyError, match="expected optimizer, lr_scheduler, found a checkpoint of"):
            manager.load()
        assert not other.optimizer.state
        with caplog.at_level(logging.WARNING):
            assert manager.load(strict=False).step == 3
        assert "not saved: optimizer, lr_scheduler" in caplog.text
        assert not other.optimizer.state
        other.step()


def test_a_part_that_the_manager_does_not_have_is_left_alone(job):
    job().run(4)
    one = job()
    with CheckpointManager(one.config, model=one.model, rng=False) as manager:
        assert manager.load().step == 4


def test_a_seed_checkpoint_gives_only_the_model(job):
    one = job()
    with one.manager() as manager:
        one.step()
        manager.save(0, force=True)
        wanted = weights(one.model)
    other = job(seed=9)
    with other.manager() as manager:
        assert manager.load().step == 0
        assert same(weights(other.model), wanted)
        assert not other.optimizer.state
        assert other.loader.batches == 0


def test_names_that_changed(job, memory_dir):
    config = CheckpointConfig(job="job", memory_dir=memory_dir)

    def build(name):
        model = nn.ModuleDict({name: nn.Linear(2, 2), "rest": nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters())
        (model[name](torch.ones(1, 2)) + model["rest"](torch.ones(1, 2))).sum().backward()
        return model, optimizer

    model, optimizer = build("old")
    optimizer.step()
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        manager.save(1)
    other, fresh = build("new")
    fresh.zero_grad()
    with CheckpointManager(config, model=other, optimizer=fresh) as manager:
        with pytest.raises(flashckpt.MissingKeyError, match="new"):
            manager.load()
        with pytest.raises(flashckpt.ConfigError, match="no name of the model begins with 'nwe'"):
            manager.load(key_mapping={"nwe": "old"})
        assert manager.load(key_mapping={"new": "old"}).step == 1
    assert torch.equal(other["new"].weight, model["old"].weight)
    assert torch.equal(fresh.state[other["new"].weight]["exp_avg"], optimizer.state[model["old"].weight]["exp_avg"])


def test_the_guard_stops_a_load_before_a_tensor_is_touched(job):
    one = job()
    with one.manager() as manager:
        one.step()
        manager.save(3, compat={"freeze": {"vision": True}, "vocabulary": 100})
    other = job(seed=4)
    before = weights(other.model)
    with other.manager() as manager:
        with pytest.raises(flashckpt.MismatchError, match=r"freeze\.vision: True in the checkpoint, False now"):
            manager.load(expect={"freeze": {"vision": False}, "vocabulary": 100, "new": 1})
        assert same(weights(other.model), before)
        assert not other.optimizer.state
        assert manager.load(expect={"vocabulary": 100}).step == 3
        assert manager.load(expect={"vocabulary": 5}, on_mismatch="warn").step == 3


def test_random_numbers_can_be_left_out(job):
    one = job()
    one.run(4, rng=False)
    other = job()
    other.run(4, rng=False)
    state = torch.get_rng_state()
    with job().manager(rng=False) as manager:
        torch.set_rng_state(state)
        manager.load()
        assert torch.equal(torch.get_rng_state(), state)


# --- policy, first step, misuse -----------------------------------------------------------------------------


def test_the_first_step_is_saved_and_read_back(job, monkeypatch, caplog):
    one = job(interval=100)
    with one.manager() as manager:
        one.step()
        handle = manager.save(1)
        assert handle.level is Level.SEALED  # read back: it waited
        assert manager.save(2) is None
        assert not manager.should_save(2)
        assert manager.should_save(100)
        assert manager.decide(2).reason == "not a multiple of interval 100"


def test_a_first_step_that_reads_back_wrong_is_an_error_in_the_log(job, memory_dir, monkeypatch, caplog):
    read_back = Internals.read_back

    def rotten(internals, handle):
        (path,) = Path(memory_dir).glob("*/sealed/*")
        with open(path, "r+b") as file:
            file.seek(8192)
            byte = file.read(1)
            file.seek(8192)
            file.write(bytes([byte[0] ^ 1]))
        return read_back(internals, handle)

    monkeypatch.setattr(Internals, "read_back", rotten)
    one = job()
    with one.manager() as manager:
        one.step()
        manager.save(1)
        assert "saving does not work here" in caplog.text
        assert "crc32c" in caplog.text


def test_a_first_step_that_can_not_be_saved_is_an_error_in_the_log(job, monkeypatch, caplog):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=error(ENOSPC)*1"))
    one = job()
    with one.manager() as manager:
        one.step()
        with caplog.at_level(logging.ERROR):
            assert manager.save(1).outcome == "failed"
        assert "saving does not work here" in caplog.text
        assert manager.metrics().saves["failed"] == 1


def test_prewarm_makes_the_slots_ahead(job):
    one = job(slots_per_rank=2)
    with one.manager() as manager:
        one.step()
        manager.prewarm()
        assert internals_of(manager.checkpointer).store.status().pool.files == 2
        assert manager.save(3).wait("sealed", timeout=60) == "ok"


def test_the_first_step_that_is_not_saved_makes_the_slots_ahead(job):
    one = job(interval=3)
    with one.manager() as manager:
        one.step()
        assert manager.save(1).wait("sealed", timeout=60) == "ok"  # the first step is always saved
        assert internals_of(manager.checkpointer).store.status().pool.files == 0
        one.step()
        assert manager.save(2) is None
        assert internals_of(manager.checkpointer).saver.prewarming.wait(60)
        assert internals_of(manager.checkpointer).store.status().pool.files == 1


def test_nothing_is_made_ahead_where_the_config_says_so(job):
    one = job(interval=3, prewarm=False, enable_first_step_checkpoint=False)
    with one.manager() as manager:
        one.step()
        assert manager.save(1) is None
        assert internals_of(manager.checkpointer).store.status().pool.files == 0


def test_keep_memory_keeps_the_newest_steps_whole(job):
    one = job(keep_memory=2, interval=1)
    with one.manager() as manager:
        for step in range(1, 6):
            one.step()
            manager.save(step).wait("sealed", timeout=60)
            assert set(manager.all_steps()) >= {step, max(1, step - 1)}
        assert (
            internals_of(manager.checkpointer).store.status().pool.files <= 1
        )  # as many slots as it may have, and no more
    with job(keep_memory=2).manager() as manager:
        assert manager.load(4).step == 4


def test_load_only(job):
    job().run(4)
    one = job(load_only=True)
    with one.manager() as manager:
        assert manager.load().step == 4
        one.step()
        assert manager.save(5, force=True) is None
    with job().manager() as manager:
        assert manager.load().step == 4


@pytest.mark.parametrize("by", ["config", "argument"])
def test_an_evaluation_beside_the_training_changes_nothing(job, tmp_path, by):
    training = job(persist_dir=str(tmp_path), persist_on_exit=False)
    with training.manager() as manager:
        manager.load()
        training.step()
        assert manager.save(1, force=True).wait() == "ok"
        store = internals_of(manager.checkpointer).store
        before = (store.read_line(), sorted(one.name for one in store.scan()), snapshot(tmp_path))
        evaluation = job(persist_dir=str(tmp_path), persist_on_exit=False, load_only=by == "config")
        with evaluation.manager() as reader:
            found = reader.load(read_only=True) if by == "argument" else reader.load()
            assert found.step == 1
            if by == "config":
                assert reader.save(2, force=True) is None
                assert reader.checkpointer.save(2, {"x": 1}).outcome == "skipped"
                with pytest.raises(flashckpt.ConfigError, match="load_only"):
                    reader.checkpointer.start_fresh()
                with pytest.raises(flashckpt.ConfigError, match="take_over"):
                    reader.load(take_over=True)
        assert (store.read_line(), sorted(one.name for one in store.scan()), snapshot(tmp_path)) == before
        training.step()
        assert manager.save(2, force=True).wait() == "ok"


def test_an_overtaken_training_hears_it(job, caplog):
    events = []
    training = job()
    with training.manager(on_event=events.append) as manager:
        manager.load()
        training.step()
        assert manager.save(1, force=True).wait() == "ok"
        assert manager.metrics().overtaken == ""
        with job().manager() as other:
            assert other.load().step == 1
        training.step()
        assert manager.save(2, force=True).wait() == "failed"
        training.step()
        manager.save(3, force=True)
        assert "has taken over" in manager.metrics().overtaken
    assert len([one for one in caplog.records if one.levelname == "ERROR" and "lost its job" in one.message]) == 2
    failed = [one for one in events if one.kind == "failed"]
    assert [one.step for one in failed if "has taken over" in one.reason]
    # It may take the job back, and is then as well as any other.
    again = job()
    with again.manager() as manager:
        manager.load()
        again.step()
        assert manager.save(4, force=True).wait() == "ok"
        assert manager.metrics().overtaken == ""


def snapshot(directory):
    """Every file below it, with the time of its last change."""
    return sorted((str(path), path.lstat().st_mtime_ns) for path in [directory, *directory.rglob("*")])


def test_pre_snapshot_and_events(job):
    calls, events = [], []
    one = job()
    with one.manager(pre_snapshot=lambda: calls.append(1), on_event=events.append) as manager:
        one.step()
        manager.save(2)
        assert calls == []
        manager.save(3)
        assert calls == [1]
        manager.wait()
    kinds = [event.kind for event in events if event.step == 3]
    assert kinds[0] == "saved"
    assert {"staged", "sealed"} <= set(kinds)
    assert all(event.size_bytes > 0 for event in events if event.kind == "sealed")
    with job().manager(on_event=events.append) as manager:
        result = manager.load()
        assert (events[-1].kind, events[-1].step, events[-1].reason) == ("loaded", 3, "memory")
        assert events[-1].seconds == manager.metrics().load_seconds == result.timings.total > 0


def test_an_event_handler_that_fails_does_not_end_the_training(job, caplog):
    def broken(event):
        raise ValueError("metrics server is down")

    one = job()
    one.run(3, on_event=broken)
    assert "metrics server is down" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extra": {"flashckpt": 1}}, "the manager's own"),
        ({"extra": [1]}, "extra: expected a mapping"),
        ({"compat": 5}, "compat: expected a mapping"),
    ],
)
def test_bad_arguments_of_save(job, arguments, message):
    one = job()
    with pytest.raises(flashckpt.ConfigError, match=message), one.manager() as manager:
        manager.save(3, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_mode": "sometimes"}, "async_mode: expected one of"),
        ({"exclude_from_loading": ("model",)}, "the model can't be left out"),
        ({"exclude_from_loading": ("optimizer",)}, "'optimizer' without 'lr_scheduler'"),
        ({"exclude_from_loading": "optimizer"}, "expected a tuple"),
        ({"exclude_from_loading": ("optimiser",)}, "no part of the state"),
        ({"fixed_steps": (-1,)}, "fixed_steps"),
        ({"fixed_steps": 5}, "expected a tuple"),
        ({"initial_load_path": "relative/path"}, "expected an absolute path or a URL"),
        ({"overlap": "yes"}, "expected True or False"),
        ({"interval": 0}, "interval: expected an integer"),
    ],
)
def test_bad_settings_fail_at_construction(job, settings, message):
    with pytest.raises(flashckpt.ConfigError, match=message) as caught:
        job(**settings).manager()
    assert isinstance(caught.value, ValueError)


def test_disabled(job, monkeypatch):
    monkeypatch.setenv("FLASHCKPT_DISABLE", "1")
    one = job()
    with one.manager() as manager:
        assert manager.load() is None
        one.step()
        assert manager.save(1).outcome == "skipped"
        assert manager.all_steps() == ()


# --- signals ----------------------------------------------------------------------------------------------


def test_a_signal_takes_a_last_snapshot_and_the_handlers_go_back(job):
    before = signal.getsignal(signal.SIGUSR1)
    one = job(interval=100)
    with one.manager() as manager:
        with flashckpt.install_signal_handlers(manager, deadline=60) as handlers:
            one.step()
            manager.save(1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not manager.stop_requested
            one.step()
            handle = manager.save(2)
            assert handle.outcome == "ok"
            assert manager.stop_requested
            assert 0 < handlers.remaining <= 60
            assert manager.save(3) is None
        assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_can_end_the_process(job):
    one = job(interval=100)
    with one.manager() as manager:
        manager.install_signal_handlers(exit_code=143)
        one.step()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            manager.save(7)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with job().manager() as manager:
        assert manager.load().step == 7


def test_handlers_that_somebody_replaced_are_left_alone(job):
    def theirs(*_):
        pass

    with job().manager() as manager:
        manager.install_signal_handlers([signal.SIGUSR2])
        signal.signal(signal.SIGUSR2, theirs)
    try:
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_bad_handlers(job):
    with job().manager() as manager:
        with pytest.raises(flashckpt.ConfigError, match="deadline"):
            manager.install_signal_handlers(deadline=0)
        problems = []

        def elsewhere():
            try:
                manager.install_signal_handlers()
            except flashckpt.ConfigError as error:
                problems.append(error.message)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert problems == ["signal handlers: expected the main thread"]


def test_arguments_that_are_easily_mistaken_are_refused(job):
    with job().manager() as manager:
        with pytest.raises(TypeError, match="positional"):
            manager.save(1, 4096)  # a number of tokens
        with pytest.raises(flashckpt.ConfigError, match="found '/data/step-5'") as caught:
            manager.load("/data/step-5")
        assert "path='/data/step-5'" in caught.value.hint
