"""Real jobs under torchrun with a CheckpointManager: killed, signalled, resized; fresh objects go on bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import flashckpt
from flashckpt.agent.start import stop_agent
from tests.conftest import environment

WORKER = Path(__file__).parent / "manager_worker.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def told(directory, event):
    """{rank: [what each rank said of this event]}."""
    found = {}
    for path in sorted(Path(directory).iterdir()):
        # The last line may be half written.
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.removeprefix("rank"))] = [line for line in lines if line["event"] == event]
    return found


def trace(directory):
    lines = ((rank, one) for rank, said in told(directory, "step").items() for one in said)
    return {(rank, one["step"]): (one["digest"], one["loss"]) for rank, one in lines}


@pytest.fixture
def other_memory_dir():
    path = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def run(torchrun, memory_dir, tmp_path):
    """run(name, ranks, layout, steps, …): a launch of the job whose ranks write to tmp_path/name."""

    def run(name, ranks, layout, steps, *arguments, memory=memory_dir, fails=False, **variables):
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        code, output = torchrun(ranks, WORKER, layout, memory, out, steps, *arguments, **variables)
        assert (code != 0) == fails, output
        return out

    return run


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("plain", 2), ("ddp", 2), ("fsdp", 2), ("tp", 2), ("pipeline", 2), ("hsdp", 4), ("fsdp-tp", 4)],
)
def test_a_killed_job_goes_on_bit_exact(layout, ranks, run, other_memory_dir):
    killed = run("killed", ranks, layout, 8, "--kill-after", "5", fails=True)
    resumed = run("resumed", ranks, layout, 8)
    assert {rank: [one["step"] for one in lines] for rank, lines in told(resumed, "resumed").items()} == {
        rank: [4] for rank in range(ranks)
    }
    assert {one["extra"]["tokens"] for lines in told(resumed, "resumed").values() for one in lines} == {40}
    whole = run("whole", ranks, layout, 8, memory=other_memory_dir)
    assert len(trace(whole)) == 8 * ranks
    assert {**trace(killed), **trace(resumed)} == trace(whole)


def test_other_numbers_of_ranks_resume(run):
    run("two", 2, "fsdp", 4)
    grown = run("four", 4, "fsdp", 8)
    resumed = told(grown, "resumed")
    assert {rank: one[0]["step"] for rank, one in resumed.items()} == dict.fromkeys(range(4), 4)
    # New ranks take rank 0's position in the data.
    assert {rank: one[0]["batches"] for rank, one in resumed.items()} == dict.fromkeys(range(4), 4)
    shrunk = run("one", 1, "fsdp", 9)
    assert told(shrunk, "resumed")[0][0]["step"] == 8


def test_all_memory_is_lost_and_the_job_goes_on_from_disk_bit_exact(run, memory_dir, other_memory_dir, tmp_path):
    disk = ("--persist-dir", str(tmp_path / "disk"))
    agents = {"FLASHCKPT_AGENT": "auto", "FLASHCKPT_NODE_ID": "a"}

    def lose_all_memory():
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, "job", 60.0, kill=True)
        for name in os.listdir(memory_dir):
            shutil.rmtree(os.path.join(memory_dir, name), ignore_errors=True)

    try:
        killed = run("killed", 2, "fsdp", 8, "--kill-after", "5", *disk, fails=True, **agents)
        lose_all_memory()
        resumed = run("resumed", 2, "fsdp", 8, *disk, **agents)
        found = {(one["step"], one["source"]) for lines in told(resumed, "resumed").values() for one in lines}
        assert found == {(4, "persist")}
        lose_all_memory()
        # On one rank: another sharding, from the same directory.
        alone = run("alone", 1, "fsdp", 9, *disk, **agents)
        assert told(alone, "resumed")[0][0]["source"] == "persist"
    finally:
        lose_all_memory()
    whole = run("whole", 2, "fsdp", 8, memory=other_memory_dir)
    assert {**trace(killed), **trace(resumed)} == trace(whole)


def test_a_checkpoint_that_does_not_fit_is_refused_by_all(run, torchrun, memory_dir, tmp_path):
    run("first", 2, "ddp", 2)
    code, output = torchrun(2, WORKER, "plain", memory_dir, tmp_path, 4)
    assert code != 0
    assert output.count("layout: 'ddp' in the checkpoint, 'plain' now") >= 1
    assert "FC-STR-003" in output


def test_a_signal_to_one_rank_stops_all_at_one_step(run):
    out = run("signalled", 2, "fsdp", 100_000, "--usr1", "1:5", "--interval", "1000")
    stopped = told(out, "stopped")
    assert {rank: [(one["step"], one["outcome"]) for one in lines] for rank, lines in stopped.items()} == {
        0: [(6, "ok")],
        1: [(6, "ok")],
    }
    again = run("again", 2, "fsdp", 7)
    assert {rank: lines[0]["step"] for rank, lines in told(again, "resumed").items()} == {0: 6, 1: 6}


def test_sigterm_to_the_launcher_leaves_a_last_snapshot(run, memory_dir, tmp_path):
    out = tmp_path / "terminated"
    out.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(WORKER), "fsdp", memory_dir, str(out), "1000000", "--interval", "1000000", "--linger"]
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not (len(list(out.iterdir())) == 2 and all(len(lines) > 3 for lines in told(out, "step").values())):
            assert time.monotonic() < deadline, log.read_text()
            assert job.poll() is None, log.read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=300)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    stopped = {rank: [one["step"] for one in lines] for rank, lines in told(out, "stopped").items()}
    assert stopped[0] == stopped[1], log.read_text()
    assert len(stopped[0]) == 1
    last = stopped[0][0]
    again = run("again", 2, "fsdp", last + 1)
    assert {rank: lines[0]["step"] for rank, lines in told(again, "resumed").items()} == {0: last, 1: last}
    before, after = trace(out), trace(again)
    assert not set(before) & set(after)
