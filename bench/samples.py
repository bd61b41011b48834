"""What was measured: every single figure, by section, contender and measure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Series:
    """The figures of one measure, round by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return min(self.values)

    @property
    def worst(self) -> float:
        return max(self.values)


class NotMeasuredError(LookupError):
    """A figure of a section that did not run."""


@dataclass(slots=True)
class Samples:
    """Seconds, except for the measures of the section `memory`, which are bytes."""

    _values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)  # by section
    saves: dict[str, int] = field(default_factory=dict)  # in one figure of a loop, by section

    def add(self, section: str, contender: str, measure: str, value: float) -> None:
        self._values.setdefault((section, contender, measure), []).append(value)

    def get(self, section: str, contender: str, measure: str) -> Series:
        values = self._values.get((section, contender, measure))
        if not values:
            raise NotMeasuredError(f"{section}, {contender}, {measure}")
        return Series(tuple(values))

    def bytes_per_second(self, section: str, contender: str, measure: str) -> float:
        median = self.get(section, contender, measure).median
        return self.state_bytes[section] / median

    def __iter__(self) -> Iterator[tuple[str, str, str, Series]]:
        for (section, contender, measure), values in self._values.items():
            yield section, contender, measure, Series(tuple(values))
