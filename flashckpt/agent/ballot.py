"""The coordinator's count: which rank's shard lies where, and how far each rank has got. No I/O, no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.agent.commit import Reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.types import Generation, ShardId
    from flashckpt.wire import Report


@dataclass(slots=True)
class View:
    """What is known of one generation."""

    reports: dict[int, Report] = field(default_factory=dict)  # rank → what its node said, where enough others hold it
    sealed: dict[int, float] = field(default_factory=dict)  # rank → when its node last said that it has its shard


class Ballot:
    """Reports are states: the last one of a rank counts, and one that says less takes the earlier one back."""

    def __init__(self) -> None:
        self.generations: dict[Generation, View] = {}
        self.reached: dict[int, Reached] = {}  # how far each rank has got

    def take(self, report: Report, now: float, *, enough: bool) -> View:
        """`enough`: as many other nodes hold the shard as are asked for."""
        view = self.generations.setdefault(report.shard.generation, View())
        view.sealed[report.shard.rank] = now
        if enough:
            view.reports[report.shard.rank] = report
        else:
            view.reports.pop(report.shard.rank, None)
        return view

    def take_back(self, shard: ShardId) -> None:
        """Its owner does not have it any more."""
        view = self.generations.get(shard.generation)
        if view is not None:
            view.reports.pop(shard.rank, None)
            view.sealed.pop(shard.rank, None)

    def note_reached(self, shard: ShardId, now: float) -> None:
        known = self.reached.get(shard.rank)
        if known is None or known.generation <= shard.generation:
            self.reached[shard.rank] = Reached(shard.generation, now)

    def forget(self, which: Callable[[Generation], bool]) -> None:
        self.generations = {g: view for g, view in self.generations.items() if not which(g)}

    def reports(self, generation: Generation) -> dict[int, Report]:
        view = self.generations.get(generation)
        return dict(view.reports) if view is not None else {}
