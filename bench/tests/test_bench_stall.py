"""The stall benchmark: its figures come out right, and a small run measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bench_stall import OVERLAP, RECHECK, SYNC, WITHOUT, Blocks, quantile, rows, slowdowns, table

ROOT = Path(__file__).parents[2]


def test_quantiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert quantile(values, 0.5) == 3.0
    assert quantile(values, 0.99) == 5.0
    assert quantile(values, 0.0) == 1.0
    assert quantile([7.0], 0.99) == 7.0


def test_a_block_is_held_against_the_one_of_its_own_round() -> None:
    # A round that was slow for everybody says nothing.
    assert slowdowns([1.1, 4.4], [1.0, 4.0]) == pytest.approx([0.1, 0.1])


def test_rows_and_table() -> None:
    found = {
        WITHOUT: Blocks([1.0, 2.0, 1.0]),
        OVERLAP: Blocks([1.1, 2.2, 1.1], [0.003, 0.004, 0.009], [0.003] * 3, [0.1] * 3, [0.001] * 3),
    }
    without, overlap = rows(found, every=5)
    assert without["step_seconds"] == pytest.approx(0.2)
    assert "blocked_median" not in without
    assert overlap["slowdown_mean"] == pytest.approx(0.1)
    assert overlap["blocked_median"] == 0.004
    assert overlap["blocked_p99"] == 0.009
    text = table([without, overlap])
    assert "4.00 ms" in text
    assert "10.0%" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.bench_stall", "--size=24M", "--rounds=2", "--batch=4", "--wait=0"]
    done = subprocess.run(
        [*command, f"--json={file}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == [WITHOUT, OVERLAP, SYNC, RECHECK]
    assert all(row["proof_median"] < row["blocked_median"] for row in result["rows"][1:])
    blocks = result["samples"][OVERLAP]
    assert len(blocks["seconds"]) == len(blocks["blocked"]) == 2
    assert all(0 < blocked < whole for blocked, whole in zip(blocks["blocked"], blocks["seconds"], strict=True))
