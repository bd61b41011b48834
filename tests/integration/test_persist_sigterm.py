"""SIGTERM to a job under torchrun: its last step is on disk afterwards, and the next launch goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flashckpt
from flashckpt.agent.start import stop_agent
from tests.conftest import environment
from tests.flushes import wait_until

WORKER = Path(__file__).parent / "manager_worker.py"


def told(directory, event):
    """{rank: what each rank said of this event}."""
    found = {}
    for path in Path(directory).iterdir():
        # The last line may be half written.
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.removeprefix("rank"))] = [line for line in lines if line["event"] == event]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sigterm_to_the_launcher_brings_the_last_step_to_disk(torchrun, memory_dir, tmp_path):
    disk, out, log = tmp_path / "disk", tmp_path / "out", tmp_path / "log"
    out.mkdir()
    agents = {"FLASHCKPT_AGENT": "auto", "FLASHCKPT_NODE_ID": "a"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(WORKER), "fsdp", memory_dir, str(out), "1000000", "--interval", "1000000", "--linger"]
    command += ["--persist-dir", str(disk)]
    with log.open("w") as output:
        job = subprocess.Popen(command, env=environment(**agents), stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(
            lambda: (
                job.poll() is not None
                or (len(list(out.iterdir())) == 2 and all(len(lines) > 3 for lines in told(out, "step").values()))
            ),
            "the job to train",
            timeout=300,
        )
        assert job.poll() is None, log.read_text()
        assert not (disk / "latest").exists()
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=300)
        stopped = {rank: [one["step"] for one in lines] for rank, lines in told(out, "stopped").items()}
        assert stopped[0] == stopped[1], log.read_text()
        (last,) = stopped[0]
        wait_until(lambda: (disk / "latest").exists(), "the last step on disk")
        assert os.readlink(disk / "latest") == f"step-{last}"
        # Not a byte of memory is left of it.
        stop_agent(memory_dir, "job", 60.0, kill=True)
        for name in os.listdir(memory_dir):
            shutil.rmtree(os.path.join(memory_dir, name))
        again = tmp_path / "again"
        again.mkdir()
        arguments = ("fsdp", memory_dir, again, last + 2, "--persist-dir", disk)
        code, said = torchrun(2, WORKER, *arguments, **agents)
        assert code == 0, said
        resumed = {(one["step"], one["source"]) for lines in told(again, "resumed").values() for one in lines}
        assert resumed == {(last, "persist")}
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, "job", 60.0, kill=True)
