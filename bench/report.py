"""The result for people (tables) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.rows import Bar, Row, milliseconds
from bench.samples import NotMeasuredError
from bench.spec import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from bench.machine import Machine
    from bench.samples import Samples
    from bench.sections import Options

JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    machine: Machine
    options: Options
    date: str
    duration: float  # seconds
    others_share: float  # of all CPU time, used by processes that are not ours
    samples: Samples
    rows: list[Row]

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.met is False]


def as_json(report: Report) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "date": report.date,
        "duration_seconds": round(report.duration, 1),
        "others_cpu_share": round(report.others_share, 4),
        "machine": dataclasses.asdict(report.machine),
        "options": dataclasses.asdict(report.options),
        "rows": [dataclasses.asdict(row) | {"met": row.met} for row in report.rows],
        "samples": [
            {
                "section": section,
                "contender": contender,
                "measure": measure,
                "unit": "bytes" if section == "memory" else "seconds",
                "state_bytes": report.samples.state_bytes[section],
                "values": [round(value, 6) for value in series.values],
            }
            for section, contender, measure, series in report.samples
        ],
    }


def show(report: Report, console: Console) -> None:
    _show_machine(report, console)
    bars = [row for row in report.rows if row.bar is not None]
    others = [row for row in report.rows if row.bar is None]
    tables = (
        _table_of_rows("Bars", bars, verdicts=True),
        _table_of_rows("For comparison", others, verdicts=False),
        _table_of_times(report.samples),
        _table_of_memory(report.samples),
    )
    for table in tables:
        if table.row_count:
            console.print(table)
    met = sum(row.met is True for row in report.rows)
    console.print(f"{met} bars met, {len(report.missed)} missed.")
    if report.others_share > 0.05:
        console.print(
            f"[yellow]Other processes used {report.others_share:.0%} of the CPU time: "
            "absolute figures are too high, ratios uncertain.[/]"
        )


def _show_machine(report: Report, console: Console) -> None:
    machine, options = report.machine, report.options
    native = machine.checksum_kernel if machine.native else f"{machine.checksum_kernel}, NOT COMPILED"
    console.print(f"{machine.cpu}, {machine.cores} cores, {format_size(machine.memory_bytes)}, Linux {machine.kernel}")
    console.print(
        f"huge pages: anonymous {machine.anonymous_huge_pages}, tmpfs {machine.tmpfs_huge_pages}; "
        f"Python {machine.python}, torch {machine.torch}; checksums by {native}; commit {machine.commit}"
    )
    console.print(
        f"{options.large}; {options.rounds} rounds, {options.first_rounds} of fresh processes; "
        f"{report.duration:.0f} s in all, other processes used {report.others_share:.1%} of the CPU time"
    )


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
        best = "" if row.best is None else _value(row.best, row.unit)
        cells = [row.name, _value(row.value, row.unit), best]
        if verdicts:
            cells += [_bar(row.bar, row.unit), "[green]met[/]" if row.met else "[bold red]missed[/]"]
        table.add_row(*cells, row.numbers)
    return table


def _table_of_times(samples: Samples) -> Table:
    table = Table(title="All times", title_justify="left")
    for name in ("section", "contender", "measure"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "best", "worst", "GB/s", "of memcpy"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for section, contender, measure, series in samples:
        # A stage that did not take place: a load from the node's own memory retrieves nothing.
        if section == "memory" or series.worst == 0:
            continue
        if last and section != last:
            table.add_section()
        # A stage of a save or load has no throughput of its own.
        whole = ":" not in measure and measure not in ("open", "prewarm", "loop")
        speed = samples.state_bytes[section] / series.median / 1e9
        # Only here memcpy took its turns with the others.
        limit = _limit(samples, measure) if section == "steady" and whole else None
        table.add_row(
            section if section != last else "",
            contender,
            measure,
            *(milliseconds(value) for value in (series.median, series.best, series.worst)),
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


def _value(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:.1f} ms"
    if unit == "%":
        return f"{value:.1f} %"
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"


def _bar(bar: Bar | None, unit: str) -> str:
    if bar is None:
        return ""
    return f"{'≤' if bar.at_most else '≥'} {bar.limit:g} {unit}"
