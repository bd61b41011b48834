"""A trainer, its agent and the flusher: real processes, one node."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time

import pytest
import torch

import flashckpt
from flashckpt.agent import flusher as flusher_module
from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, look, stop_agent
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.types import PersistSettings
from tests.conftest import environment
from tests.flushes import JOB, WAIT, checkpointers, persist_status, plain_load, state, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(1500),
]


@pytest.fixture
def make(memory_dir, tmp_path):
    with checkpointers(memory_dir, tmp_path / "out") as made:
        yield made


def test_to_wait_for_persisted_asks_for_a_flush(make, memory_dir, tmp_path):
    checkpointer = make()
    handle = checkpointer.save(1, state(1))
    assert handle.wait("persisted", timeout=WAIT) == "ok"
    assert handle.level is flashckpt.Level.PERSISTED
    got = plain_load(tmp_path / "out" / "latest")
    assert got["step"] == 1
    assert torch.equal(got["weights"], state(1)["weights"])
    assert persist_status(memory_dir)["step"] == 1
    (listed,) = [g for g in look(memory_dir, JOB).status["generations"] if g["step"] == 1]
    assert listed["level"] == "persisted"


@pytest.mark.slow
def test_what_is_flushed_stays_in_memory_while_training_goes_on(make, memory_dir, tmp_path):
    checkpointer = make(persist_max_mbps=2.0)  # 400 kB take 1.6 s
    first = checkpointer.save(1, state(1))
    checkpointer.flush()
    for step in range(2, 30):
        assert checkpointer.save(step, state(step)).outcome == "ok"
    assert first.wait("persisted", timeout=WAIT) == "ok"
    assert plain_load(tmp_path / "out" / "step-1")["step"] == 1
    # And it is let go of afterwards.
    wait_until(
        lambda: [g["step"] for g in look(memory_dir, JOB).status["generations"] if g["shards"]] == [29],
        "only the newest generation stays",
    )


@pytest.mark.slow
def test_every_interval_is_flushed_by_itself(make, memory_dir, tmp_path):
    checkpointer = make(persist_interval=5, keep_latest_k=2)
    for step in range(1, 21):
        checkpointer.save(step, state(step))
        if step % 5 == 0:
            wait_until(lambda step=step: persist_status(memory_dir)["step"] == step, f"step {step} to be flushed")
    assert sorted(os.listdir(tmp_path / "out")) == ["flashckpt.json", "latest", "step-15", "step-20"]
    assert persist_status(memory_dir)["flushes"] == 4


@pytest.mark.slow
def test_the_newest_generation_is_flushed_when_the_trainers_end(memory_dir, tmp_path):
    """Killed, not closed: nobody asked for anything."""
    code = (
        "import os, signal, sys, torch, flashckpt\n"
        "settings = {'job': 'run1', 'memory_dir': sys.argv[1], 'node_id': 'a', 'persist_dir': sys.argv[2]}\n"
        "checkpointer = flashckpt.Checkpointer(flashckpt.CheckpointConfig(**settings))\n"
        "for step in (1, 2, 3):\n"
        "    checkpointer.save(step, {'weights': torch.full((100_000,), float(step)), 'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    try:
        subprocess.run(
            [sys.executable, "-c", code, memory_dir, str(tmp_path / "out")],
            env=environment(FLASHCKPT_AGENT="auto"),
            timeout=120,
            check=False,
        )
        wait_until(lambda: (tmp_path / "out" / "latest").exists(), "the agent to flush what the trainers left")
        assert plain_load(tmp_path / "out" / "latest")["step"] == 3
        assert json.loads((tmp_path / "out" / "step-3" / "meta.json").read_text())["reason"] == "the trainers ended"
    finally:
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, JOB, 30.0, kill=True)


@pytest.mark.slow
def test_an_evaluation_neither_delays_the_flush_at_the_end_nor_causes_one(make, memory_dir, tmp_path):
    training = make(persist_on_exit=True)
    training.save(7, state(7))
    evaluation = make(persist_on_exit=True, load_only=True)
    assert evaluation.load(state(0)).step == 7
    training.close()
    wait_until(lambda: persist_status(memory_dir)["step"] == 7, "step 7 to be flushed")
    flushes = persist_status(memory_dir)["flushes"]
    evaluation.close()
    assert persist_status(memory_dir)["flushes"] == flushes


def test_an_agent_that_is_told_to_stop_flushes_first(make, memory_dir, tmp_path):
    checkpointer = make(persist_on_exit=True, persist_drain_timeout=WAIT)
    checkpointer.save(7, state(7))
    stop_agent(memory_dir, JOB, WAIT + 30)
    assert plain_load(tmp_path / "out" / "latest")["step"] == 7


@pytest.mark.slow
def test_a_disk_that_is_full_is_an_outcome_and_the_next_attempt_succeeds(make, memory_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("FLASHCKPT_TESTING", "1")
    monkeypatch.setenv("FLASHCKPT_AGENT_FAILPOINTS", "mid_flush=error(ENOSPC)")
    checkpointer = make()
    checkpointer.save(1, state(1))
    checkpointer.flush()
    found = wait_until(lambda: (p := persist_status(memory_dir))["failures"] and p, "the failure to be reported")
    assert "No space left" in found["problem"]
    assert found["step"] is None
    assert not (out / "latest").exists()
    assert not (out / "step-1").exists()
    assert checkpointer.save(2, state(2)).outcome == "ok"
    # Without the fault: the successor of the agent tries again, and cleans up what is left.
    monkeypatch.delenv("FLASHCKPT_AGENT_FAILPOINTS")
    stop_agent(memory_dir, JOB, 30.0, kill=True)
    ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="a"), 60.0)
    handle = checkpointer.save(3, state(3))
    assert handle.wait("persisted", timeout=WAIT) == "ok"
    assert sorted(os.listdir(out)) == ["flashckpt.json", "latest", "step-3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", ["before_flush", "mid_flush", "before_persist_rename", "after_persist_rename", "before_latest"]
)
@pytest.mark.parametrize("action", ["kill", "error(EIO)"])
def test_a_flush_that_dies_anywhere_leaves_the_step_before_good(
    make, memory_dir, tmp_path, monkeypatch, failpoint, action
):
    out = tmp_path / "out"
    checkpointer = make()
    assert checkpointer.save(1, state(1)).wait("persisted", timeout=WAIT) == "ok"
    log = tmp_path / "fired"
    # Before its end: the checkpointer starts the next agent as soon as it notices.
    monkeypatch.setenv("FLASHCKPT_TESTING", "1")
    monkeypatch.setenv("FLASHCKPT_AGENT_FAILPOINTS", f"{failpoint}={action}")
    monkeypatch.setenv("FLASHCKPT_FAILPOINTS_LOG", str(log))
    stop_agent(memory_dir, JOB, 60.0)
    ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="a"), 60.0)
    checkpointer.save(2, state(2))
    checkpointer.flush()
    wait_until(lambda: persist_status(memory_dir)["failures"], "the failure to be reported")
    assert log.read_text().split()[0] == failpoint
    # Whatever `latest` names is whole.
    assert plain_load(out / "latest")["step"] == 1
    assert plain_load(out / "step-1")["step"] == 1
    for name in os.listdir(out):
        if name.startswith("step-") and name.count(".") == 0:
            assert torch.equal(plain_load(out / name)["weights"], state(int(name[5:]))["weights"])
    # Training goes on, and once the fault is gone so does the flush.
    assert checkpointer.save(3, state(3)).outcome == "ok"
    monkeypatch.delenv("FLASHCKPT_AGENT_FAILPOINTS")
    stop_agent(memory_dir, JOB, 60.0, kill=True)
    ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="a"), 60.0)
    handle = checkpointer.save(4, state(4))
    assert handle.wait("persisted", timeout=WAIT) == "ok"
    assert os.readlink(out / "latest") == "step-4"
    assert not [name for name in os.listdir(out) if "tmp" in name or "deleting" in name]


@pytest.mark.slow
def test_a_disk_that_hangs_is_an_outcome_too(make, memory_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCKPT_TESTING", "1")
    monkeypatch.setenv("FLASHCKPT_AGENT_FAILPOINTS", "mid_flush=sleep(600)")
    checkpointer = make(persist_timeout=1.0)
    checkpointer.save(1, state(1))
    checkpointer.flush()
    for step in range(2, 10):  # training does not wait for it
        assert checkpointer.save(step, state(step)).outcome == "ok"
    found = wait_until(lambda: (p := persist_status(memory_dir))["failures"] and p, "the failure to be reported")
    assert "it hangs" in found["problem"]
    assert not (tmp_path / "out" / "latest").exists()
    shown = subprocess.run(
        [sys.executable, "-m", "flashckpt.cli", "status", "--job", JOB, "--memory-dir", memory_dir],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "on disk: nothing yet" in shown.stdout, shown.stdout + shown.stderr
    assert "it hangs" in shown.stdout


@pytest.mark.slow
def test_a_flusher_that_is_slow_to_start_does_not_hang(memory_dir, tmp_path, monkeypatch):
    """What it needs until it can begin is not taken from the time of the flush."""
    monkeypatch.setattr(flusher_module, "_GRACE_SECONDS", 0.0)
    ended = queue.Queue()
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job=JOB, memory_dir=memory_dir)) as checkpointer:
        spec = FlushSpec(
            job=JOB,
            memory_dir=memory_dir,
            node_id="a",
            generation=checkpointer.save(1, state(1)).generation,
            world=1,
            writers=(("a", (0,)),),
            coordinates=True,
            attempt=f"{1:016x}",
            reason="test",
            settings=PersistSettings(str(tmp_path / "out"), timeout=10.0),
        )
        flusher = flusher_module.Flusher(ended.put)
        flusher.start(spec)
        try:
            process = wait_until(lambda: flusher._process, "the process")
            process.send_signal(signal.SIGSTOP)
            time.sleep(11.0)
            process.send_signal(signal.SIGCONT)
            assert ended.get(timeout=WAIT).reason == ""
        finally:
            flusher.stop()
    assert plain_load(tmp_path / "out" / "latest")["step"] == 1


def test_memory_only_has_nothing_to_flush(make):
    checkpointer = make(persist_dir=None)
    handle = checkpointer.save(1, state(1))
    with pytest.raises(flashckpt.ConfigError, match="persisted"):
        handle.wait("persisted", timeout=1)
    with pytest.raises(flashckpt.ConfigError, match="persist_dir"):
        checkpointer.flush()
