"""The result for people at a terminal: tables."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.contenders import Kind
from bench.fit import fit_line
from bench.rows import Bar, Row, milliseconds
from bench.samples import NotMeasuredError, unit_of
from bench.spec import format_size
from bench.table import PEER, REPLICATE, Contest, Entry, is_ours, make_contests, make_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from bench.result import Report
    from bench.samples import Samples, Series

_Column = tuple[str, "Callable[[Entry], Any]", "Callable[[Any, int], str]"]

TITLES = {
    "compare": "Every contender, one rank",
    "small": "Many small tensors",
    REPLICATE: "From sealed to replicated, two nodes over loopback",
    PEER: "Restored from a peer, two processes over loopback",
}
WIDE = 240  # columns that a comparison takes; where there are fewer, it is two tables
_NOT_TIMED = ("open", "prewarm", "loop", "loop without saves")


def show(report: Report, console: Console) -> None:
    _show_machine(report, console)
    for section in TITLES:
        entries = make_entries(report.samples, section)
        if entries:
            size_bytes = report.samples.state_bytes.get(section, 0)
            title = f"{TITLES[section]}, {format_size(size_bytes)}"
            if console.width >= WIDE:
                console.print(_table_of_entries(title, entries, size_bytes, (*_SAVING, *_RESTORING)))
            else:
                for columns in (_SAVING, _RESTORING):
                    if (table := _table_of_entries(title, entries, size_bytes, columns)) is not None:
                        console.print(table)
            _show_left_out(entries, console)
    contests = make_contests(report.samples)
    if contests:
        console.print(_table_of_contests(contests))
    bars = [row for row in report.rows if row.bar is not None]
    others = [row for row in report.rows if row.bar is None]
    tables = (
        _table_of_rows("Bars", bars, verdicts=True),
        _table_of_rows("For comparison", others, verdicts=False),
        _table_of_growth(report.samples),
        _table_of_times(report.samples),
        _table_of_memory(report.samples),
    )
    for table in tables:
        if table.row_count:
            console.print(table)
    met = sum(row.met is True for row in report.rows)
    console.print(f"{met} bars met, {len(report.missed)} missed.")
    if (warning := too_small(report)) and bars:
        console.print(f"[yellow]{warning}[/]", highlight=False)
    for one in report.incomplete:
        console.print(f"[bold red]not complete[/] {one.section}: {one.problem}", highlight=False)
    if report.others_share > 0.05:
        console.print(
            f"[yellow]Other processes used {report.others_share:.0%} of the CPU time: "
            "absolute figures are too high, ratios uncertain.[/]"
        )


def _show_machine(report: Report, console: Console) -> None:
    for line in machine_lines(report):
        console.print(line, highlight=False)


def machine_lines(report: Report) -> list[str]:
    machine, options = report.machine, report.options
    native = machine.checksum_kernel if machine.native else f"{machine.checksum_kernel}, NOT COMPILED"
    return [
        f"{machine.cpu}, {machine.cores} cores, {format_size(machine.memory_bytes)}, Linux {machine.kernel}",
        f"huge pages: anonymous {machine.anonymous_huge_pages}, tmpfs {machine.tmpfs_huge_pages}; "
        f"Python {machine.python}, torch {machine.torch}; checksums by {native}; commit {machine.commit}",
        f"{options.large}; visits of each contender: {options.visits}, rounds of the rest: {options.rounds}, "
        f"of fresh processes: {options.first_rounds}; "
        f"{report.duration:.0f} s in all, other processes used {report.others_share:.1%} of the CPU time",
        *(["seconds: " + ", ".join(f"{one.section} {one.seconds:.0f}" for one in report.done)] if report.done else []),
    ]


def too_small(report: Report) -> str:
    """Bars are for a GiB: what each save costs whatever its size would decide of less."""
    if report.options.size_bytes >= 1 << 30:
        return ""
    size = format_size(report.options.size_bytes)
    return f"Bars are for a state of 1 GiB; this one had {size}: what is said of them here does not count."


def seconds(value: float | None) -> str:
    return "" if value is None else milliseconds(value)


def spread(series: Series | None) -> str:
    """From the best to the worst figure, in milliseconds."""
    if series is None:
        return ""
    best, worst = series.best * 1e3, series.worst * 1e3
    digits = 0 if worst >= 10 else 1
    return f"{best:,.{digits}f}-{worst:,.{digits}f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _table_of_entries(title: str, entries: list[Entry], size_bytes: int, wanted: Sequence[_Column]) -> Table | None:
    """Ratios are the contender's time divided by the other's: below 1 it is faster."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("contender", no_wrap=True)
    columns = [column for column in wanted if any(column[1](entry) is not None for entry in entries)]
    if not columns:
        return None
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    table.add_column("isolated")
    kind: Kind | None = None
    for entry in (entry for entry in entries if entry.decisive):
        if kind is not None and entry.kind is not kind:
            table.add_section()
        kind = entry.kind
        cells = [("" if (value := get(entry)) is None else form(value, size_bytes)) for _, get, form in columns]
        isolated = {True: "yes", False: "[bold red]NO: aliases[/]", None: ""}[entry.isolated]
        style = "bold" if is_ours(entry.name) else "dim" if entry.kind is Kind.LIMIT else None
        table.add_row(entry.title, *cells, isolated, style=style)
    return table


def _median(series: Series | None) -> float | None:
    return series.median if series else None


# Title, value, how it is shown.
_SAVING: tuple[_Column, ...] = (
    ("first", lambda e: _median(e.first), lambda v, _: seconds(v)),
    ("blocked", lambda e: _median(e.blocked), lambda v, _: seconds(v)),
    ("p99", lambda e: e.blocked.p99 if e.blocked else None, lambda v, _: seconds(v)),
    ("blocked in training", lambda e: _median(e.in_training), lambda v, _: seconds(v)),
    ("step slower by", lambda e: e.slowdown, lambda v, _: f"{v:+.1%}"),
    ("safe", lambda e: _median(e.safe), lambda v, _: seconds(v)),
    ("best-worst", lambda e: e.safe, lambda v, _: spread(v)),
    ("x limit", lambda e: e.of_limit.get("safe"), lambda v, _: times(v)),
    ("x flashckpt", lambda e: e.of_ours.get("safe"), lambda v, _: times(v)),
    ("replicated", lambda e: _median(e.replicated), lambda v, _: seconds(v)),
    ("best-worst", lambda e: e.replicated, lambda v, _: spread(v)),
    ("x limit", lambda e: e.of_limit.get("replicated"), lambda v, _: times(v)),
)
_RESTORING: tuple[_Column, ...] = (
    ("restored", lambda e: _median(e.load), lambda v, _: seconds(v)),
    ("best-worst", lambda e: e.load, lambda v, _: spread(v)),
    ("x limit", lambda e: e.of_limit.get("load"), lambda v, _: times(v)),
    ("x flashckpt", lambda e: e.of_ours.get("load"), lambda v, _: times(v)),
    ("peak memory", lambda e: e.peak_bytes, lambda v, size: f"{v / size:.1f} x"),
    ("on the wire", lambda e: e.wire_bytes, lambda v, size: f"{v / size:.2f} x"),
)


def _show_left_out(entries: list[Entry], console: Console) -> None:
    for entry in entries:
        if entry.problem:
            console.print(f"  {entry.title}: {entry.problem}", highlight=False, markup=False)


def _table_of_contests(contests: list[Contest]) -> Table:
    table = Table(title="flashckpt against the best of the others", title_justify="left")
    for name in ("what", "flashckpt", "best other", "", "verdict", "limit"):
        table.add_column(name, justify="left" if name in ("what", "verdict", "") else "right")
    for one in contests:
        verdict = (
            f"[green]{one.factor:.2f} x faster[/]" if one.won else f"[bold red]LOST: {1 / one.factor:.2f} x slower[/]"
        )
        aliasing = f" (faster, but only aliases: {', '.join(one.aliasing)})" if one.aliasing else ""
        table.add_row(
            one.question,
            seconds(one.ours_seconds),
            seconds(one.other_seconds),
            one.other + aliasing,
            verdict,
            seconds(one.limit_seconds),
        )
    return table


def _table_of_growth(samples: Samples) -> Table:
    table = Table(title="Growth: a straight line through the medians", title_justify="left")
    for name in ("against", "measure"):
        table.add_column(name)
    for name in ("from", "to", "fixed", "for each", "residual"):
        table.add_column(name, justify="right")
    for (axis, measure), points in samples.growth.items():
        medians = growth_medians(points)
        if len(medians) < 2:
            continue
        line = fit_line(medians)
        table.add_row(
            axis,
            measure,
            *(growth_x(axis, x) for x in (medians[0][0], medians[-1][0])),
            seconds(line.start),
            growth_slope(axis, line.slope),
            f"{line.residual:.0%}",
        )
    return table


def growth_medians(points: dict[float, list[float]]) -> list[tuple[float, float]]:
    return [(x, statistics.median(values)) for x, values in sorted(points.items())]


def growth_x(axis: str, x: float) -> str:
    return format_size(x) if axis == "bytes" else f"{x:,.0f}"


def growth_slope(axis: str, slope: float) -> str:
    if axis == "bytes":
        return f"{slope * (1 << 30) * 1e3:,.1f} ms a GiB"
    if axis == "tensors":
        return f"{slope * 1e6:.2f} us a tensor"
    return f"{slope * 1e3:,.1f} ms a {axis.removesuffix('s')}"


def _table_of_rows(title: str, rows: list[Row], *, verdicts: bool) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("best", justify="right", no_wrap=True)
    if verdicts:
        table.add_column("bar", justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
    table.add_column("figures")
    for row in rows:
        best = "" if row.best is None else row_value(row.best, row.unit)
        cells = [row.name, row_value(row.value, row.unit), best]
        if verdicts:
            cells += [row_bar(row.bar, row.unit), "[green]met[/]" if row.met else "[bold red]missed[/]"]
        table.add_row(*cells, row.numbers)
    return table


def _table_of_times(samples: Samples) -> Table:
    table = Table(title="All times", title_justify="left")
    for name in ("section", "contender", "measure"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "best", "worst", "n", "GB/s", "of memcpy"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for section, contender, measure, series in samples:
        # A stage that did not take place: a load from the node's own memory retrieves nothing.
        if unit_of(section, measure) != "seconds" or series.worst == 0:
            continue
        if last and section != last:
            table.add_section()
        # A stage of a save or load has no throughput of its own.
        whole = ":" not in measure and measure not in _NOT_TIMED
        speed = samples.state_bytes[section] / series.median / 1e9
        # Only here memcpy took its turns with the others.
        limit = _limit(samples, measure) if section == "steady" and whole else None
        table.add_row(
            section if section != last else "",
            contender,
            measure,
            *(milliseconds(value) for value in (series.median, series.best, series.worst)),
            str(len(series.values)),
            f"{speed:.3g}" if whole else "",
            f"{speed / limit:.0%}" if limit else "",
        )
        last = section
    return table


def _limit(samples: Samples, measure: str) -> float | None:
    """GB/s of memcpy; None where it did not run."""
    try:
        return samples.bytes_per_second("steady", "memcpy", measure) / 1e9
    except NotMeasuredError:
        return None


def _table_of_memory(samples: Samples) -> Table:
    table = Table(title="Memory, highest: growth of what is anonymous unless said otherwise", title_justify="left")
    for name in ("contender", "during"):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of the state", justify="right", no_wrap=True)
    for section, contender, measure, series in samples:
        if section == "memory":
            share = series.worst / samples.state_bytes[section]
            table.add_row(contender, measure, format_size(series.worst), f"{share:.1%}")
    return table


def row_value(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:.1f} ms"
    if unit == "%":
        return f"{value:.1f} %" if abs(value) >= 1 else f"{value:.2f} %"
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"


def row_bar(bar: Bar | None, unit: str) -> str:
    if bar is None:
        return ""
    return f"{'≤' if bar.at_most else '≥'} {bar.limit:g} {unit}"
