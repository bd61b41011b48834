"""Decides which persisted steps to remove. Pure: returns the names with the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Says what to keep. The newest good step, the one that `latest` names and the one being written always stay."""

    latest_k: int = 0  # 0: all
    every: int | None = None  # multiples of it are permanent: neither counted nor removed
    steps: frozenset[int] = frozenset()  # permanent too


@dataclass(frozen=True, slots=True)
class Lying:
    """Describes one step in persist_dir."""

    name: str
    step: int
    order: tuple[int, int, int]  # newest last: by launch, then by step
    good: bool
    ours: bool  # written by this job; steps of others are never touched
    permanent: bool = False  # whoever saved it marked it as permanent


def is_permanent(step: int, rules: KeepRules) -> bool:
    return step in rules.steps or (rules.every is not None and step % rules.every == 0)


def removable(
    lying: Iterable[Lying], rules: KeepRules, latest: str | None, busy: Collection[str] = ()
) -> dict[str, str]:
    """Return the names to remove, oldest first, each with the reason."""
    found = sorted(lying, key=lambda one: one.order)
    good = [one for one in found if one.good and one.ours]
    newest = good[-1].name if good else None
    protected = {latest, newest, *busy}
    if rules.latest_k == 0:
        return {}
    counted = [one for one in good if not one.permanent and not is_permanent(one.step, rules)]
    kept = {one.name for one in counted[-rules.latest_k :]}
    return {
        one.name: f"{rules.latest_k} newer steps are kept"
        for one in counted
        if one.name not in kept and one.name not in protected
    }
