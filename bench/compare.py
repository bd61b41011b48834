"""Every contender against flashckpt and against the limit, save by save.

The limit and flashckpt stay alive all the time. The others come one after the other, each in a fresh process: one that
is there takes turns with the two at every save and every load. So each has its own ratio to both, from the same
minute, and never more than three states and their checkpoints are in memory. All come as often as there are visits,
in rotating order.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.contenders import CONTENDERS
from bench.environments import Unavailable, prepare
from bench.errors import BenchError
from bench.process import UNTIL_REPLICATED, Worker
from bench.run import turn
from bench.scratch import check_room
from bench.wire import loopback_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.process import Answer
    from bench.run import Run
    from bench.spec import StateSpec

LIMIT, OURS = "memcpy", "flashckpt"
WITHOUT = "no saving"
_LEAST_SECONDS = 30.0  # for one command, however short a visit may be
_PROBE_PASSES = 20


@dataclass(frozen=True, slots=True)
class Exercise:
    """What each visit of a contender consists of, after its warm-up."""

    saves: int
    loads: int
    loops: int  # training loops with saves, each beside one without; 0 = no training
    interval: int  # steps from save to save in a loop
    step_seconds: float  # of forward and backward; longer than a copy of the state
    watched: int  # saves during which its memory is watched
    limit_seconds: float  # a visit that takes longer is broken off, with what there is by then


def comparing(
    run: Run, section: str, spec: StateSpec, contenders: Sequence[str], visits: int, exercise: Exercise
) -> None:
    check_room((6 + max(CONTENDERS[name].copies for name in contenders)) * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    pythons = _prepare(run, section, contenders)
    with (
        Worker(LIMIT, spec, run.directory / "limit") as limit,
        Worker(OURS, spec, run.directory / "ours") as ours,
    ):
        companions = [_Companion(limit, LIMIT), _Companion(ours, OURS)]
        for companion in companions:
            for _ in range(CONTENDERS[companion.name].warm_up):
                companion.save()
            companion.expect()
            companion.worker.load()
        passes = _passes(limit, exercise.step_seconds) if exercise.loops else 0
        for number in range(visits):
            for name in turn([name for name in contenders if name in pythons], number):
                run.tell(f"{section}: {name}, visit {number + 1} of {visits}")
                if (section, name) in run.samples.broken_off:
                    continue
                visit = _Visit(run, section, name, companions, exercise, passes, number)
                visit.make(spec, pythons[name])
    run.clear()


def _prepare(run: Run, section: str, contenders: Sequence[str]) -> dict[str, Path | None]:
    """Which Python each runs on; who has none is left out, with the reason."""
    pythons: dict[str, Path | None] = {}
    for name in contenders:
        environment = CONTENDERS[name].environment
        if environment is None:
            pythons[name] = None
            continue
        prepared = prepare(environment, run.note)
        if isinstance(prepared, Unavailable):
            run.samples.left_out[section, name] = prepared.reason
        else:
            pythons[name] = prepared.python
    return pythons


class _Companion:
    """A worker that lives as long as the section, and the steps it has saved."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name
        self._step = 0

    def save(self) -> Answer:
        self._step += 1
        return self.worker.save(self._step)

    def expect(self) -> None:
        self.worker.expect()


class _Visit:
    """One process of one contender, from its first save to its end."""

    def __init__(
        self,
        run: Run,
        section: str,
        name: str,
        companions: list[_Companion],
        exercise: Exercise,
        passes: int,
        number: int,
    ) -> None:
        self._run, self._section, self._name = run, section, name
        self._companions, self._exercise, self._passes = companions, exercise, passes
        self._number = number
        self._deadline = time.monotonic() + exercise.limit_seconds
        self._medians: dict[tuple[str, str], list[float]] = {}

    def make(self, spec: StateSpec, python: Path | None) -> None:
        directory = self._run.directory / self._name
        try:
            # One that hangs costs no more than one that is slow.
            limit = max(_LEAST_SECONDS, self._exercise.limit_seconds)
            with Worker(self._name, spec, directory, python=python, limit=limit) as worker:
                self._exercise_all(worker)
        except _OverLimitError:
            told = f"a visit took longer than {self._exercise.limit_seconds:.0f} s"
            self._run.samples.broken_off[self._section, self._name] = told
        except BenchError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            self._run.samples.broken_off[self._section, self._name] = f"failed: {lines[-1].strip()[:160]}"
        finally:
            self._take_ratios()
            self._run.clear_one(directory)

    def _exercise_all(self, worker: Worker) -> None:
        own = _Companion(worker, self._name)
        before = worker.footprint_bytes()
        first = own.save()
        self._add("first save", first.seconds)
        self._add("first safe", first.safe)
        for _ in range(CONTENDERS[self._name].warm_up - 1):
            self._check_time()
            own.save()
        together = [*self._companions, own]
        for number in range(self._exercise.saves):
            for one in turn(together, number):
                self._check_time()
                before_save = loopback_bytes()
                answer = one.save()
                self._add("save", answer.seconds, one)
                self._add("safe", answer.safe, one)
                if UNTIL_REPLICATED in answer.details:
                    self._add("replicated", answer.seconds + answer.details[UNTIL_REPLICATED], one)
                if one is own:
                    self._run.samples.add(self._section, self._name, "on the wire", loopback_bytes() - before_save)
        for one in together:
            one.expect()
        self._check_time()
        worker.load()
        for number in range(self._exercise.loads):
            for one in turn(together, number):
                self._check_time()
                self._add("load", one.worker.load().seconds, one)
        step = 1000
        if self._number == 0:
            self._check_time()
            self._run.samples.isolated[self._section, self._name] = worker.is_isolated(step)
        for number in range(self._exercise.watched):
            self._check_time()
            peak = worker.save_watching_footprint(step + 1 + number)
            self._run.samples.add(self._section, self._name, "peak memory", max(0, peak - before))
        self._train(worker, step + 100)

    def _train(self, worker: Worker, step: int) -> None:
        """A loop without saves before each one with saves: the machine is the same for both."""
        steps = 2 * self._exercise.interval
        for number in range(self._exercise.loops):
            for interval in turn((0, self._exercise.interval), number + self._number):
                self._check_time()
                answer = worker.train(step, steps, interval, self._passes)
                step += steps
                if interval:
                    self._run.samples.add(self._section, self._name, "loop", answer.seconds)
                    for seconds in answer.blocked:
                        self._run.samples.add(self._section, self._name, "loop: blocked", seconds)
                else:
                    self._run.samples.add(self._section, self._name, "loop without saves", answer.seconds)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _OverLimitError

    def _add(self, measure: str, seconds: float, of: _Companion | None = None) -> None:
        name = self._name if of is None else of.name
        is_companion = of is not None and of in self._companions
        self._run.samples.add(self._section, name, measure, seconds)
        self._medians.setdefault((measure, f"{name}, beside it" if is_companion else "own"), []).append(seconds)

    def _take_ratios(self) -> None:
        for measure in ("save", "safe", "load"):
            own = self._medians.get((measure, "own"))
            for other in (LIMIT, OURS):
                beside = self._medians.get((measure, f"{other}, beside it"))
                if own and beside:
                    ratio = statistics.median(own) / statistics.median(beside)
                    self._run.samples.add_ratio(self._section, self._name, measure, other, ratio)


class _OverLimitError(Exception):
    pass


def _passes(worker: Worker, seconds: float) -> int:
    """So many passes of the small network take as long as a step is to take."""
    worker.train(1, 1, 0, _PROBE_PASSES)  # the first ones are slow
    return max(1, round(seconds / (worker.train(1, 1, 0, _PROBE_PASSES).seconds / _PROBE_PASSES)))
