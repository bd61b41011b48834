"""Choice: which generations to try, newest first. A pure function that every rank computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.save.retention import State, judge
from flashckpt.types import age_order

if TYPE_CHECKING:
    from flashckpt.load.inventory import Inventory
    from flashckpt.types import Generation


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates in the order to try them, and why the others are none."""

    candidates: tuple[Generation, ...]
    passed_over: tuple[tuple[Generation, str], ...]


def choose(inventory: Inventory, step: int | None) -> Choice:
    """Newest complete, unfenced generations first; with `step`, only those of that step.

    Raises AmbiguousHistoryError where a later launch has whole generations below those of an earlier one and
    never said (by a fence) that it started from there.
    """
    verdicts = judge(inventory.tags, launch=None, fence=inventory.fence, of_many_nodes=True)
    complete = [g for g, verdict in verdicts.items() if verdict.state is State.COMPLETE]
    passed_over = [(g, v.reason) for g, v in verdicts.items() if v.state is not State.COMPLETE]
    if step is not None:
        passed_over += [(g, f"step {step} was asked for") for g in complete if g.step != step]
        complete = [g for g in complete if g.step == step]
    else:
        _refuse_two_histories(complete, inventory)
    return Choice(
        candidates=tuple(sorted(complete, key=age_order, reverse=True)),
        passed_over=tuple(sorted(passed_over, key=lambda item: age_order(item[0]), reverse=True)),
    )


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
