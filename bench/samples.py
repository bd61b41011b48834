"""What was measured: every single figure, by section, contender and measure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    def p99(self) -> float:
        """Of fewer than a hundred figures, the worst."""
        return sorted(self.values)[math.ceil(0.99 * len(self.values)) - 1]

    @property
    def worst(self) -> float:
        return max(self.values)


class NotMeasuredError(LookupError):
    """A figure of a section that did not run."""


GROWTH = "growth"  # the section whose figures are points
SHARE = "cpu: share of a core"


def unit_of(section: str, measure: str) -> str:
    if section == "memory" or measure in ("peak memory", "on the wire"):
        return "bytes"
    return "of a core" if measure == SHARE else "seconds"


@dataclass(slots=True)
class Samples:
    """Seconds, except for what `unit_of` says."""

    _values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)  # by section
    saves: dict[str, int] = field(default_factory=dict)  # in one figure of a loop, by section
    # By section and contender: why it was left out or broken off; whether its checkpoints are of the state as it was.
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    broken_off: dict[tuple[str, str], str] = field(default_factory=dict)
    isolated: dict[tuple[str, str], bool] = field(default_factory=dict)
    # Section, contender, measure, whom it was compared with: one ratio of medians for each visit.
    ratios: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)
    # Axis and measure: seconds by what there was of it.
    growth: dict[tuple[str, str], dict[float, list[float]]] = field(default_factory=dict)

    def add(self, section: str, contender: str, measure: str, value: float) -> None:
        self._values.setdefault((section, contender, measure), []).append(value)

    def add_ratio(self, section: str, contender: str, measure: str, other: str, value: float) -> None:
        self.ratios.setdefault((section, contender, measure, other), []).append(value)

    def add_growth(self, axis: str, measure: str, x: float, seconds: float) -> None:
        self.growth.setdefault((axis, measure), {}).setdefault(x, []).append(seconds)

    def find(self, section: str, contender: str, measure: str) -> Series | None:
        values = self._values.get((section, contender, measure))
        return Series(tuple(values)) if values else None

    def get(self, section: str, contender: str, measure: str) -> Series:
        values = self._values.get((section, contender, measure))
        if not values:
            raise NotMeasuredError(f"{section}, {contender}, {measure}")
        return Series(tuple(values))

    def bytes_per_second(self, section: str, contender: str, measure: str) -> float:
        median = self.get(section, contender, measure).median
        return self.state_bytes[section] / median

    def sections(self) -> set[str]:
        found = {section for section, _, _ in self._values} | {section for section, _ in self.left_out}
        return found | {GROWTH} if self.growth else found

    def take_over(self, other: Samples, sections: set[str]) -> None:
        """What another run found in these sections, of which this one has nothing."""
        mine: tuple[dict[Any, Any], ...] = (
            self._values,
            self.left_out,
            self.broken_off,
            self.isolated,
            self.ratios,
            self.state_bytes,
            self.saves,
        )
        theirs: tuple[dict[Any, Any], ...] = (
            other._values,
            other.left_out,
            other.broken_off,
            other.isolated,
            other.ratios,
            other.state_bytes,
            other.saves,
        )
        for into, found in zip(mine, theirs, strict=True):
            for key, value in found.items():
                if (key if isinstance(key, str) else key[0]) in sections:
                    into[key] = value
        if GROWTH in sections:
            self.growth.update(other.growth)

    def __iter__(self) -> Iterator[tuple[str, str, str, Series]]:
        for (section, contender, measure), values in self._values.items():
            yield section, contender, measure, Series(tuple(values))
