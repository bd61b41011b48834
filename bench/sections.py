"""The sections of a run: which contenders take turns, with which state, and what is written down.

A section starts its workers, lets them take turns round by round, and ends them. What is compared with each other
comes from one section.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.compare import Exercise, comparing
from bench.contenders import CONTENDERS
from bench.growth import FULL, Axes, growing
from bench.huge import NoHugePagesError, huge_pages
from bench.idle import idling
from bench.peer import restoring
from bench.process import Worker
from bench.replicate import replicating, watched_agents
from bench.run import Section, turn
from bench.scratch import check_room
from bench.slowdown import Loop, slowing_down
from bench.spec import StateSpec
from bench.stall import stalling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.run import Run

# Both of flashckpt's slots are faulted and mapped after two saves; the others warm up as long.
WARM_UP = 2

# Everybody, in the order of the first visit.
OTHERS = (
    *("flashckpt", "flashckpt-overlapped", "flashckpt-replicated", "torch.save", "safetensors"),
    *("dcp", "dcp-tuned", "dcp-async", "dcp-async-shared", "dcp-async-process"),
    *("torchsnapshot", "torchsnapshot-async", "dlrover", "nvrx", "nvrx-fork", "nvrx-persistent"),
    *("bytecheckpoint", "ml-flashpoint"),
)
# Those that differ in how they copy, not in how they write, take minutes for twenty thousand tensors, and alike.
NOT_WITH_SMALL = ("dcp-tuned", "dcp-async-shared", "dcp-async-process", "torchsnapshot-async")
# Enough to see that every kind still runs; environments of their own are not made for it.
QUICK_ONES = ("flashckpt-overlapped", "torch.save", "dcp-async-shared")
_QUICK_SECTIONS = ("compare", "small", "replicate", "stall", "idle", "growth")
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
    visits: int = 3  # of each contender, in the comparison
    limit_seconds: float = 180.0  # for one visit
    axes: Axes = FULL
    is_quick: bool = False
    contenders: tuple[str, ...] = ()  # of the comparison; none = everybody

    @property
    def exercise(self) -> Exercise:
        """A step of forward and backward is as long as a copy at 5 GB/s: two or three times longer than a good one."""
        seconds = self.size_bytes / 1e9
        if self.is_quick:
            return Exercise(2, 1, 1, 2, seconds, 1, self.limit_seconds)
        return Exercise(3, 2, 1, 5, max(0.05, seconds / 5), 1, self.limit_seconds)

    @property
    def exercise_of_small(self) -> Exercise:
        """DCP takes ten seconds and more for each of these."""
        few = 1 if self.is_quick else 3
        return Exercise(few, few, 0, 0, 0.0, 0, self.limit_seconds / 3)

    @property
    def batch(self) -> int:
        """Rows of a batch: so many that forward and backward take longer than the copy."""
        return 4 if self.is_quick else 64

    @property
    def window_seconds(self) -> float:
        return 1.0 if self.is_quick else 10.0

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
    """All sections of a complete run, or those of a quick one: one that compares, one of two nodes, and growth."""
    sections = _all_sections(options)
    return [section for section in sections if section.name in _QUICK_SECTIONS] if options.is_quick else sections


def _all_sections(options: Options) -> list[Section]:

    def turns(name: str, spec: StateSpec, contenders: Sequence[str], rounds: int) -> Section:
        return Section(name, 2 * rounds, lambda run: taking_turns(run, name, spec, contenders, rounds))

    large, rounds, fresh = options.large, options.rounds, options.first_rounds
    some = min(rounds, 3)  # of what takes long
    windows = min(rounds, 6)

    def compare(name: str, spec: StateSpec, exercise: Exercise, visits: int, contenders: Sequence[str]) -> Section:
        def measure(run: Run) -> None:
            comparing(run, name, spec, contenders, visits, exercise)

        return Section(name, visits * len(contenders), measure)

    everybody = options.contenders or (QUICK_ONES if options.is_quick else OTHERS)
    with_small = options.contenders or [name for name in everybody if options.is_quick or name not in NOT_WITH_SMALL]

    def medium(run: Run) -> None:
        replicating(run, "replicate 64 MiB", options.medium, 2 * rounds)

    replication = [
        turns("agent", large, ALL_OURS, rounds),
        turns("agent, tiny state", options.tiny, ALL_OURS, 2 * rounds),
        Section("replicate", rounds, lambda run: replicating(run, "replicate", large, rounds)),
        Section("replicate 64 MiB", 2 * rounds, medium),
        Section("slowdown", some, lambda run: slowing_down(run, "slowdown", options.trained, options.loop, some)),
        Section("stall", 1, lambda run: stalling(run, "stall", options.size_bytes, rounds, options.batch)),
        Section("idle", windows, lambda run: idling(run, "idle", large, windows, options.window_seconds)),
    ]

    def memory(run: Run) -> None:
        watched(run, "memory", large, WATCHED)
        watched_agents(run, "memory", large)

    in_first = ("flashckpt", "flashckpt-prewarmed", "dcp")
    return [
        compare("compare", large, options.exercise, options.visits, everybody),
        compare("small", options.small, options.exercise_of_small, 1, with_small),
        Section("peer", rounds, lambda run: restoring(run, "peer", large, rounds)),
        turns("steady", large, ("memcpy", "memcpy-tensors", "flashckpt", "dcp"), rounds),
        Section("huge pages", 2 * rounds, lambda run: on_huge_pages(run, "huge pages", large, rounds)),
        turns("planning", options.planning, ("flashckpt", "dcp"), 2 * rounds),
        Section("first", 3 * fresh, lambda run: in_fresh_processes(run, "first", large, in_first, fresh)),
        *replication,
        Section("memory", len(WATCHED) + 1, memory),
        Section("growth", options.axes.steps, lambda run: growing(run, options.axes)),
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


def on_huge_pages(run: Run, section: str, spec: StateSpec, rounds: int) -> None:
    """The same on a mount with huge pages, for all of them."""
    contenders = ("memcpy", "flashckpt")
    try:
        with huge_pages(run.directory / "huge") as directory:
            taking_turns(replace(run, directory=directory), section, spec, contenders, rounds)
    except NoHugePagesError as error:
        for name in contenders:
            run.samples.left_out[section, name] = str(error)


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
    check_room(sum(CONTENDERS[name].copies for name in contenders) * spec.size_bytes)
