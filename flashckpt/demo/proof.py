"""Proves what the demo claims: the interrupted run equals the uninterrupted one bit for bit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.demo.run import Run


@dataclass(frozen=True, slots=True)
class Facts:
    """Holds what was seen from outside."""

    lost_rank: int  # the rank that ran on the lost node
    promised_step: int  # the newest step that was committed when the node was lost
    last_record_step: int  # the newest step that was committed in the end; 0 if there was none


def find_problems(steps: int, every: int, whole: Run, broken: Run, resumed: Run, facts: Facts) -> list[str]:
    """Return what does not hold, in words; empty = proved."""
    problems = [*_incomplete(steps, whole)]
    for name, run in (("before the loss", broken), ("after the resume", resumed)):
        problems += _different(name, run, whole)
    for rank in range(resumed.world):
        problems += _resume_problems(rank, steps, broken, resumed, facts)
    bases = {one.step for one in resumed.of("resumed")}
    if len(bases) > 1:
        problems.append(f"ranks resumed from different steps: {sorted(bases)}")
    for rank in range(whole.world):
        expected, found = whole.digests().get(rank), resumed.digests().get(rank)
        if expected is None or found != expected:
            problems.append(f"rank {rank}: final weights {found or 'none'}, expected {expected or 'some'}")
    last_save = steps // every * every
    if facts.last_record_step != last_save:
        problems.append(f"replicated in the end: step {facts.last_record_step}, expected {last_save}")
    return problems


def _incomplete(steps: int, whole: Run) -> Iterator[str]:
    first = whole.losses(0)
    for rank in range(whole.world):
        losses = whole.losses(rank)
        if sorted(losses) != list(range(1, steps + 1)):
            yield f"the uninterrupted run: rank {rank} told of steps {sorted(losses)}, expected 1 to {steps}"
        elif losses != first:
            yield f"the uninterrupted run: rank {rank} and rank 0 tell different losses"


def _different(name: str, run: Run, whole: Run) -> Iterator[str]:
    for rank in range(run.world):
        expected = whole.losses(rank)
        for step, loss in run.losses(rank).items():
            if loss != expected.get(step):
                yield f"rank {rank}, step {step} {name}: loss {loss}, expected {expected.get(step)}"


def _resume_problems(rank: int, steps: int, broken: Run, resumed: Run, facts: Facts) -> Iterator[str]:
    said = resumed.resumed(rank)
    if said is None:
        yield f"rank {rank} found nothing to resume from"
        return
    if not facts.promised_step <= said.step <= broken.furthest:
        yield (
            f"rank {rank} resumed from step {said.step}, expected {facts.promised_step} (committed before the loss) "
            f"to {broken.furthest}"
        )
    source = "peer" if rank == facts.lost_rank else "memory"
    if said.source != source:
        yield f"rank {rank} resumed from {said.source}, expected {source}"
    told = sorted(resumed.losses(rank))
    if told != list(range(said.step + 1, steps + 1)):
        yield f"rank {rank}: after the resume from step {said.step} came steps {told}"
