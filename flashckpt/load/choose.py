"""Chooses which generations to try, newest first. A pure function that every rank computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashckpt.load.histories import pick
from flashckpt.protocol.placement import place
from flashckpt.save.retention import some_ranks
from flashckpt.types import Launch, age_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashckpt.load.histories import Pick
    from flashckpt.load.inventory import Inventory
    from flashckpt.types import Generation, Session

_NAMED = 4  # missing ranks that a reason names


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates in the order to try them, and why each other generation is none."""

    candidates: tuple[Generation, ...]
    passed_over: tuple[tuple[Generation, str], ...]
    missing: tuple[tuple[Generation, tuple[int, ...]], ...] = ()  # of those passed over: ranks without a shard


def choose(inventory: Inventory, step: int | None, picked: Pick | None = None) -> Choice:
    """Returns the candidates, newest first: the picked history's generations of which every rank's shard is somewhere.

    `picked` None: pick the history from this inventory alone. With `step`, only generations of that step. Whether the
    shards cover every tensor is checked later, from their headers.
    """
    if picked is None:
        picked = pick(inventory.lines, complete_generations(inventory), inventory.launches(), step=step)
    complete: list[Generation] = []
    passed_over: list[tuple[Generation, str]] = []
    missing: list[tuple[Generation, tuple[int, ...]]] = []
    for generation in dict.fromkeys(generation for generation, _ in inventory.generations):
        reason, lacking = _why_not(inventory, picked, generation)
        if lacking:
            missing.append((generation, lacking))
        if reason:
            passed_over.append((generation, reason))
        else:
            complete.append(generation)
    if step is not None:
        passed_over += [(g, f"step {step} was asked for") for g in complete if g.step != step]
        complete = [g for g in complete if g.step == step]
    return Choice(
        candidates=tuple(sorted(complete, key=age_order, reverse=True)),
        passed_over=tuple(sorted(passed_over, key=lambda item: age_order(item[0]), reverse=True)),
        missing=tuple(missing),
    )


def _why_not(inventory: Inventory, picked: Pick, generation: Generation) -> tuple[str, tuple[int, ...]]:
    """Returns why a generation can't be tried ("" = it can), and the ranks without a shard."""
    reason = picked.why_not(generation)
    return (reason, ()) if reason else _why_incomplete(inventory, generation)


def complete_generations(inventory: Inventory) -> list[Generation]:
    """Returns the generations of which every rank's shard is somewhere, whatever their history."""
    found = dict.fromkeys(generation for generation, _ in inventory.generations)
    return [generation for generation in found if not _why_incomplete(inventory, generation)[0]]


def _why_incomplete(inventory: Inventory, generation: Generation) -> tuple[str, tuple[int, ...]]:
    """Returns why a generation is not complete ("" = it is), and the ranks without a shard."""
    worlds = inventory.worlds(generation)
    if len(worlds) > 1:
        return f"its shards disagree on the world size: {worlds}", ()
    rows = inventory.of(generation)
    # Not np.unique(): the first call imports numpy.ma, which would take 20 ms of a recovery.
    is_there = np.zeros(worlds[0], dtype=bool)
    is_there[rows["rank"]] = True
    lacking = tuple(np.flatnonzero(~is_there).tolist())
    if lacking:
        damage = "".join(f"; rank {rank}'s on {why}" for rank, why in inventory.damage(generation) if rank in lacking)
        return f"no shard of ranks {some_ranks(lacking)}{damage}", lacking
    same_rank = rows["rank"][1:] == rows["rank"][:-1]
    differ = same_rank & (rows["digest"][1:] != rows["digest"][:-1])
    if differ.any():
        ranks = sorted(set(rows["rank"][1:][differ].tolist()))
        return f"copies of the shards of ranks {some_ranks(ranks)} differ", ()
    return "", ()


def explain(choice: Choice, sessions: Mapping[Launch, Session], here: Sequence[str]) -> Choice:
    """Returns the choice with the nodes that had the missing shards added to its reasons."""
    missing = dict(choice.missing)
    told = []
    for generation, reason in choice.passed_over:
        session = sessions.get(Launch(generation.epoch, generation.nonce))
        if generation in missing and session is not None:
            reason += ": " + who_had(missing[generation], session, here)
        told.append((generation, reason))
    return Choice(choice.candidates, tuple(told), choice.missing)


def who_had(ranks: Sequence[int], session: Session, here: Sequence[str]) -> str:
    """Describes where the shards of these ranks were, and which of those nodes are not in this launch."""
    placement = place(session.members, session.replicas, session.strategy)
    owners = {rank: member.node_id for member in session.members for rank in member.ranks}
    told = []
    for rank in ranks[:_NAMED]:
        nodes = [owners.get(rank, "an unknown node"), *placement.buddies(rank)]
        gone = [node for node in nodes if node not in here]
        state = f"{_and(gone)} not here" if gone else "which lost it" if len(nodes) == 1 else "which all lost it"
        replicas = f", its replicas on {_and(nodes[1:])}" if nodes[1:] else ", without replicas"
        told.append(f"rank {rank} ran on {nodes[0]}{replicas} ({state})")
    if len(ranks) > _NAMED:
        told.append(f"{len(ranks) - _NAMED} more")
    return "; ".join(told)


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
