"""Plots as SVG text. Colours are the page's own variables, so that they follow its light or dark scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.fit import Line

_ROW, _LABEL, _RIGHT, _TOP, _BOTTOM = 22, 226, 66, 8, 28


@dataclass(frozen=True, slots=True)
class Dot:
    """One row of a dot plot: the median, and from the best to the worst figure."""

    label: str
    value: float
    low: float
    high: float
    group: str  # "ours", "limit", "other" or "alias"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def decades(low: float, high: float) -> list[float]:
    """The powers of ten that enclose both."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def dot_plot(title: str, dots: Sequence[Dot], width: int = 610) -> str:
    """Times on a logarithmic axis, the fastest on top. Further left is better."""
    ordered = sorted(dots, key=lambda dot: dot.value)
    ticks = decades(min(dot.low for dot in ordered), max(dot.high for dot in ordered))
    height = _TOP + _ROW * len(ordered) + _BOTTOM
    plot = width - _LABEL - _RIGHT

    def at(value: float) -> float:
        share = (math.log10(value) - math.log10(ticks[0])) / (math.log10(ticks[-1]) - math.log10(ticks[0]))
        return _LABEL + share * plot

    bottom = height - _BOTTOM
    parts = [_open(width, height, title)]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{at(tick):.1f}" y1="{_TOP}" x2="{at(tick):.1f}" y2="{bottom}"/>')
        parts.append(_text(at(tick), bottom + 18, format_seconds(tick), "tick", "middle"))
    for number, dot in enumerate(ordered):
        y = _TOP + _ROW * (number + 0.5)
        if dot.group == "ours":
            parts.append(f'<rect class="band" x="0" y="{y - _ROW / 2}" width="{width}" height="{_ROW}"/>')
        parts.append(_text(_LABEL - 10, y + 4, dot.label, f"label {dot.group}", "end"))
        parts.append(
            f'<line class="range {dot.group}" x1="{at(dot.low):.1f}" y1="{y}" x2="{at(dot.high):.1f}" y2="{y}"/>'
        )
        told = (
            f"{dot.label}: median {format_seconds(dot.value)}, {format_seconds(dot.low)} to {format_seconds(dot.high)}"
        )
        parts.append(_dot(at(dot.value), y, 5, dot.group, told))
        parts.append(_text(width - 4, y + 4, format_seconds(dot.value), f"value {dot.group}", "end"))
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class Growth:
    """One measure against what grows: x, and the median, best and worst of y."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    line: Line


def growth_plot(
    title: str, growths: Sequence[Growth], x_text: Callable[[float], str], *, logarithmic: bool, width: int = 480
) -> str:
    """Figures with their range, and the line through the medians."""
    height, left, right, top, bottom = 270, 62, 30, 12, 40
    xs = [point[0] for growth in growths for point in growth.points]
    lows, highs = ([point[index] for growth in growths for point in growth.points] for index in (2, 3))
    if logarithmic:
        x_ticks, y_ticks = decades(min(xs), max(xs)), decades(min(lows), max(highs))
        x_range, y_range = (min(xs), max(xs)), (y_ticks[0], y_ticks[-1])
        x_ticks = [tick for tick in x_ticks if x_range[0] <= tick <= x_range[1]]
        if x_text(1 << 20) != f"{1 << 20:,.0f}":  # sizes: powers of two are the round ones
            x_ticks = [x for index, x in enumerate(sorted(set(xs))) if index % 2 == 0]
    else:
        x_ticks = sorted(set(xs))
        x_range, y_range = (min(xs) - 0.3, max(xs) + 0.3), (0.0, max(highs) * 1.05)
        y_ticks = _round_ticks(y_range[1])

    def scale(value: float, bounds: tuple[float, float]) -> float:
        if logarithmic:
            value, bounds = math.log10(value), (math.log10(bounds[0]), math.log10(bounds[1]))
        return (value - bounds[0]) / (bounds[1] - bounds[0])

    def at(x: float, y: float) -> tuple[float, float]:
        y = min(max(y, y_range[0]), y_range[1])
        across, up = scale(x, x_range), scale(y, y_range)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [_open(width, height, title)]
    for tick in y_ticks:
        y = at(x_range[0], tick)[1]
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, format_seconds(tick) if tick else "0", "tick", "end"))
    parts += [_text(at(tick, y_range[0])[0], height - bottom + 18, x_text(tick), "tick", "middle") for tick in x_ticks]
    for number, growth in enumerate(growths):
        group = "ours" if number == 0 else "second"
        # Enough places for a line that is bent by the logarithms.
        first, last = min(p[0] for p in growth.points), max(p[0] for p in growth.points)
        places = [_between(first, last, i / 60, logarithmic=logarithmic) for i in range(61)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(place, growth.line.at(place)) for place in places))
        parts.append(f'<polyline class="fit {group}" points="{path}"/>')
        for x, median, low, high in growth.points:
            (across, up), (_, worst), (_, best) = at(x, median), at(x, high), at(x, low)
            parts.append(
                f'<line class="range {group}" x1="{across:.1f}" y1="{worst:.1f}" x2="{across:.1f}" y2="{best:.1f}"/>'
            )
            told = f"{growth.name}, {x_text(x)}: {format_seconds(median)}"
            parts.append(_dot(across, up, 4, group, told))
        parts.append(_dot(left + 14, top + 8 + 17 * number, 4, group, growth.name))
        parts.append(_text(left + 24, top + 12 + 17 * number, growth.name, "legend", "start"))
    return "".join([*parts, "</svg>"])


def _between(first: float, last: float, share: float, *, logarithmic: bool) -> float:
    if logarithmic:
        return float(first * (last / first) ** share)
    return first + (last - first) * share


def _round_ticks(high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(high))
    for finer in (0.2, 0.25, 0.5, 1):
        if high / (step * finer) <= 6:
            step *= finer
            break
    return [step * number for number in range(int(high / step) + 1)]


def _open(width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'


def _dot(x: float, y: float, radius: int, group: str, told: str) -> str:
    title = f"<title>{escape(told)}</title>"
    return f'<circle class="dot {group}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
