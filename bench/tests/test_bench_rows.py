"""Verdicts come out right from figures, also where sections are missing, and the report can show them."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from bench.machine import Machine
from bench.report import show
from bench.result import Report, as_json
from bench.rows import make_rows
from bench.samples import SHARE, NotMeasuredError, Samples
from bench.sections import Options, plan_sections
from bench.slowdown import Loop
from bench.spec import StateSpec, format_size, parse_size

OPTIONS = Options(size_bytes=1 << 30, rounds=3, first_rounds=2, small_tensors=20_000, loop=Loop(3.0, 2))
MACHINE = Machine("cpu", 2, 1 << 34, "6.1", "3.11", "2.13", "never", "never", "sse42", True, "abc")


def fill(samples: Samples, section: str, figures: dict[tuple[str, str], list[float]]) -> None:
    samples.state_bytes[section] = 1 << 30
    for (contender, measure), values in figures.items():
        for value in values:
            samples.add(section, contender, measure, value)


def complete() -> Samples:
    samples = Samples()
    both = {("flashckpt", "save"): [0.06, 0.05, 0.9], ("flashckpt", "load"): [0.1, 0.1, 0.1]}
    dcp = {("dcp", "save"): [0.6, 0.6, 0.6], ("dcp", "load"): [0.2, 0.2, 0.2]}
    limit = {(f"memcpy{kind}", what): [0.05, 0.04, 0.05] for kind in ("", "-tensors") for what in ("save", "load")}
    fill(samples, "steady", both | dcp | limit)
    fill(samples, "huge pages", both | limit)
    fill(samples, "small", both | dcp)
    fill(samples, "planning", both | dcp | {("flashckpt", "save: plan"): [0.01], ("flashckpt", "load: verify"): [0.0]})
    first: dict[tuple[str, str], list[float]] = {}
    for name in ("flashckpt", "flashckpt-prewarmed", "dcp"):
        first |= {
            (name, "open"): [0.0, 0.0],
            (name, "first save"): [0.3, 0.1],
            (name, "second save"): [0.1, 0.1],
            (name, "later save"): [0.1, 0.1, 0.1, 0.05, 0.05, 9.0],
            (name, "load after restart"): [0.1, 0.1],
        }
    fill(samples, "first", first | {("flashckpt-prewarmed", "prewarm"): [0.5, 0.5]})
    grown = {("flashckpt", "first save"): [float(1 << 29)], ("flashckpt", "save"): [0.0], ("dcp", "save"): [0.0]}
    fill(samples, "memory", grown)
    fill(
        samples,
        "replicate",
        {
            ("flashckpt-replicated", "replicate"): [0.5, 0.4, 0.6],
            ("flashckpt-replicated", "push"): [0.4, 0.4, 0.4],
            ("socket", "replicate"): [0.45, 0.4, 0.5],
            ("agent that sends", "cpu: replicate"): [0.3],
            ("agent that receives", "cpu: replicate"): [0.4],
        },
    )
    fill(samples, "peer", {("flashckpt", "load: retrieve"): [0.5, 0.9, 0.6], ("socket", "load"): [0.4, 0.4, 0.4]})
    fill(
        samples,
        "stall",
        {
            ("no saves", "loop"): [1.0, 2.0, 1.0],
            ("overlap on", "loop"): [1.1, 2.2, 1.4],
            ("overlap on", "loop: blocked"): [0.003, 0.004, 0.2],
            ("overlap on", "loop: passes"): [0.2, 0.2, 0.2],
            ("overlap on", "loop: proof"): [0.001, 0.001, 0.002],
            ("overlap, recheck", "loop: blocked"): [0.1, 0.1, 0.1],
            ("overlap, recheck", "loop: proof"): [0.09, 0.09, 0.09],
            ("overlap off", "loop: staged"): [0.1, 0.1, 0.1],
        },
    )
    fill(
        samples,
        "idle",
        {("agent that sends", SHARE): [0.001, 0.004], ("agent that receives", SHARE): [0.001, 0.001]},
    )
    return samples


def test_medians_decide_and_losses_are_shown() -> None:
    rows = {row.name: row for row in make_rows(complete())}
    against_memcpy = rows["steady save, sealed with checksums, against memcpy"]
    assert against_memcpy.value == pytest.approx(0.06 / 0.05)
    assert against_memcpy.best == pytest.approx(0.05 / 0.04)
    assert against_memcpy.met is True
    assert rows["steady save against dcp.save"].value == pytest.approx(10)
    assert rows["load, verified, against dcp.load from tmpfs"].met is False
    assert rows["steady save of many small tensors against dcp.save"].met is False
    # Processes are compared with themselves: 0.3 / 0.1 and 0.1 / 0.05.
    after_prewarm = rows["first save after prewarm() against the steady ones of the same process"]
    assert after_prewarm.value == pytest.approx(2.5)
    assert after_prewarm.met is False
    memory = rows["growth of the trainer's anonymous memory during a save, of the state"]
    assert memory.value == pytest.approx(50)
    assert memory.met is False


def test_every_bar_is_there_and_holds_medians_against_what_it_names() -> None:
    """What each bar is, so that none gets lost; its verdict for the figures above."""
    rows = [row for row in make_rows(complete()) if row.bar is not None]
    told = {(row.bar.at_most, row.bar.limit, row.unit): (row.value, row.met) for row in rows if row.bar}
    assert len(told) == len(rows) - 1  # two have the same: 0.85 of a socket
    replicated, retrieved = (row for row in rows if row.bar is not None and row.bar.limit == 0.85)
    assert replicated.value == pytest.approx(0.9)
    assert replicated.met
    assert retrieved.value == pytest.approx(0.4 / 0.6)
    assert not retrieved.met
    assert told[False, 0.4, "x"] == (pytest.approx(0.5), True)
    assert told[False, 0.6, "x"] == (pytest.approx(0.5), False)
    assert told[False, 3, "x faster"] == (pytest.approx(2), False)
    assert told[True, 5, "ms"] == (pytest.approx(4), True)
    # On average, not in the middle.
    assert told[True, 10, "%"] == (pytest.approx(20), False)
    assert told[True, 0.5, "%"] == (pytest.approx(0.25), True)
    blocked = next(row for row in rows if row.unit == "ms" and row.bar is not None and row.bar.limit == 5)
    assert "p99 200 ms of 3" in blocked.numbers


@pytest.mark.parametrize("only", [section.name for section in plan_sections(OPTIONS)])
def test_one_section_alone_makes_a_report(only: str) -> None:
    everything, some = complete(), Samples()
    for section, contender, measure, series in everything:
        if section == only:
            fill(some, section, {(contender, measure): list(series.values)})
    report = Report(MACHINE, OPTIONS, "today", 1.0, 0.5, some, make_rows(some))
    text = io.StringIO()
    show(report, Console(file=text, width=140))
    assert "bars met" in text.getvalue()
    assert "Other processes" in text.getvalue()
    assert {one["section"] for one in json.loads(json.dumps(as_json(report)))["samples"]} <= {only}


def test_what_was_not_measured_is_no_figure() -> None:
    with pytest.raises(NotMeasuredError, match="steady, dcp, save"):
        Samples().get("steady", "dcp", "save")


@pytest.mark.parametrize(
    ("text", "size"), [("1G", 1 << 30), ("1.5GiB", 3 << 29), ("64m", 64 << 20), ("1048576", 1 << 20)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1T", "100K", "one"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size: expected"):
        parse_size(text)


def test_a_spec_never_exceeds_the_size_it_was_asked_for() -> None:
    spec = StateSpec.of_size(1 << 30, 100)
    assert (1 << 30) - 100 * 64 < spec.size_bytes <= 1 << 30
    assert format_size(spec.tensor_bytes) == "10.24 MiB"
