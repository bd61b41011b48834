"""What saving costs a training loop: how long its thread is held, and how much longer its steps take.

    python -m bench.bench_stall [--size 1G] [--rounds 12] [--every 5] [--json FILE] [--text FILE]

One process trains a real model (linear layers, AdamW) whose parameters and moments make up that size. Blocks of a few
steps take turns, in rotating order: without a save, with one that is overlapped, with one that is not, with one that is
overlapped and proved by checksums (`verify="recheck"`). Each block of the latter three begins with a save. Every
slowdown is a block against the block without a save of the same round. With `--sweep` the overlapped copy is measured
with other numbers of threads and priorities as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import flashckpt
from bench import machine
from bench.errors import BenchError
from bench.run import turn
from bench.scratch import check_room, scratch_directory
from bench.spec import format_size, parse_size
from bench.stall import OVERLAP, RECHECK, SYNC, WITHOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 1024
_COPIES = 1 + 2 + 2 + 2  # gradients and activations are less than a state; two slots for each manager
_WARM_UP = 2  # blocks of each kind
_DEADLINE = 60.0


@dataclass(slots=True)
class Blocks:
    """What was measured of one kind of block."""

    seconds: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # of the training thread: in save() and at the gate
    in_save: list[float] = field(default_factory=list)  # the first part of it
    staged: list[float] = field(default_factory=list)  # from the call until tensors may change, wherever it ran
    proof: list[float] = field(default_factory=list)  # of blocked: that nothing changed while it was copied
    passes: list[float] = field(default_factory=list)  # forward and backward of the step behind the save


class Loop:
    """A model that trains. Its forward and backward pass take longer than its state takes to copy."""

    def __init__(self, size_bytes: int, batch: int) -> None:
        torch.manual_seed(1)
        # Parameters and two moments, four bytes each.
        layers = max(1, round(size_bytes / (3 * 4 * (_WIDTH * _WIDTH + _WIDTH))))
        parts = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)]
        self.model = torch.nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._batch = torch.randn(batch, _WIDTH)
        self.pass_seconds = 0.0  # forward and backward of the last step

    @property
    def state_bytes(self) -> int:
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def step(self) -> None:
        began = time.perf_counter()
        loss = self.model(self._batch).square().mean()
        loss.backward()
        self.pass_seconds = time.perf_counter() - began
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class Saver:
    """A manager in a directory of its own, used in its own blocks only."""

    def __init__(
        self, loop: Loop, directory: Path, *, overlap: bool, recheck: bool = False, threads: int | None = None
    ) -> None:
        directory.mkdir(mode=0o700)
        self.config = flashckpt.CheckpointConfig(
            job="bench",
            memory_dir=str(directory),
            overlap=overlap,
            verify="recheck" if recheck else True,
            threads=threads,
            enable_first_step_checkpoint=False,
            agent_linger=60.0,
        )
        self.manager = flashckpt.CheckpointManager(self.config, model=loop.model, optimizer=loop.optimizer)
        self._step = 0

    def save(self) -> flashckpt.SaveHandle:
        self._step += 1
        handle = self.manager.save(self._step)
        if handle is None:
            raise BenchError(f"save of step {self._step}: expected a handle, found none")
        return handle

    def close(self) -> None:
        self.manager.close()


def run_block(loop: Loop, saver: Saver | None, steps: int, into: Blocks | None) -> None:
    """`steps` steps, behind a save where there is a saver. What the save did in the background ends within."""
    began = time.perf_counter()
    called = time.time()
    handle = saver.save() if saver is not None else None
    in_save = time.perf_counter() - began
    loop.step()
    passed = loop.pass_seconds  # the one that the copy has to hide behind
    for _ in range(steps - 1):
        loop.step()
    seconds = time.perf_counter() - began
    if handle is not None and handle.wait("sealed", _DEADLINE) is not flashckpt.Outcome.OK:
        raise BenchError(f"save: expected it sealed, found {handle!r}")
    if into is None:
        return
    into.seconds.append(seconds)
    into.passes.append(passed)
    if handle is not None:
        into.blocked.append(handle.blocked_seconds)
        into.proof.append(handle.proof_seconds)
        into.in_save.append(in_save)
        into.staged.append(handle.reached[flashckpt.Level.STAGED] - called)


def measure(loop: Loop, savers: dict[str, Saver], rounds: int, every: int) -> dict[str, Blocks]:
    found = {name: Blocks() for name in (WITHOUT, *savers)}
    for _ in range(_WARM_UP):
        for name in found:
            run_block(loop, savers.get(name), every, None)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name in turn(tuple(found), number):
            run_block(loop, savers.get(name), every, found[name])
    return found


# --- what is told


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def slowdowns(with_saves: Sequence[float], without: Sequence[float]) -> list[float]:
    """Round by round: how much longer a block took than the one without saves."""
    return [a / b - 1.0 for a, b in zip(with_saves, without, strict=True)]


def rows(found: dict[str, Blocks], every: int) -> list[dict[str, Any]]:
    base = found[WITHOUT].seconds
    told = []
    for name, blocks in found.items():
        slower = slowdowns(blocks.seconds, base)
        row: dict[str, Any] = {
            "name": name,
            "step_seconds": statistics.median(blocks.seconds) / every,
            "slowdown_mean": statistics.fmean(slower),
            "slowdown_median": statistics.median(slower),
        }
        if blocks.blocked:
            row |= {
                "blocked_median": statistics.median(blocks.blocked),
                "blocked_p99": quantile(blocks.blocked, 0.99),
                "in_save_median": statistics.median(blocks.in_save),
                "proof_median": statistics.median(blocks.proof),
                "staged_median": statistics.median(blocks.staged),
            }
        told.append(row)
    return told


def table(told: Sequence[dict[str, Any]]) -> str:
    titles = [("step", 9), *((title, 10) for title in ("blocked", "p99", "in save()", "proof", "staged"))]
    head = f"{'':<22}" + "".join(f" {title:>{width}}" for title, width in [*titles, ("slower", 8), ("median", 8)])
    lines = [head]
    for row in told:
        line = f"{row['name']:<22} {row['step_seconds'] * 1e3:6.0f} ms"
        if "blocked_median" in row:
            times = ("blocked_median", "blocked_p99", "in_save_median", "proof_median", "staged_median")
            line += "".join(f" {row[name] * 1e3:7.2f} ms" for name in times)
            line += f" {row['slowdown_mean']:8.1%} {row['slowdown_median']:8.1%}"
        lines.append(line)
    return "\n".join(lines)


def wait_until_quiet(limit: float) -> float:
    """Waits until other processes take less than a tenth of the machine; the share they take then."""
    until = time.monotonic() + limit
    while True:
        quietness = machine.Quietness()
        time.sleep(2.0)
        share = quietness.others_share()
        if share < 0.1 or time.monotonic() > until:
            return share


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"), help="of the rank's state")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="steps from save to save")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch: more make a step longer")
    parser.add_argument("--sweep", action="store_true", help="also with one thread, and with two")
    parser.add_argument(
        "--wait", type=float, default=120.0, help="seconds to wait for a machine that others leave alone"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    check_room(_COPIES * given.size + 2 * given.size * (2 if given.sweep else 0))
    others = wait_until_quiet(given.wait)
    if others >= 0.1:
        print(f"other processes take {others:.0%} of the machine: figures are too high", file=sys.stderr)
    loop = Loop(given.size, given.batch)
    loop.step()  # makes the moments
    quietness = machine.Quietness()
    savers: dict[str, Saver] = {}
    with scratch_directory() as directory:
        try:
            savers[OVERLAP] = Saver(loop, directory / "on", overlap=True)
            savers[SYNC] = Saver(loop, directory / "off", overlap=False)
            savers[RECHECK] = Saver(loop, directory / "recheck", overlap=True, recheck=True)
            for threads in (1, 2) if given.sweep else ():
                name = f"{OVERLAP}, {threads} thread{'s' * (threads > 1)}"
                savers[name] = Saver(loop, directory / f"threads{threads}", overlap=True, threads=threads)
            found = measure(loop, savers, given.rounds, given.every)
        finally:
            for saver in savers.values():
                saver.close()
    told = rows(found, given.every)
    title = (
        f"{format_size(loop.state_bytes)} of parameters and moments, saved every {given.every} steps, {given.rounds} "
        f"rounds; forward and backward {loop.pass_seconds * 1e3:.0f} ms; "
        f"other processes used {quietness.others_share():.0%} of the CPU time"
    )
    text = f"{title}\n\n{table(told)}\n"
    print(text, end="")
    if given.text is not None:
        given.text.write_text(text)
    if given.json is not None:
        result = {
            "machine": dataclasses.asdict(machine.describe()),
            "state_bytes": loop.state_bytes,
            "every": given.every,
            "others_share": quietness.others_share(),
            "rows": told,
            "samples": {name: dataclasses.asdict(blocks) for name, blocks in found.items()},
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
