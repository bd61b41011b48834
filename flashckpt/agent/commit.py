"""Decisions of the commit protocol. Pure: what is known goes in, the answer comes out with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.line import launch_of
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Set

    from flashckpt.line import Line
    from flashckpt.types import Generation, Launch, Record, Session


def threshold(records: Iterable[Record], session: Session | None, line: Line | None) -> Record | None:
    """The record that older generations may go for: the newest one of the present launch.

    Records of earlier launches license nothing: a node that was away may bring one of a past that was
    abandoned below the step that was loaded, and what it would bury is what the job stands on.
    """
    if session is None:
        return None
    mine = [
        record
        for record in records
        if launch_of(record.generation) == session.launch and not (line is not None and line.kills(record.generation))
    ]
    return max(mine, key=lambda record: age_order(record.generation), default=None)


def droppable(
    generation: Generation,
    record: Record | None,
    line: Line | None,
    voids: Collection[Generation],
    base: Generation | None,
    root: Launch | None = None,
) -> str:
    """Why shards of this generation may go; "" = they stay. `root` is that of its launch's line, if that is known.

    Shortage of memory is no reason: a replica that was acknowledged counts in somebody's commit. Nor is a record for
    what its line does not know: that is a history of its own.
    """
    abandoned = "" if line is None else line.why_killed(generation, root)
    if abandoned:
        return abandoned
    if generation == base and (record is None or age_order(record.generation) <= age_order(generation)):
        return ""
    if generation in voids:
        return "a rank gave it up"
    launch = launch_of(generation)
    is_known = line is not None and line.cut(launch, root) is not None
    if record is None or not (is_known or launch == launch_of(record.generation)):
        return ""
    if age_order(generation) < age_order(record.generation) and generation not in record.keeps:
        return f"step {record.generation.step} is committed"
    return ""


def keeps(
    generation: Generation, count: int, record: Record | None, line: Line | None, base: Generation | None
) -> tuple[Generation, ...]:
    """Which `count` - 1 older generations stay when this one is committed: the newest good ones, newest first.

    The record says it, so that all nodes keep the same ones, whichever records they have missed.
    """
    older = (record.generation, *record.keeps) if record is not None else () if base is None else (base,)
    good = [
        one for one in older if age_order(one) < age_order(generation) and not (line is not None and line.kills(one))
    ]
    return tuple(good[: max(0, count - 1)])


def missing_ranks(reported: Set[int] | Mapping[int, object], world: int) -> list[int]:
    return [rank for rank in range(world) if rank not in reported]


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a rank has got."""

    generation: Generation  # of the present launch, whose generations are in order
    heard_at: float  # when its node last spoke of it


def abandoned_by(
    generation: Generation, sealed: Mapping[int, float], reached: Mapping[int, Reached], patience: float
) -> int | None:
    """A rank that has got further without this generation, and so will never complete it.

    Its node repeats what it has at every beat, so that it can also be told when a shard that it once had is not
    spoken of any more: it was lost while nobody looked.
    """
    for rank, further in reached.items():
        if further.generation > generation:
            said_at = sealed.get(rank)
            if said_at is None or further.heard_at - said_at > patience:
                return rank
    return None
