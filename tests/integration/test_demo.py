"""The demo as a user runs it, and its clean-up."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flashckpt.demo.proof import Facts, find_problems
from flashckpt.demo.run import Run, Said, parse
from flashckpt.demo.scenario import Plan
from flashckpt.errors import ConfigError
from flashckpt.testing import processes

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 400  # seconds; a machine under load is no failure


@pytest.fixture
def parent():
    directory = Path("/dev/shm") / f"flashckpt-test-demo-{os.getpid()}-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def start(parent, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "flashckpt.cli", "demo", "--memory-dir", str(parent / "m"), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def left_behind(parent, pid):
    """Files and processes that a demo with this pid left: each process of it names the directory."""
    files = [*parent.iterdir(), *Path(tempfile.gettempdir()).glob(f"flashckpt-cluster-{pid}-*")]
    return [*files, *processes_of(parent)]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_a_job_that_lost_a_node_equals_one_that_did_not(parent):
    # Many steps after the loss: the ranks go on until it is noticed that it is time for it.
    with start(parent, "--nodes", "3", "--lose", "1", "--steps", "40", "--every", "4", "--lose-at", "6") as process:
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output + errors
    assert "\x1b" not in output
    lost = re.search(r"node1 is lost after step (\d+): 2 processes and [\d.]+ MiB of memory gone", output)
    assert lost, output
    fetched = re.search(r"node3: step (\d+) fetched from other nodes in", output)
    assert fetched, output
    step = int(fetched[1])
    assert step in range(4, int(lost[1]) + 1, 4)
    assert len(re.findall(rf"node[02]: step {step} from its own memory in", output)) == 2
    same = rf"^IDENTICAL: a node lost with its memory after step {lost[1]}, resumed from step {step}\b"
    assert re.search(same, output, re.M), output
    assert "NOT IDENTICAL" not in output
    assert left_behind(parent, process.pid) == []


def processes_of(parent):
    """The demo itself, the ranks and the agents: each is told a directory below `parent`."""
    return [seen for seen in processes.look() if seen.names(str(parent))]


def has_ranks(parent):
    return len(processes_of(parent)) == 3  # the reference: two ranks, and no agents


def has_agents(parent):
    return sum(b"flashckpt.agent" in seen.arguments for seen in processes_of(parent)) == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(("number", "is_time"), [(signal.SIGINT, has_ranks), (signal.SIGTERM, has_agents)])
def test_an_interrupted_demo_leaves_nothing_behind(parent, number, is_time):
    with start(parent, "--nodes", "2", "--lose", "1", "--steps", "12", "--every", "4", "--lose-at", "6") as process:
        while not is_time(parent):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert left_behind(parent, process.pid) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rank 2: step 7 loss 3.25", Said("step", 2, 0.0, step=7, loss="3.25")),
        ("rank 0: resumed step 5 from peer in 0.125 s", Said("resumed", 0, 0.0, step=5, source="peer", seconds=0.125)),
        ("rank 1: weights 00ff", Said("weights", 1, 0.0, digest="00ff")),
        ("[rank1]: Traceback (most recent call last):", None),
        ("rank 1: step 7 loss", None),
    ],
)
def test_what_a_rank_says_is_understood(line, expected):
    assert parse(line, 0.0) == expected


STEPS, EVERY, WORLD = 6, 2, 2
FACTS = Facts(lost_rank=1, promised_step=2, last_record_step=6)
WHOLE = {step: repr(1 / step) for step in range(1, STEPS + 1)}


def told(losses, loaded=None, digest="d", world=WORLD, sources=("memory", "peer")):
    """A run as its ranks would tell it."""
    run = Run(world)
    for rank in range(world):
        if loaded is not None:
            run.said.append(Said("resumed", rank, 0.0, step=loaded, source=sources[rank]))
        run.said += [Said("step", rank, 0.0, step=step, loss=loss) for step, loss in losses.items()]
        if digest:
            run.said.append(Said("weights", rank, 0.0, digest=f"{digest}{rank}"))
    return run


def some(first, last, **changed):
    return {step: changed.get(f"step{step}", WHOLE[step]) for step in range(first, last + 1)}


def problems(broken=None, resumed=None, facts=FACTS, whole=None):
    broken = broken or told(some(1, 3), digest="")
    resumed = resumed or told(some(3, 6), loaded=2)
    return find_problems(STEPS, EVERY, whole or told(WHOLE), broken, resumed, facts)


def test_equal_runs_have_no_problems():
    assert problems() == []


def test_every_difference_is_found():
    differing = repr(1 / 3 + 1e-16)
    assert differing != WHOLE[3]
    cases = [
        ({"resumed": told(some(3, 6, step3=differing), loaded=2)}, f"step 3 after the resume: loss {differing}"),
        ({"broken": told(some(1, 3, step3="0.0"), digest="")}, "step 3 before the loss: loss 0.0"),
        ({"resumed": told(some(3, 6), loaded=2, digest="e")}, "final weights e0, expected d0"),
        ({"resumed": told(some(3, 6), loaded=2, digest="")}, "final weights none"),
        ({"resumed": told(WHOLE)}, "found nothing to resume from"),
        ({"resumed": told(some(2, 6), loaded=1)}, "resumed from step 1, expected 2"),
        ({"resumed": told(some(4, 6), loaded=2)}, "after the resume from step 2 came steps [4, 5, 6]"),
        ({"resumed": told(some(3, 6), loaded=2, sources=("peer", "peer"))}, "resumed from peer, expected memory"),
        ({"resumed": told(some(3, 6), loaded=2, sources=("memory",) * 2)}, "resumed from memory, expected peer"),
        ({"facts": Facts(1, 2, 4)}, "replicated in the end: step 4, expected 6"),
        ({"whole": told(some(1, 5))}, "rank 0 told of steps [1, 2, 3, 4, 5], expected 1 to 6"),
    ]
    for changed, expected in cases:
        assert any(expected in problem for problem in problems(**changed)), (expected, problems(**changed))


def test_ranks_that_went_on_from_different_steps_are_found():
    resumed = told(some(3, 6), loaded=2)
    apart = told(some(4, 6), loaded=3)
    resumed.said = [one for one in resumed.said if one.rank == 0] + [one for one in apart.said if one.rank == 1]
    assert "ranks resumed from different steps: [2, 3]" in problems(resumed=resumed)


@pytest.mark.parametrize("lose_at", [1, 5, 10, 20, 21])
def test_the_loss_has_to_lie_between_two_checkpoints(lose_at):
    with pytest.raises(ConfigError, match="lose_at"):
        Plan(steps=20, every=5, lose_at=lose_at)


@pytest.mark.parametrize(("steps", "every"), [(30, 5), (8, 3), (9, 2), (100, 7)])
def test_the_default_loss_lies_between_two_checkpoints(steps, every):
    assert Plan(steps=steps, every=every).loss_step % every != 0


def test_the_node_to_lose_has_to_exist():
    with pytest.raises(ConfigError, match="lose: expected a node from 0 to 2, found 3"):
        Plan(nodes=3, lose=3)
