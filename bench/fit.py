"""A straight line through figures, and how far they are from it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Line:
    """y = start + slope * x. `residual`: how far a figure is from the line, as a share of it, root mean square."""

    start: float
    slope: float
    residual: float

    def at(self, x: float) -> float:
        return self.start + self.slope * x


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares of the relative distance: else the largest x, which are decades apart, would decide alone.

    Raises ValueError for fewer than two different x, or a y that is not above 0.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"line: expected at least two different x, found {[x for x, _ in points]}")
    if min(y for _, y in points) <= 0:
        raise ValueError(f"line: expected every y above 0, found {min(y for _, y in points)}")
    weighted = [(1 / y**2, x, y) for x, y in points]
    total = sum(w for w, _, _ in weighted)
    mean_x = sum(w * x for w, x, _ in weighted) / total
    mean_y = sum(w * y for w, _, y in weighted) / total
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in weighted) / sum(
        w * (x - mean_x) ** 2 for w, x, _ in weighted
    )
    line = Line(mean_y - slope * mean_x, slope, 0.0)
    squares = [((y - line.at(x)) / y) ** 2 for x, y in points]
    return Line(line.start, line.slope, math.sqrt(sum(squares) / len(squares)))
