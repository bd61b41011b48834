"""Flush to a disk beside a plain sequential write of the same bytes; and what it takes from a training loop.

    python -m bench.bench_flush [--size 1G] [--rounds 5] [--mbps 2000] [--directory DIR] [--json FILE]

One node: this process is its trainer, with an agent and the agent's flusher as a user has them. Each round writes the
state's bytes to one file and fsyncs it, then saves, and flushes what was saved; both in turns in the same directory.
`flush` is what the flusher says it took until `latest` named the step; `asked` is what the trainer waited for it, with
the start of the flusher's process. Then a training loop that keeps all cores busy takes turns with the same loop during
a flush, without a limit and with `persist_max_mbps`. Medians; the last step is loaded by plain DCP and compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import machine
from bench.agents import JOB, agent_of
from bench.errors import BenchError
from bench.run import turn
from bench.scratch import check_room, scratch_directory
from bench.spec import StateSpec, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import flashckpt
    from bench.state import StateDict

_TENSORS = 100
_DEADLINE = 600.0
_WRITE_BYTES = 4 << 20
_GOAL = 0.7
_QUIET_SHARE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"), help="of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbps", type=float, default=2000.0, help="persist_max_mbps of the limited flush")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine, each round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    spec = StateSpec.of_size(given.size, _TENSORS)
    check_room(6 * spec.size_bytes)  # the state, its slots, and one more for the flush
    quietness = machine.Quietness()
    with _on_disk(given.directory, 4 * spec.size_bytes) as disk, scratch_directory() as memory:
        from bench.state import make_state

        bench = Bench(make_state(spec), disk, memory, given.patience)
        written = bench.throughput(given.rounds)
        slowed = {name: bench.slowdown(given.rounds, mbps) for name, mbps in (("free", None), ("limited", given.mbps))}
    result = {
        "machine": dataclasses.asdict(machine.describe()),
        "filesystem": _filesystem(given.directory),
        "others_share": quietness.others_share(),
        "state_bytes": spec.size_bytes,
        "max_mbps": given.mbps,
        "throughput": written,
        "slowdown": slowed,
    }
    print(told(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


class Bench:
    """The trainer. Samples are in seconds, except where the name says otherwise."""

    def __init__(self, state: StateDict, disk: Path, memory: Path, patience: float) -> None:
        from bench.training import Training

        self._state, self._disk, self._memory, self._patience = state, disk, memory, patience
        self._training = Training()
        self._step = 0

    def throughput(self, rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {"plain": [], "flush": [], "asked": []}
        with self._checkpointer("throughput", None) as checkpointer:
            self._flush(checkpointer)  # makes the slots, and the caches of files that the flusher imports
            for number in range(rounds):
                self._tell(f"flush: {number + 1} of {rounds}")
                for kind in turn(("plain", "flush"), number):
                    os.sync()  # nobody pays for what was written before
                    if kind == "plain":
                        samples["plain"].append(self._write_plainly())
                        continue
                    asked, flushed = self._flush(checkpointer)
                    samples["asked"].append(asked)
                    samples["flush"].append(flushed)
            self._check()
        return samples

    def slowdown(self, rounds: int, mbps: float | None) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {"alone": [], "flushing": [], "steps": []}
        name = "free" if mbps is None else "limited"
        with self._checkpointer(name, mbps) as checkpointer:
            for _ in range(20):
                self._training.step()
            self._flush(checkpointer)
            for number in range(rounds):
                self._tell(f"training during a flush ({name}): {number + 1} of {rounds}")
                handle = self._save(checkpointer)
                checkpointer.flush()
                # As many steps as the flush lasts, then as many without one: the two have the machine's same minute.
                steps, during = self._train_while(lambda handle=handle: handle.level.name != "PERSISTED")
                os.sync()
                again, alone = self._train_while(lambda steps=steps: steps > 0, steps)
                if again != steps:
                    raise BenchError(f"training: expected {steps} steps, found {again}")
                samples["flushing"].append(during)
                samples["alone"].append(alone)
                samples["steps"].append(float(steps))
        return samples

    def _train_while(self, goes_on: Callable[[], bool], most: int = sys.maxsize) -> tuple[int, float]:
        steps, began = 0, time.perf_counter()
        while steps < most and goes_on():
            self._training.step()
            steps += 1
            if time.perf_counter() - began > _DEADLINE:
                raise BenchError(f"flush: expected it to end within {_DEADLINE:g} s, found that it did not")
        return steps, time.perf_counter() - began

    @contextlib.contextmanager
    def _checkpointer(self, name: str, mbps: float | None) -> Iterator[flashckpt.Checkpointer]:
        import flashckpt

        self._out, self._node = self._disk / name, self._memory / name
        self._node.mkdir(mode=0o700)
        config = flashckpt.CheckpointConfig(
            job=JOB,
            memory_dir=str(self._node),
            node_id="node",
            agent="auto",
            persist_dir=str(self._out),
            persist_on_exit=False,
            persist_max_mbps=mbps,
            keep_latest_k=2,
            on_save_error="raise",
        )
        with flashckpt.Checkpointer(config) as checkpointer:
            yield checkpointer

    def _save(self, checkpointer: flashckpt.Checkpointer) -> flashckpt.SaveHandle:
        from bench.state import change

        self._step += 1
        change(self._state, self._step)
        handle = checkpointer.save(self._step, self._state)
        handle.wait("sealed", _DEADLINE)
        return handle

    def _flush(self, checkpointer: flashckpt.Checkpointer) -> tuple[float, float]:
        """(what the trainer waits, what the flusher says)."""
        handle = self._save(checkpointer)
        began = time.perf_counter()
        outcome = handle.wait("persisted", _DEADLINE)
        asked = time.perf_counter() - began
        if outcome != "ok":
            raise BenchError(f"flush: expected it persisted, found {outcome}: {handle.reason}")
        return asked, agent_of(self._node).flush_seconds(self._step)

    def _write_plainly(self) -> float:
        from bench.state import tensors_of

        path = self._disk / "plain"
        began = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for tensor in tensors_of(self._state):
                view = memoryview(tensor.numpy()).cast("B")
                while view:
                    view = view[os.write(fd, view[:_WRITE_BYTES]) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds

    def _check(self) -> None:
        """What the last flush wrote is the state, says plain DCP."""
        import torch
        import torch.distributed.checkpoint as dcp

        from bench.state import tensors_of

        got = {"model": {key: torch.zeros_like(value) for key, value in self._state["model"].items()}}
        dcp.load(got, checkpoint_id=self._out / "latest", no_dist=True)
        same = zip(tensors_of(got), tensors_of(self._state), strict=True)
        if not all(torch.equal(one, other) for one, other in same):
            raise BenchError(f"{self._out}/latest: expected the state that was flushed, found another one")

    def _tell(self, what: str) -> None:
        """Says it, once the machine is quiet or the patience over."""
        print(what, file=sys.stderr)
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            quietness = machine.Quietness()
            time.sleep(1.0)
            if quietness.others_share() < _QUIET_SHARE:
                return
        if self._patience:
            print(f"  the machine was not quiet within {self._patience:g} s", file=sys.stderr)


def told(result: dict[str, Any]) -> str:
    size = result["state_bytes"]
    written = result["throughput"]
    ratios = [plain / flush for plain, flush in zip(written["plain"], written["flush"], strict=True)]
    ratio = statistics.median(ratios)
    lines = [f"flush of {format_size(size)} to {result['filesystem']} (median of {len(ratios)})"]
    for name, what in (("plain", "plain write"), ("flush", "flush"), ("asked", "asked")):
        seconds = statistics.median(written[name])
        lines.append(f"  {what:<12} {seconds * 1000:9.1f} ms   {size / seconds / 1e9:.2f} GB/s")
    lines.append(
        f"  flush is {ratio:.2f} of the plain write's speed, round by round {min(ratios):.2f} to {max(ratios):.2f} "
        f"(goal: at least {_GOAL})"
    )
    for name, samples in result["slowdown"].items():
        pairs = list(zip(samples["flushing"], samples["alone"], strict=True))
        slower = statistics.median(during / alone - 1 for during, alone in pairs)
        lost = statistics.median(during - alone for during, alone in pairs) / (size / (1 << 30))
        limit = "without a limit" if name == "free" else f"persist_max_mbps={result['max_mbps']:g}"
        lines.append(
            f"training during a flush, {limit}: {slower:+.1%} for {statistics.median(samples['flushing']):.1f} s, "
            f"{lost:.2f} s lost for a GiB"
        )
    lines.append(f"others took {result['others_share']:.0%} of the processors")
    return "\n".join(lines)


@contextlib.contextmanager
def _on_disk(directory: Path, need_bytes: int) -> Iterator[Path]:
    free = shutil.disk_usage(directory).free
    if free < need_bytes:
        raise BenchError(
            f"{directory}: expected {need_bytes / 1e9:.1f} GB free, found {free / 1e9:.1f}; take another --directory"
        )
    path = Path(tempfile.mkdtemp(prefix="flashckpt-bench.", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _filesystem(directory: Path) -> str:
    """Its type: where that is tmpfs, the figures say nothing of a disk."""
    best, found = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if directory.resolve().is_relative_to(point) and len(point) >= len(best):
            best, found = point, kind
    return found


if __name__ == "__main__":
    main()
