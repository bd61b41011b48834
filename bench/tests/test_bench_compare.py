"""Who wins and who loses, from figures to the page; and a result that is shown again."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench.__main__ import what_was_measured
from bench.errors import BenchError
from bench.machine import Machine
from bench.page import make_page
from bench.picture import write_pictures
from bench.report import show
from bench.result import Report, as_json, from_json, merged
from bench.rows import make_rows
from bench.samples import Samples
from bench.sections import Options
from bench.slowdown import Loop
from bench.table import make_contests, make_entries

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = Options(size_bytes=1 << 30, rounds=3, first_rounds=2, small_tensors=20_000, loop=Loop(3.0, 2))
MACHINE = Machine("cpu", 2, 1 << 34, "6.1", "3.11", "2.13", "never", "never", "sse42", True, "abc")


def samples() -> Samples:
    made = Samples()
    figures: dict[str, dict[str, list[float]]] = {
        "memcpy": {"save": [0.05], "safe": [0.05], "load": [0.05]},
        "flashckpt": {"save": [0.06, 0.07], "safe": [0.06, 0.07], "load": [0.08], "first save": [0.5]},
        "flashckpt-overlapped": {"save": [0.06], "safe": [0.07], "load": [0.08], "loop: blocked": [0.002, 0.004]},
        "dlrover": {"save": [0.08], "safe": [0.08], "load": [0.07], "loop: blocked": [0.08], "peak memory": [1e9]},
        "nvrx-persistent": {"save": [0.001], "safe": [0.01], "load": [0.3], "loop: blocked": [0.001]},
    }
    for section in ("compare", "small"):
        made.state_bytes[section] = 1 << 30
        for contender, measures in figures.items():
            made.isolated[section, contender] = contender != "nvrx-persistent"
            for measure, values in measures.items():
                for value in values:
                    made.add(section, contender, measure, value)
        made.left_out[section, "ml-flashpoint"] = "can't be installed: no <compiler>"
    made.state_bytes["peer"] = 1 << 30
    for contender, seconds in (("socket", 0.4), ("torchft-pg", 0.5), ("flashckpt", 1.5)):
        made.add("peer", contender, "load", seconds)
    made.add("compare", "dlrover", "loop", 1.2)
    made.add("compare", "dlrover", "loop without saves", 1.0)
    made.add_ratio("compare", "dlrover", "load", "flashckpt", 0.875)
    for x in (1, 2, 4):
        for axis in ("tensors", "nodes"):
            made.add_growth(axis, "save", x, 0.01 * x + 0.001)
            made.add_growth(axis, "save", x, 0.012 * x + 0.001)
    return made


def report(found: Samples, machine: Machine = MACHINE) -> Report:
    return Report(machine, OPTIONS, "2026-01-01", 1.0, 0.2, found, make_rows(found), "python -m bench")


def test_wins_and_losses_are_both_told_and_aliases_do_not_win() -> None:
    contests = {one.question: one for one in make_contests(samples())}
    blocked = contests["blocked per save, in training"]
    assert blocked.won
    assert blocked.ours == "flashckpt, overlapped"
    assert blocked.other == "DLRover, memory"
    assert blocked.aliasing == ("NVRx local, persistent",)
    restored = contests["restored from own memory into live tensors"]
    assert not restored.won
    assert restored.factor == pytest.approx(0.875)
    assert contests["restored from a peer into live tensors"].factor == pytest.approx(1 / 3)
    assert contests["restored from a peer into live tensors"].limit_seconds == pytest.approx(0.4)


def test_entries_are_sorted_by_kind_and_speed_and_the_absent_come_last() -> None:
    entries = make_entries(samples(), "compare")
    assert [entry.name for entry in entries] == [
        "memcpy",
        "flashckpt",
        "dlrover",
        "nvrx-persistent",
        "flashckpt-overlapped",
        "ml-flashpoint",
    ]
    dlrover = entries[2]
    assert dlrover.slowdown == pytest.approx(0.2)
    assert dlrover.of_ours == {"load": 0.875}
    assert entries[-1].problem == "can't be installed: no <compiler>"
    assert not entries[-1].safe


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows() -> None:
    page = make_page(report(samples()))
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    assert "no &lt;compiler&gt;" in page
    assert "no: aliases" in page
    assert "1.14 &times; slower" in page
    assert page.count("<svg") == 6 + 2
    assert "prefers-color-scheme: dark" in page
    assert "Other processes used 20%" in page


def test_the_terminal_names_the_losses() -> None:
    text = io.StringIO()
    show(report(samples()), Console(file=text, width=200))
    assert "LOST: 1.14 x slower" in text.getvalue()
    assert "NO: aliases" in text.getvalue()
    assert "ml-flashpoint, sync + pool: can't be installed: no <compiler>" in text.getvalue()


def test_pictures_are_drawn_for_light_and_dark(tmp_path: Path) -> None:
    written = {path.name for path in write_pictures(report(samples()), tmp_path)}
    assert written == {"comparison.png", "comparison-dark.png", "growth.png", "growth-dark.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in written)


def test_a_result_is_shown_again_as_it_was() -> None:
    first = report(samples())
    again = from_json(json.loads(json.dumps(as_json(first))))
    assert make_page(again) == make_page(first)
    with pytest.raises(BenchError, match="expected version"):
        from_json(as_json(first) | {"version": 1})


def test_the_command_is_kept_without_the_places_it_writes_to() -> None:
    given = ["--size", "64M", "--json", "/home/me/a.json", "--out=/tmp/b", "--only", "peer", "--png", "c"]
    assert what_was_measured(given) == "python -m bench --size 64M --only peer"


def test_results_of_one_machine_are_merged_and_the_later_one_counts() -> None:
    later = Samples()
    later.state_bytes["peer"] = 1 << 30
    later.add("peer", "flashckpt", "load", 0.3)
    both = merged([report(samples()), report(later)]).samples
    assert both.get("peer", "flashckpt", "load").values == (0.3,)
    assert both.find("peer", "torchft-pg", "load") is None
    assert both.get("compare", "dlrover", "save").values == (0.08,)
    assert both.growth == samples().growth
    other = Machine("another", 2, 1 << 34, "6.1", "3.11", "2.13", "never", "never", "sse42", True, "abc")
    with pytest.raises(BenchError, match="of one machine"):
        merged([report(samples()), report(later, other)])
