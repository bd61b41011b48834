"""The plots as PNG files, for documents that can't hold SVG. Drawn with matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.plots import make_dot_plots, make_growth_plots
from bench.svg import decades, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from bench.plots import DotPlot, GrowthPlot
    from bench.result import Report

_SCHEMES: dict[str, dict[str, str]] = {
    "": {
        **{"paper": "#ffffff", "ink": "#1c2330", "faint": "#5c6675", "line": "#dfe3ea", "band": "#e8f1fc"},
        **{"ours": "#0b6bcb", "second": "#b3530b", "other": "#6b7686", "limit": "#a3acb9", "alias": "#c02d2d"},
    },
    "-dark": {
        **{"paper": "#12161d", "ink": "#e6e9ef", "faint": "#9aa5b5", "line": "#2b3340", "band": "#17283e"},
        **{"ours": "#5aa9ff", "second": "#f0a35e", "other": "#a4afbf", "limit": "#6a7586", "alias": "#ff7b72"},
    },
}
_IN_PICTURE = 5  # the first plots; the others are on the page
_AROUND = 3.2  # title and axis of a plot, in rows
_DPI = 144


def write_pictures(report: Report, directory: Path) -> list[Path]:
    """comparison.png and growth.png, and each for a dark background."""
    written = []
    for suffix, colours in _SCHEMES.items():
        dots, growths = make_dot_plots(report.samples)[:_IN_PICTURE], make_growth_plots(report.samples)
        if dots:
            written.append(_save(_compare(dots, colours), directory / f"comparison{suffix}.png", colours))
        if growths:
            written.append(_save(_grow(growths, colours), directory / f"growth{suffix}.png", colours))
    return written


def _save(figure: Figure, path: Path, colours: dict[str, str]) -> Path:
    with mpl.rc_context({"savefig.facecolor": colours["paper"]}):
        figure.savefig(path, dpi=_DPI)
    return path


def _compare(plots: list[DotPlot], colours: dict[str, str]) -> Figure:
    """In two columns of about the same height, with rows of the same height."""
    columns: list[list[DotPlot]] = [[], []]
    for plot in plots:
        min(columns, key=_height).append(plot)
    columns = [column for column in columns if column]
    highest = max(map(_height, columns))
    figure = Figure(figsize=(7 * len(columns), 0.27 * highest + 0.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.14)  # type: ignore[union-attr, call-arg]
    parts = figure.subfigures(1, len(columns), squeeze=False)[0]
    for part, column in zip(parts, columns, strict=True):
        part.set_facecolor(colours["paper"])
        heights = [len(plot.dots) + _AROUND for plot in column]
        heights.append(max(0.01, highest - sum(heights)))  # what the other column has more
        *panels, spare = part.subplots(len(heights), 1, height_ratios=heights)
        spare.set_visible(False)
        _draw(panels, column, colours)
    figure.supxlabel(
        "medians, and from the best to the worst figure; logarithmic, further left is better; blue: flashckpt, "
        "light grey: the limit, hollow: only refers to the caller's tensors",
        fontsize=9,
        color=colours["faint"],
    )
    return figure


def _height(column: list[DotPlot]) -> float:
    return sum(len(plot.dots) + _AROUND for plot in column)


def _draw(panels: list[Any], plots: list[DotPlot], colours: dict[str, str]) -> None:
    for axes, plot in zip(panels, plots, strict=True):
        _style(axes, colours, plot.title)
        ordered = sorted(plot.dots, key=lambda dot: -dot.value)
        for y, dot in enumerate(ordered):
            colour = colours[dot.group]
            if dot.group == "ours":
                axes.axhspan(y - 0.5, y + 0.5, color=colours["band"], zorder=0)
            axes.hlines(y, dot.low, dot.high, color=colour, alpha=0.5, linewidth=2)
            face = colours["paper"] if dot.group == "alias" else colour
            axes.plot(dot.value, y, "o", color=colour, markerfacecolor=face, markersize=6)
            axes.annotate(
                format_seconds(dot.value), (1.01, y), xycoords=("axes fraction", "data"),
                va="center", fontsize=8.5, color=colours["ink"],
            )  # fmt: skip
        axes.set_xscale("log")
        ticks = decades(min(dot.low for dot in ordered), max(dot.high for dot in ordered))
        axes.set_xlim(ticks[0], ticks[-1])
        axes.set_yticks(range(len(ordered)), [dot.label for dot in ordered], fontsize=9)
        axes.set_ylim(-0.6, len(ordered) - 0.4)
        for label, dot in zip(axes.get_yticklabels(), ordered, strict=True):
            label.set_fontweight("bold" if dot.group == "ours" else "normal")
            label.set_color(colours["alias"] if dot.group == "alias" else colours["ink"])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", color=colours["line"])


def _grow(plots: list[GrowthPlot], colours: dict[str, str]) -> Figure:
    figure = Figure(figsize=(14, 3.6 * math.ceil(len(plots) / 2)), layout="constrained")
    for axes, plot in zip(_panels(figure, len(plots)), plots, strict=True):
        _style(axes, colours, plot.title)
        for growth, name in zip(plot.growths, ("ours", "second", "other"), strict=False):
            xs, medians, lows, highs = zip(*growth.points, strict=True)
            axes.vlines(xs, lows, highs, color=colours[name], alpha=0.5, linewidth=2)
            axes.plot(xs, medians, "o", color=colours[name])
            spread = [xs[0] * (xs[-1] / xs[0]) ** (i / 60) for i in range(61)]
            axes.plot(spread, [growth.line.at(x) for x in spread], "--", color=colours[name], linewidth=1.4)
        if plot.logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
            ticks = decades(
                min(p[2] for g in plot.growths for p in g.points), max(p[3] for g in plot.growths for p in g.points)
            )
            axes.set_ylim(ticks[0], ticks[-1])
        else:
            axes.set_ylim(0, 1.25 * max(p[3] for g in plot.growths for p in g.points))  # room for the legend
        axes.set_xticks(sorted({point[0] for growth in plot.growths for point in growth.points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _, plot=plot: plot.x_text(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
        axes.tick_params(axis="x", labelsize=8, labelrotation=30 if plot.logarithmic else 0)
        axes.grid(color=colours["line"])
        if plot.logarithmic:
            axes.yaxis.set_minor_formatter(NullFormatter())
        for number, (told, name) in enumerate(zip(plot.text.split("; "), ("ours", "second"), strict=False)):
            at = (0.02, 0.97 - 0.08 * number)
            axes.annotate(f"● {told}", at, xycoords="axes fraction", va="top", fontsize=9, color=colours[name])
    return figure


def _panels(figure: Figure, count: int) -> list[Any]:
    """Two in a row, and no more than there are plots."""
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.14, wspace=0.03)  # type: ignore[union-attr, call-arg]
    all_axes = list(figure.subplots(math.ceil(count / 2), min(2, count), squeeze=False).flat)
    for spare in all_axes[count:]:
        spare.set_visible(False)
    return all_axes[:count]


def _style(axes: Any, colours: dict[str, str], title: str) -> None:
    axes.set_facecolor(colours["paper"])
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=colours["ink"])
    axes.tick_params(colors=colours["ink"], which="both", length=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
