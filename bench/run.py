"""What all sections share: where they work, what they write down, and how contenders take turns."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bench.agents import end_agents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.machine import Quietness
    from bench.samples import Samples

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Run:
    directory: Path
    samples: Samples
    quietness: Quietness
    tell: Callable[[str], None]  # what is being done now; once a round
    note: Callable[[str], None] = lambda _: None  # what takes a while between two rounds

    def clear(self) -> None:
        """Gives back the memory of what is over, and ends the agents that kept it."""
        self.quietness.add_own(end_agents(self.directory))
        for entry in self.directory.iterdir():
            _remove(entry)

    def clear_one(self, directory: Path) -> None:
        """The same for one contender, while others go on."""
        if directory.exists():
            self.quietness.add_own(end_agents(directory))
            _remove(directory)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a run that can also be run alone."""

    name: str
    steps: int  # how often it calls `tell`
    measure: Callable[[Run], None]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def turn(items: Sequence[_T], number: int) -> list[_T]:
    """A B C, B C A, …, so that nobody always comes after the same one."""
    start = number % len(items)
    return [*items[start:], *items[:start]]
