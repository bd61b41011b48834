"""Which plots a result has: for the page (bench/svg.py) and for pictures (bench/picture.py) alike. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.contenders import Kind
from bench.fit import fit_line
from bench.report import growth_slope, growth_x, seconds
from bench.spec import format_size
from bench.svg import Dot, Growth
from bench.table import PEER, REPLICATE, is_ours, make_entries

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.samples import Samples

GROWTH_TITLES = {
    "tensors": "number of tensors",
    "bytes": "bytes of the state",
    "ranks": "ranks of one node",
    "nodes": "nodes",
}
_LOGARITHMIC = ("tensors", "bytes")


@dataclass(frozen=True, slots=True)
class DotPlot:
    title: str
    text: str
    dots: list[Dot]


@dataclass(frozen=True, slots=True)
class GrowthPlot:
    title: str
    text: str
    growths: list[Growth]
    x_text: Callable[[float], str]
    logarithmic: bool


_DOT_PLOTS = (
    ("compare", "in_training", "Blocked per save, in training", "How long the training thread stands still for a save, "
     "the wait before the next optimizer step included. Saving every few steps."),
    ("compare", "safe", "Safe in memory", "From the call until the checkpoint survives the end of the process."),
    ("compare", "load", "Restored from own memory", "From the call until the live tensors hold the saved bytes."),
    (REPLICATE, "replicated", "Replicated to another node", "From sealed on one node until the trainer knows that "
     "another has a verified copy. The sockets move the same bytes, and do nothing else."),
    (PEER, "load", "Restored from a peer", "The same, from another process over loopback. torchft needs a healthy "
     "replica that is still training; flashckpt reads what the buddy of a lost node keeps, and verifies it."),
    ("small", "safe", "Many small tensors: safe in memory", "So few bytes are cheap to copy; what counts is the "
     "cost of each tensor."),
    ("small", "load", "Many small tensors: restored", "Into live tensors."),
)  # fmt: skip


def make_dot_plots(samples: Samples) -> list[DotPlot]:
    plots = []
    for section, measure, title, text in _DOT_PLOTS:
        dots = []
        for entry in make_entries(samples, section):
            series = getattr(entry, measure)
            if series is None:
                continue
            group = "ours" if is_ours(entry.name) else "limit" if entry.kind is Kind.LIMIT else "other"
            label = entry.title
            if entry.isolated is False:
                group, label = "alias", f"{entry.title} (aliases)"
            dots.append(Dot(label, series.median, series.best, series.worst, group))
        if dots:
            size = format_size(samples.state_bytes[section])
            plots.append(DotPlot(f"{title}, {size}", text, dots))
    return plots


def make_growth_plots(samples: Samples) -> list[GrowthPlot]:
    plots = []
    for axis, title in GROWTH_TITLES.items():
        growths, told = [], []
        for (found, measure), points in samples.growth.items():
            if found != axis or len(points) < 2 or measure == "load":
                continue
            figures = [(x, statistics.median(v), min(v), max(v)) for x, v in sorted(points.items())]
            line = fit_line([(x, median) for x, median, _, _ in figures])
            growths.append(Growth(measure, figures, line))
            told.append(
                f"{measure}: {seconds(line.start)} + {growth_slope(axis, line.slope)}, residual {line.residual:.0%}"
            )
        if growths:
            plots.append(
                GrowthPlot(f"Against the {title}", "; ".join(told), growths, _x_text(axis), axis in _LOGARITHMIC)
            )
    return plots


def _x_text(axis: str) -> Callable[[float], str]:
    return lambda x: growth_x(axis, x)
