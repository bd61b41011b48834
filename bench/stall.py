"""What a save costs a training loop whose model is what is saved: bench/bench_stall.py as a section of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError

if TYPE_CHECKING:
    from bench.run import Run

WITHOUT, OVERLAP, SYNC, RECHECK = "no saves", "overlap on", "overlap off", "overlap, recheck"
EVERY = 5  # steps from save to save
# Of the samples there: what it is called here. All are seconds.
MEASURES = {
    "seconds": "loop",
    "blocked": "loop: blocked",
    "proof": "loop: proof",
    "staged": "loop: staged",
    "passes": "loop: passes",
}
_ROOT = Path(__file__).resolve().parent.parent
_DEADLINE = 1200.0
_END_SECONDS = 30.0
_LAST_LINES = 20


def stalling(run: Run, section: str, size_bytes: int, rounds: int, batch: int) -> None:
    """In a process of its own: this one must not import torch."""
    run.tell(f"{section}: {rounds} rounds")
    answer, log = run.directory / "stall.json", run.directory / "stall.log"
    command = [sys.executable, "-m", "bench.bench_stall", f"--size={size_bytes}", f"--rounds={rounds}"]
    command += [f"--every={EVERY}", f"--batch={batch}", "--wait=0", f"--json={answer}"]
    # A setting of the shell would make this another measurement than the one that is reported.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHCKPT_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{section}: expected an end within {_DEADLINE:.0f} s, found none") from None
        finally:
            _end(process)
    if status:
        said = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise BenchError("\n".join([*said, f"{section}: expected it to end well, found status {status}"]))
    _take(run, section, json.loads(answer.read_text()))
    run.clear()


def _take(run: Run, section: str, told: dict[str, Any]) -> None:
    run.samples.state_bytes[section] = told["state_bytes"]
    run.samples.saves[section] = 1  # in a figure of the loop
    for name, blocks in told["samples"].items():
        for measure, title in MEASURES.items():
            for value in blocks[measure]:
                run.samples.add(section, name, title, value)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first: it has a directory on tmpfs and agents of its own to clear away."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
