"""The sections of a run: which contenders take turns, with which state, and what is written down.

A section starts its workers, lets them take turns round by round, and ends them. What is compared with each other
comes from one section.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.process import Worker
from bench.replicate import replicating, watched_agents
from bench.run import Section, turn
from bench.scratch import check_room
from bench.slowdown import Loop, slowing_down
from bench.spec import StateSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.run import Run

# Both of flashckpt's slots are faulted and mapped after two saves; the others warm up as long.
WARM_UP = 2

# Copies of the state that a contender needs at most: its tensors, what it stages, what it keeps.
_COPIES = {"memcpy": 3, "memcpy-tensors": 2, "dcp-async": 4, "flashckpt-replicated": 6}
_USUAL_COPIES = 3

# Measured for comparison, each against flashckpt in a section of its own.
OTHERS = ("dcp-tuned", "dcp-async", "torch.save")
# On one node, without an agent, on two nodes: what the agent adds to a save.
ALL_OURS = ("flashckpt", "flashckpt-off", "flashckpt-replicated")
WATCHED = ("flashckpt", "dcp", "dcp-async", "torch.save")


@dataclass(frozen=True, slots=True)
class Options:
    size_bytes: int
    rounds: int
    first_rounds: int  # rounds of fresh processes, which are slow to start
    small_tensors: int
    loop: Loop

    @property
    def large(self) -> StateSpec:
        return StateSpec.of_size(self.size_bytes, 100)

    @property
    def small(self) -> StateSpec:
        return StateSpec(self.small_tensors, 4096)

    @property
    def medium(self) -> StateSpec:
        return StateSpec.of_size(64 << 20, 100)

    @property
    def tiny(self) -> StateSpec:
        return StateSpec(4, 4096)

    @property
    def trained(self) -> StateSpec:
        """What a training loop saves: a quarter, since it saves often."""
        return StateSpec.of_size(self.size_bytes // 4, 100)

    @property
    def planning(self) -> StateSpec:
        """So few bytes that the copy itself does not count: what is left is the time of Python."""
        return StateSpec(2000, 256)


def plan_sections(options: Options) -> list[Section]:
    """All sections of a complete run."""

    def turns(name: str, spec: StateSpec, contenders: Sequence[str], rounds: int) -> Section:
        return Section(name, 2 * rounds, lambda run: taking_turns(run, name, spec, contenders, rounds))

    large, rounds, fresh = options.large, options.rounds, options.first_rounds

    def medium(run: Run) -> None:
        replicating(run, "replicate 64 MiB", options.medium, 2 * rounds)

    replication = [
        turns("agent", large, ALL_OURS, rounds),
        turns("agent, tiny state", options.tiny, ALL_OURS, 4 * rounds),
        Section("replicate", rounds, lambda run: replicating(run, "replicate", large, rounds)),
        Section("replicate 64 MiB", 2 * rounds, medium),
        Section("slowdown", rounds, lambda run: slowing_down(run, "slowdown", options.trained, options.loop, rounds)),
    ]

    def memory(run: Run) -> None:
        watched(run, "memory", large, WATCHED)
        watched_agents(run, "memory", large)

    in_first = ("flashckpt", "flashckpt-prewarmed", "dcp")
    return [
        turns("steady", large, ("memcpy", "memcpy-tensors", "flashckpt", "dcp"), rounds),
        # dcp takes ten seconds for each of these: fewer rounds do, where the ratio is that far from its bar.
        turns("small", options.small, ("flashckpt", "dcp"), max(fresh, rounds // 3)),
        turns("planning", options.planning, ("flashckpt", "dcp"), 2 * rounds),
        Section("first", 3 * fresh, lambda run: in_fresh_processes(run, "first", large, in_first, fresh)),
        *(turns(f"versus {other}", large, ("flashckpt", other), fresh) for other in OTHERS),
        *replication,
        Section("memory", len(WATCHED) + 1, memory),
    ]


def taking_turns(run: Run, section: str, spec: StateSpec, contenders: Sequence[str], rounds: int) -> None:
    """Saves, then loads, of workers that all stay alive."""
    _check_room(spec, contenders)
    run.samples.state_bytes[section] = spec.size_bytes
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, spec, run.directory / name)) for name in contenders]
        for step in range(1, WARM_UP + 1):
            for worker in workers:
                worker.save(step)
        for number in range(rounds):
            run.tell(f"{section}: save {number + 1} of {rounds}")
            for worker in turn(workers, number):
                answer = worker.save(WARM_UP + 1 + number)
                run.samples.add(section, worker.contender, "save", answer.seconds)
                for stage, seconds in answer.details.items():
                    run.samples.add(section, worker.contender, f"save: {stage}", seconds)
        for worker in workers:
            worker.expect()
            worker.load()
        for number in range(rounds):
            run.tell(f"{section}: load {number + 1} of {rounds}")
            for worker in turn(workers, number):
                answer = worker.load()
                run.samples.add(section, worker.contender, "load", answer.seconds)
                for stage, seconds in answer.details.items():
                    run.samples.add(section, worker.contender, f"load: {stage}", seconds)
    run.clear()


def in_fresh_processes(run: Run, section: str, spec: StateSpec, contenders: Sequence[str], rounds: int) -> None:
    """What a process that has just started pays: its first save, the next ones, and the load of its successor."""
    _check_room(spec, ("flashckpt",))
    run.samples.state_bytes[section] = spec.size_bytes
    for number in range(rounds):
        for name in turn(contenders, number):
            run.tell(f"{section}: {name}, process {number + 1} of {rounds}")
            directory = run.directory / name

            def add(measure: str, seconds: float, name: str = name) -> None:
                run.samples.add(section, name, measure, seconds)

            with Worker(name, spec, directory) as worker:
                prewarm = worker.opened.details.get("prewarm", 0.0)
                if prewarm:
                    add("prewarm", prewarm)
                add("open", worker.opened.seconds - prewarm)
                first = worker.save(1)
                add("first save", first.seconds)
                for stage, seconds in first.details.items():
                    add(f"first save: {stage}", seconds)
                add("second save", worker.save(2).seconds)
                # From the third on a save is a steady one; without slots there is no difference.
                for step in (3, 4, 5) if name.startswith("flashckpt") else ():
                    add("later save", worker.save(step).seconds)
                digest = worker.expect()
            with Worker(name.removesuffix("-prewarmed"), spec, directory) as successor:
                successor.expect(digest)
                add("load after restart", successor.load().seconds)
            run.clear()


def watched(run: Run, section: str, spec: StateSpec, contenders: Sequence[str]) -> None:
    """How far anonymous memory grows during saves and loads. Apart from the clocks, since looking costs time."""
    _check_room(spec, ("dcp-async",))
    run.samples.state_bytes[section] = spec.size_bytes
    for name in contenders:
        run.tell(f"{section}: {name}")
        directory = run.directory / name
        with Worker(name, spec, directory) as worker:
            run.samples.add(section, name, "first save", worker.save(1, watch=True).anonymous_growth_bytes)
            worker.save(2)
            for step in (3, 4):
                run.samples.add(section, name, "save", worker.save(step, watch=True).anonymous_growth_bytes)
            worker.expect()
            run.samples.add(section, name, "load", worker.load(watch=True).anonymous_growth_bytes)
        run.clear()


def _check_room(spec: StateSpec, contenders: Sequence[str]) -> None:
    check_room(sum(_COPIES.get(name, _USUAL_COPIES) for name in contenders) * spec.size_bytes)
