"""The demo as a user runs it, and its clean-up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashckpt.demo.job import Event, Run
from flashckpt.demo.processes import descendants
from flashckpt.demo.scenario import Plan, find_problems
from flashckpt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds; a machine under load is no failure


@pytest.fixture
def parent():
    directory = Path("/dev/shm") / f"flashckpt-test-demo-{os.getpid()}"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def start(parent, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "flashckpt.cli", "demo", "--plain", "--memory-dir", str(parent / "m"), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_resumed_run_equals_the_uninterrupted_one(parent):
    with start(parent, "--ranks", "2", "--steps", "8", "--every", "3", "--kill-at", "4") as process:
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output + errors
    assert "\x1b" not in output
    assert re.search(r"^IDENTICAL: killed \d+ processes after step \d+, resumed from step [36] in memory", output, re.M)
    assert "NOT IDENTICAL" not in output
    assert "killed here" in output
    assert list(parent.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(parent, number):
    with start(parent, "--ranks", "1") as process:
        assert process.stderr is not None
        assert "1/3" in process.stderr.readline()
        # The job's memory directory is there: torchrun and a rank are running.
        while not list(parent.glob("flashckpt-demo-*/memory/demo")):
            assert process.poll() is None
            time.sleep(0.05)
        assert len(below := descendants(process.pid)) >= 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(parent.iterdir()) == []
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def told(ranks=1, steps=(), saved=(), loaded=None, digest="d"):
    """A run as its events would tell it."""
    run = Run(ranks, 0.0)
    if loaded is not None:
        run.events.append(Event("loaded", 0, loaded, {}, 0.0))
    run.events += [Event("step", 0, step, {"loss": loss}, 0.0) for step, loss in steps]
    run.events += [
        Event("saved", rank, step, {"outcome": "ok", "reason": ""}, 0.0) for step in saved for rank in range(ranks)
    ]
    if digest:
        run.events.append(Event("done", 0, 0, {"digest": digest}, 0.0))
    return run


PLAN = Plan(ranks=1, steps=5, every=2, kill_at=3)
WHOLE = [(step, float(step).hex()) for step in range(1, 6)]


def problems(killed=None, resumed=None):
    killed = killed or told(steps=WHOLE[:3], saved=[2], digest="")
    resumed = resumed or told(steps=WHOLE[2:], loaded=2)
    return find_problems(PLAN, told(steps=WHOLE), killed, resumed)


def test_equal_runs_have_no_problems():
    assert problems() == []


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        (told(steps=[(3, float.hex(3.0000000000000004)), *WHOLE[3:]], loaded=2), "step 3 after the resume: loss 0x1.8"),
        (told(steps=WHOLE[2:], loaded=2, digest="e"), "final weights: digest e, expected d"),
        (told(steps=WHOLE), "found nothing to resume from"),
        (told(steps=WHOLE[1:], loaded=1), "resumed from step 1, expected 2"),
        (told(steps=WHOLE[3:], loaded=2), "after the resume from step 2 came steps [4, 5]"),
    ],
)
def test_every_difference_is_found(resumed, expected):
    (problem,) = problems(resumed=resumed)
    assert expected in problem


def test_a_difference_before_the_kill_is_found():
    (problem,) = problems(killed=told(steps=[*WHOLE[:2], (3, "0x0p+0")], saved=[2], digest=""))
    assert "step 3 before the kill" in problem


@pytest.mark.parametrize("kill_at", [1, 5, 10, 20, 21])
def test_the_kill_has_to_lie_between_two_snapshots(kill_at):
    with pytest.raises(ConfigError, match="kill_at"):
        Plan(steps=20, every=5, kill_at=kill_at)


@pytest.mark.parametrize(("steps", "every"), [(20, 5), (8, 3), (9, 2), (100, 7)])
def test_the_default_kill_lies_between_two_snapshots(steps, every):
    assert Plan(steps=steps, every=every).kill_step % every != 0
