"""The result as one HTML file with its plots in it: nothing is fetched, and it reads well on light and on dark."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders import Kind
from bench.plots import make_dot_plots, make_growth_plots
from bench.report import TITLES, machine_lines, row_bar, row_value, seconds, spread, times, too_small
from bench.samples import unit_of
from bench.spec import format_size
from bench.svg import dot_plot, growth_plot
from bench.table import Contest, Entry, is_ours, make_contests, make_entries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.result import Report
    from bench.samples import Samples, Series

_STYLE = Path(__file__).with_name("page.css")
_NOISY = 0.05

_READING = """
<p>Every contender saved the same tensors to this machine's memory, in a process of its own, through its public API.
Dots are medians, lines go from the best to the worst figure, and the axis is logarithmic: further left is better.
<b>Blocked</b> is what the training thread loses; <b>safe</b> is when the checkpoint survives the process, which for
asynchronous contenders is later; <b>restored</b> ends when the live tensors hold the bytes, not when a call returns.
Ratios are a contender's time divided by that of the limit, or of flashckpt, which took turns with it save by save.
In the tables the small figures below a median are the best and the worst, in milliseconds. <b>Peak memory</b> and
<b>on the wire</b> are in multiples of the state.</p>
<p><b>Isolated</b> says whether a checkpoint was of the state as it was, though the state was overwritten as soon as the
contender allowed it. One that is not isolated only refers to the caller's tensors: its times are no snapshot's.
Only flashckpt computes checksums while it saves and verifies every one while it loads.</p>
"""


def make_page(report: Report) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>flashckpt: benchmark of {escape(report.date[:10])}</title><style>{_STYLE.read_text()}</style>",
        "<h1>flashckpt: benchmark</h1>",
        *(f"<p class=faint>{escape(line)}</p>" for line in machine_lines(report)),
        f"<p class=faint>{escape(report.date)}</p><pre>{escape(report.command)}</pre>",
    ]
    if report.others_share > _NOISY:
        parts.append(
            f"<p class=warning>Other processes used {report.others_share:.0%} of the CPU time. Absolute figures "
            "are too high and ratios uncertain.</p>"
        )
    parts += [
        f"<p class=warning>Not complete: {escape(one.section)}, {escape(one.problem)}</p>" for one in report.incomplete
    ]
    contests = make_contests(report.samples)
    if contests:
        parts.append("<h2>flashckpt against the best of the others</h2>")
        parts.append(f"<div class=cards>{''.join(map(_card, contests))}</div>")
    parts.append(f"<h2>Everybody</h2>{_READING}")
    parts.append('<div class="plots stacked">')
    for plot in make_dot_plots(report.samples):
        drawn = dot_plot(plot.title, plot.dots)
        parts.append(
            f"<div class=plot><h3>{escape(plot.title)}</h3><p class=faint>{escape(plot.text)}</p>{drawn}</div>"
        )
    parts.append("</div>")
    parts += [_comparison(report.samples, section) for section in TITLES]
    parts.append(_growth(report.samples))
    parts.append(_rows(report))
    parts.append(_all_times(report.samples))
    return "\n".join(parts) + "\n"


def _panel(title: str, text: str, drawn: str) -> str:
    return f"<div class=plot><h3>{escape(title)}</h3><p class=faint>{escape(text)}</p>{drawn}</div>"


def _card(one: Contest) -> str:
    verdict = f"{one.factor:.1f} &times; faster" if one.won else f"{1 / one.factor:.2f} &times; slower"
    limit = "" if one.limit_seconds is None else f"; the limit is {seconds(one.limit_seconds)}"
    aliasing = (
        f"<div class=what>faster, but not isolated: {escape(', '.join(one.aliasing))}</div>" if one.aliasing else ""
    )
    return (
        f"<div class=card><div class=what>{escape(one.question)}</div>"
        f"<div class='big {'good' if one.won else 'bad'}'>{verdict}</div>"
        f"<div>{seconds(one.ours_seconds)} against {seconds(one.other_seconds)} of {escape(one.other)}</div>"
        f"<div class=what>{escape(one.ours)}{limit}</div>{aliasing}</div>"
    )


def _comparison(samples: Samples, section: str) -> str:
    entries = make_entries(samples, section)
    if not entries:
        return ""
    size_bytes = samples.state_bytes.get(section, 0)
    shown = [entry for entry in entries if entry.decisive]
    rows = [_entry_cells(entry, size_bytes) for entry in shown]
    # What nobody has a figure of has no column.
    heads = [name for name in _HEADS if any(row[name] != _EMPTY for row in rows)]
    lines, kind = [], None
    for entry, row in zip(shown, rows, strict=True):
        if entry.kind is not kind:
            lines.append(f"<tr class=kind><td colspan={len(heads)}>{escape(entry.kind.value)}</td></tr>")
            kind = entry.kind
        style = "ours" if is_ours(entry.name) else "limit" if entry.kind is Kind.LIMIT else ""
        lines.append(f'<tr class="{style}">{"".join(row[name] for name in heads)}</tr>')
    problems = [f"<li>{escape(entry.title)}: {escape(entry.problem)}</li>" for entry in entries if entry.problem]
    left_out = f"<p>Left out or broken off:</p><ul>{''.join(problems)}</ul>" if problems else ""
    head = "".join(f"<th>{_HEADS[name]}</th>" for name in heads)
    return (
        f"<h2>{escape(TITLES[section])}, {format_size(size_bytes)}</h2>"
        f"<div class=scroll><table><tr>{head}</tr>{''.join(lines)}</table></div>{left_out}"
    )


_EMPTY = "<td></td>"
_LIMIT, _OURS = "&times; limit", "&times; flashckpt"
_HEADS = {
    **{"title": "contender", "first": "first", "blocked": "blocked", "p99": "p99", "in_training": "in training"},
    **{"slower": "step slower", "safe": "safe", "safe/limit": _LIMIT, "safe/ours": _OURS, "replicated": "replicated"},
    **{"replicated/limit": _LIMIT, "load": "restored", "load/limit": _LIMIT, "load/ours": _OURS},
    **{"peak": "peak memory", "wire": "on the wire", "isolated": "isolated", "checked": "checked"},
}


def _entry_cells(entry: Entry, size_bytes: int) -> dict[str, str]:
    """By the keys of the heads."""

    def cell(text: str, kind: str = "") -> str:
        return f"<td{f' class={kind}' if kind else ''}>{text}</td>" if text else _EMPTY

    def of_state(value: float | None, form: str) -> str:
        return cell("" if value is None else f"{value / size_bytes:{form}} &times;")

    def ratio(value: float | None) -> str:
        lost = value is not None and value < 1 and not is_ours(entry.name) and entry.kind is not Kind.LIMIT
        return cell(times(value), "lost" if lost else "")

    def median(series: Series | None) -> str:
        if series is None:
            return _EMPTY
        told = f"<br><small>{spread(series).replace('-', '&ndash;')}</small>" if len(series.values) > 1 else ""
        return cell(seconds(series.median) + told)

    isolated = {True: "yes", False: "<b class=bad>no: aliases</b>", None: ""}[entry.isolated]
    return {
        "title": cell(escape(entry.title) + (f"<small>{escape(entry.note)}</small>" if entry.note else "")),
        "first": median(entry.first),
        "blocked": median(entry.blocked),
        "p99": cell(seconds(entry.blocked.p99 if entry.blocked else None)),
        "in_training": median(entry.in_training),
        "slower": cell("" if entry.slowdown is None else f"{entry.slowdown:+.1%}"),
        "safe": median(entry.safe),
        "safe/limit": cell(times(entry.of_limit.get("safe"))),
        "safe/ours": ratio(entry.of_ours.get("safe")),
        "replicated": median(entry.replicated),
        "replicated/limit": cell(times(entry.of_limit.get("replicated"))),
        "load": median(entry.load),
        "load/limit": cell(times(entry.of_limit.get("load"))),
        "load/ours": ratio(entry.of_ours.get("load")),
        "peak": of_state(entry.peak_bytes, ".1f"),
        "wire": of_state(entry.wire_bytes, ".2f"),
        "isolated": cell(isolated),
        "checked": cell("" if entry.kind is Kind.LIMIT else "yes" if entry.checked else "no"),
    }


def _growth(samples: Samples) -> str:
    plots = make_growth_plots(samples)
    if not plots:
        return ""
    drawn = [
        _panel(plot.title, plot.text, growth_plot(plot.title, plot.growths, plot.x_text, logarithmic=plot.logarithmic))
        for plot in plots
    ]
    return (
        "<h2>Growth of flashckpt's cost</h2><p>Medians, the range of all figures, and a straight line through the "
        "medians (which is bent where the axes are logarithmic). The residual is how far a median is from "
        "the line, on average. Ranks and nodes share the cores of this one machine, so that their cost grows with "
        "them here.</p>"
        f"<div class=plots>{''.join(drawn)}</div>"
    )


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    lines = []
    for row in report.rows:
        verdict = "" if row.met is None else "<b class=good>met</b>" if row.met else "<b class=bad>missed</b>"
        best = "" if row.best is None else row_value(row.best, row.unit)
        cells = (row_value(row.value, row.unit), best, row_bar(row.bar, row.unit))
        lines.append(
            f"<tr><td class=wrap>{escape(row.name)}</td>{_cells(cells)}<td>{verdict}</td>"
            f"<td class=wrap>{escape(row.numbers)}</td></tr>"
        )
    head = "<tr><th>what</th><th>median</th><th>best</th><th>bar</th><th></th><th class=left>figures</th></tr>"
    small = f"<p class=warning>{escape(warning)}</p>" if (warning := too_small(report)) else ""
    return f"<h2>Bars and details</h2>{small}<div class=scroll><table>{head}{''.join(lines)}</table></div>"


def _all_times(samples: Samples) -> str:
    lines = []
    for section, contender, measure, series in samples:
        if unit_of(section, measure) != "seconds" or series.worst == 0:
            continue
        cells = (*map(seconds, (series.median, series.best, series.p99, series.worst)), str(len(series.values)))
        names = (
            f"<td>{escape(section)}</td><td class=left>{escape(contender)}</td><td class=left>{escape(measure)}</td>"
        )
        lines.append(f"<tr>{names}{_cells(cells)}</tr>")
    head = "<tr><th>section</th><th class=left>contender</th><th class=left>measure</th>"
    head += "".join(f"<th>{name}</th>" for name in ("median", "best", "p99", "worst", "n")) + "</tr>"
    return (
        f"<details><summary>All times</summary><div class=scroll><table>{head}{''.join(lines)}</table></div></details>"
    )


def _cells(values: Iterable[str]) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)
