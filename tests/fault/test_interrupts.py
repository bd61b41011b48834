"""An exception at any moment of save, load, wait, open and close leaves a Checkpointer usable or closed.

Each run tries other lines, picked at random; FLASHCKPT_EVERY_LINE=1 tries all of them, which takes an hour.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt import failpoints
from flashckpt.agent.start import look, stop_agent
from flashckpt.checkpointer import internals_of
from tests.conftest import environment
from tests.fault.interrupts import interrupted_at

WORKER = Path(__file__).parent / "interrupted_worker.py"
JOB = "job"
PROMPT = 8.0  # seconds; what hangs takes save_timeout or longer
SAMPLE = 12  # lines of each call in the quick tests
EVERY_LINE = os.environ.get("FLASHCKPT_EVERY_LINE") == "1"


def state(step):
    return {
        "w": torch.full((50_000,), float(step)),
        "rest": [torch.full((n,), float(step)) for n in range(4)],
        "n": step,
    }


def step_of(live):
    """The step that all of the state is of."""
    values = {live["n"], *(value for one in (live["w"], *live["rest"]) for value in one.unique().tolist())}
    assert len(values) == 1, f"torn: {values}"
    return live["n"]


def numbers(lines, sample):
    """Which lines to interrupt at: all, or about `sample` of them, other ones in each run."""
    stride = 1 if EVERY_LINE else max(1, lines // sample)
    return range(1 + random.randrange(stride), lines + 1, stride)


class Job:
    """One rank that saves, and what it was promised."""

    def __init__(self, memory_dir, agent):
        self.memory_dir, self.agent = memory_dir, agent
        self.step = 0
        self.promised = 0
        self.checkpointer = None

    def make(self):
        return flashckpt.Checkpointer(
            flashckpt.CheckpointConfig(
                job=JOB,
                memory_dir=self.memory_dir,
                node_id="a",
                agent=self.agent,
                agent_linger=60.0,
                save_timeout=20.0,
                start_timeout=30.0,
            )
        )

    def open(self):
        self.checkpointer = self.make()

    def close(self):
        self.checkpointer.close()

    def save(self, overlap=False):
        self.step += 1
        live = state(self.step)
        try:
            handle = self.checkpointer.save(self.step, live, overlap=overlap)
            handle.wait("sealed", 20.0)
        except KeyboardInterrupt:
            live["w"].fill_(-1.0)  # whoever gets no handle may change the tensors
            raise
        if handle.outcome == "ok":
            self.promised = self.step
        return handle

    def load(self):
        live = state(0)
        found = self.checkpointer.load(live)
        assert found is not None
        assert found.step == step_of(live)
        return found.step

    def check(self, where):
        """Usable: a save and a load are quick and right, and nothing was left behind."""
        began = time.monotonic()
        handle = self.save()
        assert handle.outcome == "ok", f"{where}: {handle}"
        assert self.load() == self.step, where
        assert time.monotonic() - began < PROMPT, f"{where}: a save and a load took {time.monotonic() - began:.1f} s"
        assert gc.isenabled(), where
        if self.agent == "off":
            assert internals_of(self.checkpointer).store.check() == [], where
            assert os.listdir(os.path.join(internals_of(self.checkpointer).store.path, "writing")) == [], where


@pytest.fixture(params=["off", "auto"])
def job(request, memory_dir):
    job = Job(memory_dir, request.param)
    yield job
    if job.checkpointer is not None:
        job.close()
    if request.param == "auto":
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, JOB, 10.0, kill=True)


def sweep(job, call, sample):
    with interrupted_at(0) as told:
        call()
    hits = 0
    # A little beyond: the next call may take a few lines more.
    for number in numbers(told.lines, sample if job.agent == "off" else max(4, sample // 3)):
        with interrupted_at(number) as interrupt:
            call()
        hits += interrupt.came
        job.check(interrupt.where)
    assert hits, "nothing was interrupted"


CALLS = {
    "save": lambda job: job.save,
    "overlapped save": lambda job: lambda: job.save(overlap=True),
    "load": lambda job: job.load,
}


@pytest.mark.parametrize("call", CALLS)
def test_after_an_interrupt_the_next_save_and_load_are_prompt_and_right(job, call):
    job.open()
    job.save()
    job.save()
    sweep(job, CALLS[call](job), SAMPLE)


def ours():
    return {one.name for one in threading.enumerate() if one.name.startswith("flashckpt")}


def wait_for_threads(before, where):
    deadline = time.monotonic() + PROMPT
    while ours() - before:
        assert time.monotonic() < deadline, f"{where}: left behind {ours() - before}"
        time.sleep(0.005)


def wait_for_descriptors(most, where):
    """Wait until at most that many are open. gloo's own thread closes those of a group some time after it."""
    deadline = time.monotonic() + PROMPT
    while len(os.listdir("/proc/self/fd")) > most:
        assert time.monotonic() < deadline, f"{where}: {len(os.listdir('/proc/self/fd'))} descriptors, at most {most}"
        time.sleep(0.02)


def test_an_interrupted_start_closes_what_it_had_opened(job):
    job.open()
    job.save()
    job.close()
    before = ours()
    with interrupted_at(0) as told:
        job.open()
    job.close()
    for number in numbers(told.lines, SAMPLE):
        descriptors = len(os.listdir("/proc/self/fd"))
        with interrupted_at(number) as interrupt:
            job.open()
            job.close()
        wait_for_threads(before, interrupt.where)
        # One that was opened in the very moment has no name yet by which it could be closed.
        wait_for_descriptors(descriptors + 1, interrupt.where)
        job.open()
        assert job.load() == job.promised, interrupt.where
        job.check(interrupt.where)
        job.close()


def test_an_interrupted_close_is_finished_by_the_next_one(job):
    job.open()
    job.save()
    before = ours()
    with interrupted_at(0) as told:
        job.close()
    for number in numbers(told.lines, SAMPLE):
        job.open()
        job.save()
        with interrupted_at(number) as interrupt:
            job.close()
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            job.close()
        assert time.monotonic() - began < PROMPT, interrupt.where
        with pytest.raises(flashckpt.ClosedError):
            job.checkpointer.load(state(0))
        wait_for_threads(before, interrupt.where)
        job.open()
        assert job.load() == job.promised, interrupt.where
        job.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_alarms_at_random_moments_in_a_process_with_an_agent(memory_dir, rounds):
    command = [sys.executable, "-W", "ignore", str(WORKER), memory_dir, str(rounds)]
    try:
        done = subprocess.run(
            command, env=environment(FLASHCKPT_AGENT="auto"), capture_output=True, text=True, timeout=240, check=False
        )
    finally:
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, JOB, 10.0, kill=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert sum(told["hits"].values()) >= rounds
    assert told["slowest"] < PROMPT
    assert told["close"] < PROMPT


@pytest.fixture
def objects():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def train_one_step(model, optimizer):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_interrupted_load_of_a_manager_leaves_the_optimizer_as_it_was(memory_dir, objects):
    config = flashckpt.CheckpointConfig(job=JOB, memory_dir=memory_dir, agent="off", save_timeout=20.0)
    model, optimizer = objects
    with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        train_one_step(model, optimizer)
        assert manager.save(1, force=True).wait() == "ok"
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    step = 1

    def fresh():
        other = torch.nn.Linear(8, 8)
        return other, torch.optim.AdamW(other.parameters(), lr=0.5)

    model, optimizer = fresh()
    with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager, interrupted_at(0) as told:
        manager.load()
    for number in numbers(told.lines, SAMPLE):
        model, optimizer = fresh()
        with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager:
            found = None
            with interrupted_at(number) as interrupt:
                found = manager.load()
            assert optimizer.param_groups[0]["lr"] == 0.5, interrupt.where
            if found is None:
                began = time.monotonic()
                assert manager.load().step == step, interrupt.where
                assert time.monotonic() - began < PROMPT, interrupt.where
            assert all(torch.equal(wanted[key], value) for key, value in model.state_dict().items()), interrupt.where
            assert {int(one["step"]) for one in optimizer.state.values()} == {1}, interrupt.where
            train_one_step(model, optimizer)
            step += 1
            for one in optimizer.state.values():
                one["step"].fill_(1.0)
            model.load_state_dict(wanted)
            assert manager.save(step, force=True).wait() == "ok", interrupt.where


def test_a_load_that_is_interrupted_after_tensors_were_written_to_says_so(memory_dir):
    job = Job(memory_dir, "off")
    job.open()
    job.save()
    live = state(0)

    class Owner:
        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, _):
            raise KeyboardInterrupt

    saved = {**live, "owner": {"x": 1}}
    assert job.checkpointer.save(2, saved).outcome == "ok"
    with pytest.raises(KeyboardInterrupt) as caught:
        job.checkpointer.load({**live, "owner": Owner()})
    assert "tensors were written to" in caught.value.__notes__[0]
    job.close()


def test_close_is_bounded_though_the_copy_hangs_and_the_agent_is_stopped(memory_dir, monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_copy=sleep(6)"))
    config = flashckpt.CheckpointConfig(
        job=JOB, memory_dir=memory_dir, node_id="a", agent="auto", agent_linger=60.0, save_timeout=2.0
    )
    checkpointer = flashckpt.Checkpointer(config)
    pid = look(memory_dir, JOB).holder.pid
    try:
        handle = checkpointer.save(1, state(1), overlap=True)
        deadline = time.monotonic() + PROMPT
        while not os.listdir(internals_of(checkpointer).store.path / "writing"):
            assert time.monotonic() < deadline, "the copy did not begin"
            time.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        checkpointer.close()
        assert time.monotonic() - began < 2.0 + 1.5
        with pytest.raises(flashckpt.ClosedError):
            checkpointer.save(2, state(2))
    finally:
        os.kill(pid, signal.SIGCONT)
        stop_agent(memory_dir, JOB, 10.0, kill=True)
    handle.wait("sealed", 30.0)
    assert handle.outcome != "ok", "given up when it was closed"


@pytest.mark.slow
def test_a_rank_that_was_interrupted_among_others_says_so_at_the_next_collective(torchrun, tmp_path, memory_dir):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, flashckpt\n"
        "dist.init_process_group('gloo')\n"
        "config = flashckpt.CheckpointConfig(job='job', memory_dir=sys.argv[1], agent='off', start_timeout=6.0)\n"
        "checkpointer = flashckpt.Checkpointer(config)\n"
        "state = {'w': torch.ones(100)}\n"
        "assert checkpointer.save(1, state).outcome == 'ok'\n"
        "class Interrupting:\n"
        "    def state_dict(self):\n"
        "        if dist.get_rank() == 0: raise KeyboardInterrupt\n"
        "        return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "try: checkpointer.load({**state, 'i': Interrupting()}, strict=False)\n"
        "except KeyboardInterrupt: pass\n"
        "except flashckpt.FlashError as error: assert dist.get_rank() == 1, error\n"
        "if dist.get_rank() == 0:\n"
        "    try: checkpointer.load(state)\n"
        "    except flashckpt.ConflictError as error: print('SAID', error, error.hint)\n"
        "assert checkpointer.save(2, state).outcome == 'ok'\n"
        "checkpointer.close()\n"
    )
    code, output = torchrun(2, script, memory_dir, timeout=120)
    assert code == 0, output
    assert "an exception ended an earlier collective call (load)" in output.replace("\n", " ")
    assert "make another one on all ranks" in output
