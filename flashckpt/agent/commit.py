"""Decisions of the commit protocol. Pure: what is known goes in, the answer comes out with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.types import Launch, age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Set

    from flashckpt.types import Fence, Generation, Record, Session


def launch_of(generation: Generation) -> Launch:
    return Launch(generation.epoch, generation.nonce)


def threshold(records: Iterable[Record], session: Session | None, fence: Fence | None) -> Record | None:
    """The record that older generations may go for: the newest one of the present launch.

    Records of earlier launches license nothing: a node that was away may bring one of a past that was
    abandoned below the step that was loaded, and what it would bury is what the job stands on.
    """
    if session is None:
        return None
    mine = [
        record
        for record in records
        if launch_of(record.generation) == session.launch and not (fence is not None and fence.kills(record.generation))
    ]
    return max(mine, key=lambda record: age_order(record.generation), default=None)


def droppable(
    generation: Generation,
    record: Record | None,
    fence: Fence | None,
    voids: Collection[Generation],
    base: Generation | None,
) -> str:
    """Why shards of this generation may go; "" = they stay.

    Shortage of memory is no reason: a replica that was acknowledged counts in somebody's commit.
    """
    if fence is not None and fence.kills(generation):
        return f"fenced: step {fence.step} was loaded at epoch {fence.epoch}"
    if generation == base and (record is None or age_order(record.generation) <= age_order(generation)):
        return ""
    if generation in voids:
        return "a rank gave it up"
    if record is not None and age_order(generation) < age_order(record.generation) and generation not in record.keeps:
        return f"step {record.generation.step} is committed"
    return ""


def keeps(
    generation: Generation, count: int, record: Record | None, fence: Fence | None, base: Generation | None
) -> tuple[Generation, ...]:
    """Which `count` - 1 older generations stay when this one is committed: the newest good ones, newest first.

    The record says it, so that all nodes keep the same ones, whichever records they have missed.
    """
    older = (record.generation, *record.keeps) if record is not None else () if base is None else (base,)
    good = [
        one for one in older if age_order(one) < age_order(generation) and not (fence is not None and fence.kills(one))
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
