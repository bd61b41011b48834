"""What a training loop loses to checkpoints: the same loop without saves, with saves, and with replicated saves.

The loop keeps every core busy, so that whatever else runs is taken from it; the agents of both nodes run on this
machine, which does what a node of a cluster does: it sends one replica and receives another.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.process import Worker
from bench.run import turn
from bench.scratch import check_room

if TYPE_CHECKING:
    from bench.run import Run
    from bench.spec import StateSpec

WITHOUT = "no saving"
SAVING = ("flashckpt-off", "flashckpt-replicated")
WARM_UP = 4
_COPIES = 3 + 6
_PROBE_STEPS = 20


@dataclass(frozen=True, slots=True)
class Loop:
    """A turn of it. Each turn begins with a save, and has `saves` of them at equal distances."""

    interval_seconds: float  # from save to save, where nothing slows it down; as many steps as that takes
    saves: int


def slowing_down(run: Run, section: str, spec: StateSpec, loop: Loop, rounds: int) -> None:
    check_room(_COPIES * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, spec, run.directory / name)) for name in SAVING}
        steps = dict.fromkeys(SAVING, 0)
        for name, worker in workers.items():
            for _ in range(WARM_UP):
                steps[name] += 1
                worker.save(steps[name])
        interval = _steps_in(loop.interval_seconds, workers[SAVING[0]])
        run.samples.saves[section] = loop.saves
        for number in range(rounds):
            run.tell(f"{section}: {number + 1} of {rounds}")
            for name in turn((WITHOUT, *SAVING), number):
                worker = workers.get(name, workers[SAVING[0]])
                first = steps[worker.contender] + 1
                answer = worker.train(first, loop.saves * interval, 0 if name == WITHOUT else interval)
                steps[worker.contender] += loop.saves * interval
                run.samples.add(section, name, "loop", answer.seconds)
                if name != WITHOUT:
                    run.samples.add(section, name, "loop: in save()", answer.details["in save()"])
    run.clear()


def _steps_in(seconds: float, worker: Worker) -> int:
    worker.train(1, _PROBE_STEPS, 0)  # the first ones are slow
    return max(1, round(seconds / (worker.train(1, _PROBE_STEPS, 0).seconds / _PROBE_STEPS)))
