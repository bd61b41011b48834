"""Real workers: what they save comes back, a wrong load ends the run, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.compare import Exercise, comparing
from bench.contenders import CONTENDERS, About, Kind
from bench.environments import Ready, cache_directory, prepare
from bench.errors import BenchError
from bench.machine import Quietness
from bench.process import Worker
from bench.replicate import replicating, watched_agents
from bench.run import Run
from bench.samples import Samples
from bench.scratch import TMPFS, check_room, scratch_directory
from bench.sections import QUICK_ONES
from bench.slowdown import Loop, slowing_down
from bench.spec import StateSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = StateSpec(8, 1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_brings_back_what_it_saved(name: str) -> None:
    python = _python_of(name)
    with scratch_directory() as directory, Worker(name, SPEC, directory / "own", python=python) as worker:
        for step in (1, 2, 3):
            answer = worker.save(step)
            assert 0 < answer.seconds <= answer.safe
        worker.expect()
        assert worker.load().seconds > 0
        worker.expect("00000000/3")
        with pytest.raises(BenchError, match="expected a state with digest 00000000/3"):
            worker.load()
        # On a CPU this one hands the tensors over as they are.
        assert worker.is_isolated(4) is (name != "nvrx-persistent")
        loop = worker.train(5, 4, 2, 3)
        assert len(loop.blocked) == 2
        assert 0 < sum(loop.blocked) < loop.seconds


def _python_of(name: str) -> Path | None:
    """Tests install nothing: what `make bench` has installed is tested too."""
    environment = CONTENDERS[name].environment
    if environment is None:
        return None
    if not (cache_directory() / environment / "installed").is_file():
        pytest.skip(f"the environment of {environment} has not been made by `make bench`")
    prepared = prepare(environment)
    assert isinstance(prepared, Ready)
    return prepared.python


@pytest.mark.slow
def test_a_contender_that_fails_or_takes_too_long_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = Samples()
    broken = About("bench.contenders.no_such_module:Nobody", Kind.SYNCHRONOUS, "broken")
    monkeypatch.setitem(CONTENDERS, "broken", broken)
    with scratch_directory() as directory:
        run = Run(directory, samples, Quietness(), lambda _: None)
        comparing(run, "compare", SPEC, ["broken", "torch.save"], 1, Exercise(2, 1, 1, 2, 0.01, 1, 120.0))
        comparing(run, "small", SPEC, ["torch.save"], 1, Exercise(2, 1, 1, 2, 0.01, 1, 0.0))
        assert not list(directory.iterdir())
    assert "failed: " in samples.broken_off["compare", "broken"]
    assert samples.isolated["compare", "torch.save"] is True
    for measure in ("first save", "save", "safe", "load", "loop", "loop: blocked"):
        assert samples.get("compare", "torch.save", measure).best > 0
    assert ("compare", "torch.save", "load", "flashckpt") in samples.ratios
    assert samples.broken_off["small", "torch.save"] == "a visit took longer than 0 s"


def test_memory_of_a_staged_copy_is_seen() -> None:
    spec = StateSpec(16, 4 << 20)
    with scratch_directory() as directory, Worker("dcp-async", spec, directory / "own") as worker:
        assert worker.save(1, watch=True).anonymous_growth_bytes > spec.size_bytes * 0.9


def test_a_worker_that_dies_is_named() -> None:
    with scratch_directory() as directory, Worker("dcp", SPEC, directory / "own") as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match=r"dcp: ended during .* with status -9"):
            worker.save(1)


@pytest.mark.alone
def test_a_killed_worker_leaves_no_semaphores() -> None:
    """A helper of multiprocessing removes them, if it is let live that long."""
    before = set(TMPFS.glob("sem.mp-*"))
    with scratch_directory() as directory:
        worker = Worker("dcp-async-process", SPEC, directory / "own")
        try:
            worker.save(1)
            made = set(TMPFS.glob("sem.mp-*")) - before
        finally:
            worker.kill()
        assert not [path for path in made if path.exists()]


def test_too_large_a_state_is_refused_before_it_starts() -> None:
    with pytest.raises(BenchError, match="take a smaller --size"):
        check_room(1 << 60)


@pytest.mark.slow
def test_sections_of_replication_give_every_figure_and_end_their_agents() -> None:
    samples = Samples()
    told: list[str] = []
    spec = StateSpec(8, 1 << 18)
    with scratch_directory() as directory:
        run = Run(directory, samples, Quietness(), told.append)
        replicating(run, "replicate", spec, 2)
        slowing_down(run, "slowdown", spec, Loop(interval_seconds=0.1, saves=2), 2)
        watched_agents(run, "memory", spec)
        assert not list(directory.iterdir())
    assert len(told) == 5
    found = {(section, contender, measure): series.values for section, contender, measure, series in samples}
    both = ("agent that sends", "agent that receives")
    for contender in ("flashckpt-replicated", "socket", "socket-tls"):
        assert all(0 < seconds < 60 for seconds in found["replicate", contender, "replicate"])
    # The push is a part of the way from sealed to replicated; it may have begun when save() returns, where that way's
    # clock starts.
    measures = (found["replicate", "flashckpt-replicated", name] for name in ("save", "replicate", "push"))
    for in_save, whole, push in zip(*measures, strict=True):
        assert 0 < push <= in_save + whole
    for agent in both:
        assert len(found["replicate", agent, "cpu: replicate"]) == 2
        assert all(10 << 20 < peak < 1 << 30 for peak in found["memory", agent, "replication, own memory"])
    for contender in ("no saving", "flashckpt-off", "flashckpt-replicated"):
        assert len(found["slowdown", contender, "loop"]) == 2
    for contender in ("flashckpt-off", "flashckpt-replicated"):
        in_save, loop = (found["slowdown", contender, name] for name in ("loop: in save()", "loop"))
        assert all(0 < a < b for a, b in zip(in_save, loop, strict=True))
    assert not [pid for pid in _agents() if str(directory) in _command(pid)]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_run_measures_compares_and_writes_everything(tmp_path: Path) -> None:
    """The whole harness, small: on a quiet machine it takes a minute."""
    page, result, text, pictures = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.txt", tmp_path / "pictures"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--html", page, "--json", result, "--text", text, "--png", pictures],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(result.read_text())
    measured = {(one["section"], one["contender"]) for one in told["samples"]}
    for section in ("compare", "small"):
        for contender in ("memcpy", "flashckpt", *QUICK_ONES):
            assert (section, contender) in measured
    assert ("replicate", "flashckpt-replicated") in measured
    assert {one["axis"] for one in told["growth"]} == {"tensors", "bytes", "ranks", "nodes"}
    assert not told["left_out"]
    assert not told["broken_off"]
    assert all(one["value"] for one in told["isolated"])
    assert "flashckpt against the best of the others" in page.read_text()
    assert "Growth: a straight line" in text.read_text()
    assert (pictures / "comparison.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(number: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "bench", "--size", "8M", "--only", "steady", "--rounds", "100000", "--wait", "0"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(TMPFS.glob(f"flashckpt-bench.{run.pid}.*/dcp/step-*")):
            assert run.poll() is None, f"ended early with {run.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        assert len(children) == 4
        run.send_signal(number)
        run.wait(timeout=60)
    finally:
        run.kill()
        run.wait()
    if number != signal.SIGKILL:
        assert not list(TMPFS.glob(f"flashckpt-bench.{run.pid}.*"))
    # Those of a run that was killed end what they are at: they may write until then.
    deadline = time.monotonic() + 60
    while any(_is_running(pid) for pid in children):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    with scratch_directory():
        pass  # the next run cleans up after it
    assert not list(TMPFS.glob(f"flashckpt-bench.{run.pid}.*"))


def _agents() -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if "flashckpt.agent" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_running(pid: int) -> bool:
    try:
        return "bench.worker" in Path(f"/proc/{pid}/cmdline").read_text() and os.path.exists(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return False
