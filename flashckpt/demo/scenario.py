"""The demo's play: train undisturbed; train again and be killed; start again, resume, compare every bit."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.demo.job import Job, Run
from flashckpt.demo.processes import adopt_orphans
from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVENT_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play."""

    ranks: int = 2
    steps: int = 20
    every: int = 4
    kill_at: int | None = None
    parent: Path = Path("/dev/shm")

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        kill = self.kill_step
        if not self.every < kill < self.steps or kill % self.every == 0:
            raise ConfigError(
                f"kill_at {kill}: expected a step after the first snapshot (step {self.every}) and before the last "
                f"step ({self.steps}) at which no snapshot is made",
                hint=f"for example --steps {4 * self.every} --kill-at {2 * self.every + max(1, self.every // 2)}",
            )

    @property
    def kill_step(self) -> int:
        """Two thirds through, but between two snapshots."""
        if self.kill_at is not None:
            return self.kill_at
        boundary = self.steps * 2 // 3 // self.every * self.every
        return boundary + max(1, self.every // 2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The three launches, and what is wrong with them."""

    plan: Plan
    whole: Run  # never interrupted
    killed: Run
    resumed: Run
    problems: tuple[str, ...]  # empty = proved

    @property
    def resumed_step(self) -> int | None:
        loaded = self.resumed.first("loaded")
        return None if loaded is None else loaded.step


def play(plan: Plan, tell: Callable[[str], None]) -> Outcome:
    """Runs the three launches. Whatever happens, no process and no file of it is left."""
    adopt_orphans()
    with _interruptible(), _scratch(plan.parent) as directory:

        def job(name: str, *, disabled: bool = False) -> Job:
            shape = {"ranks": plan.ranks, "steps": plan.steps, "every": plan.every}
            return Job(directory, directory / "memory", **shape, name=name, disabled=disabled)

        tell(f"1/3  training {plan.steps} steps on {plan.ranks} ranks, uninterrupted and without flashckpt")
        # Switched off, not only undisturbed: what saving itself did to the training would show as well.
        whole = _to_the_end(job("whole", disabled=True))
        tell(f"2/3  the same again, to be killed at step {plan.kill_step} (a snapshot every {plan.every} steps)")
        killed = _until_killed(job("killed"), plan.kill_step)
        tell(f"     SIGKILL to torchrun and all ranks: {killed.killed_processes} processes gone")
        tell("3/3  starting it again: it resumes from memory")
        resumed = _to_the_end(job("resumed"))
    return Outcome(plan, whole, killed, resumed, tuple(find_problems(plan, whole, killed, resumed)))


def find_problems(plan: Plan, whole: Run, killed: Run, resumed: Run) -> list[str]:
    """What does not hold, in words. Pure."""
    problems = []
    expected = whole.losses()
    if sorted(expected) != list(range(1, plan.steps + 1)):
        problems.append(f"the uninterrupted run reported steps {sorted(expected)}, expected 1 to {plan.steps}")
    for name, run in (("before the kill", killed), ("after the resume", resumed)):
        problems += [
            f"step {step} {name}: loss {loss}, expected {expected.get(step)}"
            for step, loss in run.losses().items()
            if loss != expected.get(step)
        ]
    loaded = resumed.first("loaded")
    reached = max(killed.losses(), default=0)
    if loaded is None:
        problems.append("the second launch found nothing to resume from")
    else:
        sealed = max(killed.saved_steps(), default=0)
        if not sealed <= loaded.step <= reached:
            problems.append(f"resumed from step {loaded.step}, expected {sealed} (sealed by all ranks) to {reached}")
        if sorted(resumed.losses()) != list(range(loaded.step + 1, plan.steps + 1)):
            problems.append(f"after the resume from step {loaded.step} came steps {sorted(resumed.losses())}")
    if not whole.digest or whole.digest != resumed.digest:
        problems.append(f"final weights: digest {resumed.digest or 'none'}, expected {whole.digest or 'one'}")
    for run in (killed, resumed):
        problems += [
            f"step {event.step}: rank {event.rank} did not save: {event.details['reason']}"
            for event in run.of("saved")
            if event.details["outcome"] != "ok"
        ]
    return problems


def _to_the_end(job: Job) -> Run:
    with job:
        for _ in job.follow(_EVENT_TIMEOUT):
            pass
    return job.run


def _until_killed(job: Job, step: int) -> Run:
    with job:
        for event in job.follow(_EVENT_TIMEOUT):
            if event.kind == "step" and event.step >= step:
                job.kill()
                break
    return job.run


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="flashckpt-demo-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the demo through its clean-up, and a second one does not cut that short."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: Any) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
