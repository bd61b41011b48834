"""Agents that drain when they are met, and the time that they get: to start, to drain, to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import flashckpt
from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, look, stop_agent
from flashckpt.cli.entry import group
from flashckpt.errors import AgentError
from tests.conftest import environment
from tests.flushes import JOB, checkpointers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode != 0,
    reason="makes pid namespaces",
)


@pytest.fixture
def make(memory_dir, tmp_path):
    with checkpointers(memory_dir, tmp_path / "out") as made:
        yield made


@pytest.fixture
def failpoints(monkeypatch):
    """Sets those of the agents that are started from then on."""

    def set_them(text):
        monkeypatch.setenv("FLASHCKPT_TESTING", "1")
        monkeypatch.setenv("FLASHCKPT_AGENT_FAILPOINTS", text)

    return set_them


def state(step):
    return {"weights": torch.full((1000,), float(step)), "step": step}


def drain(make, memory_dir, failpoints, seconds):
    """An agent that is told to stop, and flushes in vain for `seconds`."""
    failpoints("before_flusher=sleep(100)")
    with contextlib.closing(make(persist_on_exit=True, persist_drain_timeout=seconds)) as checkpointer:
        checkpointer.save(7, state(7))
        pid = look(memory_dir, JOB).status["pid"]
    failpoints("")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not (status := look(memory_dir, JOB).status) or not status["draining"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pid


def test_a_launch_that_meets_a_draining_agent_waits_for_its_successor(make, memory_dir, failpoints):
    pid = drain(make, memory_dir, failpoints, 3.0)
    live = state(0)
    assert make().load(live).step == 7
    assert torch.equal(live["weights"], state(7)["weights"])
    assert look(memory_dir, JOB).status["pid"] != pid


def test_a_launch_waits_for_a_draining_agent_no_longer_than_start_timeout(make, memory_dir, failpoints):
    pid = drain(make, memory_dir, failpoints, 60.0)
    began = time.monotonic()
    with pytest.raises(
        AgentError, match=f"pid {pid}, .* expected it to end within .* found that it still drains"
    ) as late:
        make(start_timeout=2.0)
    assert time.monotonic() - began < 2.0 + 3.0
    assert "agent stop --kill" in late.value.hint
    # Who stops it once more, with another time, is obeyed.
    assert stop_agent(memory_dir, JOB, 0.5).pid == pid
    assert time.monotonic() - began < 2.0 + 3.0 + 5.0


@pytest.mark.slow
def test_a_launch_waits_for_a_long_drain_and_a_slow_start(make, memory_dir, failpoints):
    """Together longer than half a minute."""
    pid = drain(make, memory_dir, failpoints, 18.0)
    failpoints("mid_start=sleep(15)")
    began = time.monotonic()
    live = state(0)
    assert make().load(live).step == 7
    assert time.monotonic() - began > 30.0
    assert look(memory_dir, JOB).status["pid"] != pid


def run_stop(memory_dir, *arguments):
    return CliRunner().invoke(group, ["agent", "stop", "--job", JOB, "--memory-dir", memory_dir, *arguments])


def test_the_time_that_agent_stop_gives_is_the_one_that_holds(make, memory_dir, failpoints):
    drain(make, memory_dir, failpoints, 60.0)
    began = time.monotonic()
    assert run_stop(memory_dir, "--timeout", "1").exit_code == 0
    assert time.monotonic() - began < 1.0 + 6.0


def test_agent_stop_waits_as_long_as_the_agent_drains_by_its_settings(make, memory_dir, failpoints):
    failpoints("before_flusher=sleep(100)")
    checkpointer = make(persist_on_exit=True, persist_drain_timeout=3.0)
    checkpointer.save(7, state(7))
    checkpointer.close()
    began = time.monotonic()
    assert run_stop(memory_dir).exit_code == 0
    assert 3.0 <= time.monotonic() - began < 3.0 + 5.0
    assert look(memory_dir, JOB) is None


def options(memory_dir):
    return Options(job=JOB, memory_dir=memory_dir, node_id="a", linger=60.0)


@needs_namespaces
def test_an_agent_in_a_container_is_killed_from_its_host(memory_dir):
    command = [sys.executable, "-I", "-m", "flashckpt.agent", "run", *options(memory_dir).arguments()]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *command]
    container = subprocess.Popen(inside, cwd="/", stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (seen := _look(memory_dir)) or seen.status is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seen.holder.pid == 1
        (pid,) = map(int, Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split())
        os.kill(pid, signal.SIGSTOP)
        stopped = run_stop(memory_dir, "--timeout", "0.5", "--kill")
        assert stopped.exit_code == 0, stopped.output
        assert container.wait(10) != 0
        assert look(memory_dir, JOB) is None
    finally:
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, JOB, 0.0, kill=True)
        container.wait(10)


def _look(memory_dir):
    with contextlib.suppress(flashckpt.NotFoundError):
        return look(memory_dir, JOB, 0.5)


@needs_namespaces
def test_a_container_ends_its_hosts_agent_or_says_why_not(memory_dir):
    pid = ensure_agent(options(memory_dir)).pid
    command = [sys.executable, "-m", "flashckpt.cli", "agent", "stop", "--job", JOB, "--memory-dir", memory_dir]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *command, "--timeout", "1", "--kill"]
    os.kill(pid, signal.SIGSTOP)
    try:
        told = subprocess.run(inside, capture_output=True, text=True, env=environment(), timeout=60, check=False)
        assert told.returncode == 1
        assert "FC-AGT-001" in told.stderr
        assert f"another pid namespace (another container), where its pid is {pid}" in told.stderr
        assert "on its host as root" in told.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    told = subprocess.run(inside, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert look(memory_dir, JOB) is None
