"""Judges which generations are complete, and which shards may be freed. Pure: names in, verdicts with reasons out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.protocol.line import launch_of, name_of
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation, Launch, ShardId


class GenerationState(enum.Enum):
    COMPLETE = "complete"  # every rank's shard is sealed
    PENDING = "pending"  # this launch is still writing it
    DEAD = "dead"  # it can never become a candidate
    OTHER = "other history"  # the line in force does not know its launch: a person decides whether it is kept
    DISAGREES = "disagrees"  # dead, because ranks relied on tensors that others did not store


@dataclass(frozen=True, slots=True)
class GenerationVerdict:
    state: GenerationState
    reason: str


def judge(
    tags: Mapping[ShardId, int],
    launch: Launch | None,
    line: Line | None,
    voids: Collection[Generation] = (),
    roots: Mapping[Launch, Launch] | None = None,
) -> dict[Generation, GenerationVerdict]:
    """Returns a verdict on every generation, from its sealed shards and the tags in their names.

    `launch` is the present one: a generation that it has begun may still be completed, unless a rank gave it up
    (`voids`) or went on to a later one. Incomplete generations of older launches never will be. None: judge while no
    trainer writes. `roots`: the roots of launches whose lines are known.
    """
    asking = None if launch is None else (launch.epoch, launch.nonce)
    shards: dict[Generation, list[ShardId]] = {}
    latest: dict[int, tuple[int, int]] = {}  # rank of this launch → step and attempt of its newest shard
    for shard in tags:
        generation = shard.generation
        shards.setdefault(generation, []).append(shard)
        if (generation.epoch, generation.nonce) == asking:
            latest[shard.rank] = max(latest.get(shard.rank, (-1, 0)), (generation.step, generation.seq))
    return {
        generation: _judge_one(
            generation,
            members,
            {tags[shard] for shard in members},
            latest if (generation.epoch, generation.nonce) == asking else None,
            line,
            voids,
            None if roots is None else roots.get(launch_of(generation)),
        )
        for generation, members in shards.items()
    }


def _judge_one(
    generation: Generation,
    members: list[ShardId],
    tags: set[int],
    latest: Mapping[int, tuple[int, int]] | None,
    line: Line | None,
    voids: Collection[Generation],
    root: Launch | None,
) -> GenerationVerdict:
    if line is not None:
        abandoned, launch = line.why_killed(generation, root), launch_of(generation)
        if abandoned:
            return GenerationVerdict(GenerationState.DEAD, abandoned)
        if line.cut(launch, root) is None and launch.is_older_than(line.head):
            return GenerationVerdict(
                GenerationState.OTHER,
                f"it belongs to another history, {name_of(launch)}, which the job's line does not know of",
            )
    worlds = {shard.world for shard in members}
    if len(worlds) > 1:
        return GenerationVerdict(GenerationState.DEAD, f"its shards disagree on the world size: {sorted(worlds)}")
    present = {shard.rank for shard in members}
    missing = [rank for rank in range(worlds.pop()) if rank not in present]
    if missing:
        reason = f"no shard of ranks {some_ranks(missing)}"
        if latest is None or generation in voids:
            return GenerationVerdict(GenerationState.DEAD, reason)
        if any(latest.get(rank, (-1, 0)) > (generation.step, generation.seq) for rank in missing):
            return GenerationVerdict(GenerationState.DEAD, f"{reason}, which went on to a later one")
        return GenerationVerdict(GenerationState.PENDING, reason)
    if len(tags) > 1:
        return GenerationVerdict(GenerationState.DISAGREES, "ranks disagree on which plain tensors they share")
    return GenerationVerdict(GenerationState.COMPLETE, "all ranks sealed")


def releasable(verdicts: Mapping[Generation, GenerationVerdict], keep: int = 1) -> set[Generation]:
    """Returns the generations whose shards may be recycled: dead ones, and those older than the newest complete one
    that are not among the `keep` newest complete ones.

    Invariant 1 for one node: the newest complete generation stays until a newer one is complete.
    """
    complete = sorted(
        (g for g, v in verdicts.items() if v.state is GenerationState.COMPLETE), key=age_order, reverse=True
    )
    stays = set(complete[: max(1, keep)])
    # A pending one is freed, too, once a newer one is complete: it is not needed any more.
    return {
        generation
        for generation, verdict in verdicts.items()
        if verdict.state in (GenerationState.DEAD, GenerationState.DISAGREES)
        or (
            verdict.state is not GenerationState.OTHER
            and complete
            and generation not in stays
            and age_order(generation) < age_order(complete[0])
        )
    }


def some_ranks(ranks: Iterable[int]) -> str:
    """Lists ranks for a message: all of them, or the first ones and how many more."""
    listed = list(ranks)
    return str(listed) if len(listed) <= 8 else f"{listed[:8]} and {len(listed) - 8} more"
