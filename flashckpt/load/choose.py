"""Choice: which generations to try, newest first. A pure function that every rank computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.placement import place
from flashckpt.save.retention import some_ranks
from flashckpt.types import Launch, age_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashckpt.load.inventory import Inventory
    from flashckpt.types import Generation, Session

_NAMED = 4  # missing ranks that a reason goes into


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates in the order to try them, and why the others are none."""

    candidates: tuple[Generation, ...]
    passed_over: tuple[tuple[Generation, str], ...]
    missing: tuple[tuple[Generation, tuple[int, ...]], ...] = ()  # of those passed over: ranks without a shard


def choose(inventory: Inventory, step: int | None) -> Choice:
    """Newest generations first that are whole by the union of what all nodes hold, and not fenced; with `step`, only
    those of that step. Whether what lies there covers every tensor, the headers say later.

    Raises AmbiguousHistoryError where a later launch has whole generations below those of an earlier one and
    never said (by a fence) that it started from there.
    """
    complete: list[Generation] = []
    passed_over: list[tuple[Generation, str]] = []
    missing: list[tuple[Generation, tuple[int, ...]]] = []
    for generation in dict.fromkeys(generation for generation, _ in inventory.generations):
        reason, lacking = _why_not(inventory, generation)
        if lacking:
            missing.append((generation, lacking))
        if reason:
            passed_over.append((generation, reason))
        else:
            complete.append(generation)
    if step is not None:
        passed_over += [(g, f"step {step} was asked for") for g in complete if g.step != step]
        complete = [g for g in complete if g.step == step]
    else:
        _refuse_two_histories(complete, inventory)
    return Choice(
        candidates=tuple(sorted(complete, key=age_order, reverse=True)),
        passed_over=tuple(sorted(passed_over, key=lambda item: age_order(item[0]), reverse=True)),
        missing=tuple(missing),
    )


def _why_not(inventory: Inventory, generation: Generation) -> tuple[str, tuple[int, ...]]:
    """Why a generation can't be tried ("" = it can), and the ranks without a shard."""
    fence = inventory.fence
    if fence is not None and fence.kills(generation):
        return f"fenced: step {fence.step} was loaded at epoch {fence.epoch}", ()
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


def _refuse_two_histories(complete: list[Generation], inventory: Inventory) -> None:
    if not complete:
        return
    newest = max(complete, key=age_order)
    fenced_up_to = inventory.fence.epoch if inventory.fence else 0
    for other in complete:
        if other.epoch > max(newest.epoch, fenced_up_to):
            raise AmbiguousHistoryError(
                f"two unrelated histories: {newest}, and {other} of a later launch that did not start from it",
                hint="load the one you mean with load(step=…), or remove the other",
                steps=(newest.step, other.step),
            )


def explain(choice: Choice, sessions: Mapping[Launch, Session], here: Sequence[str]) -> Choice:
    """The same choice; where shards are missing, with the nodes that would have had them."""
    missing = dict(choice.missing)
    told = []
    for generation, reason in choice.passed_over:
        session = sessions.get(Launch(generation.epoch, generation.nonce))
        if generation in missing and session is not None:
            reason += ": " + who_had(missing[generation], session, here)
        told.append((generation, reason))
    return Choice(choice.candidates, tuple(told), choice.missing)


def who_had(ranks: Sequence[int], session: Session, here: Sequence[str]) -> str:
    """Where the shards of these ranks were, and which of those nodes are not here."""
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
