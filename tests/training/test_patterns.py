"""A table of ways to train: every save of each is the state at `save()`, to the bit, or is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import environment, torchrun
from tests.once import once
from tests.training import harness, on_sim, ranks
from tests.training.harness import Run, run_pattern
from tests.training.rarer import PATTERNS

# Old interfaces of torch's are part of what users train with.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def rows(device: str) -> list:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if one.slow else [])
        for name, one in PATTERNS.items()
        if device in one.devices
    ]


@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "at_once"])
@pytest.mark.parametrize("name", rows("cpu"))
def test_right_or_refused(name, delayed):
    pattern = PATTERNS[name]
    result = run_pattern(pattern, "cpu", delayed=delayed)
    assert result.problems(pattern, delayed=delayed) == []


SHARES = 4  # of the rows on the simulated accelerator, one process each: two test processes may each run some


@pytest.fixture
def found_on_sim(tmp_path_factory):
    """Tells what the simulated accelerator's process found in a row."""
    rows = on_sim.rows()

    def run(directory, share):
        mine = rows[len(rows) * share // SHARES : len(rows) * (share + 1) // SHARES]
        child = subprocess.run(
            [sys.executable, on_sim.__file__, str(directory / "found"), *mine],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert child.returncode == 0, child.stdout[-200:] + child.stderr[-4000:]

    def tell(row):
        share = next(n for n in range(SHARES) if rows.index(row) < len(rows) * (n + 1) // SHARES)
        directory = once(tmp_path_factory, f"patterns-on-sim-{share}", lambda made: run(made, share))
        lines = map(json.loads, (directory / "found").read_text().splitlines())
        return {row: problems for row, problems, _ in lines}[row]

    return tell


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("row", on_sim.rows())
def test_right_or_refused_on_an_accelerator(row, found_on_sim):
    assert found_on_sim(row) == []


@pytest.fixture
def found_by_ranks(tmp_path_factory):
    """What two ranks found, row by row, in one launch."""

    def run(out):
        memory = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
        try:
            code, output = torchrun(2, Path(ranks.__file__), memory, out)
        finally:
            shutil.rmtree(memory, ignore_errors=True)
        assert code == 0, output

    out = once(tmp_path_factory, "patterns-on-ranks", run)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("delayed", ["delayed", "at_once"])
@pytest.mark.parametrize("name", list(ranks.PATTERNS))
def test_right_or_refused_on_two_ranks(name, delayed, found_by_ranks):
    if name.startswith("accelerated"):
        pytest.importorskip("accelerate")
    assert [found[f"{name}-{delayed}"] for found in found_by_ranks] == [[], []]


def test_the_table_sees_one_bit(monkeypatch):
    reference = Run.reference

    def with_one_bit_flipped(run):
        state = reference(run)
        if run.saves == 1:
            harness.bits(state["optimizer"]["state"]["2.bias"]["exp_avg"])[5] ^= 1
        return state

    monkeypatch.setattr(Run, "reference", with_one_bit_flipped)
    pattern = PATTERNS["adamw_foreach"]
    result = run_pattern(pattern, "cpu", delayed=False)
    assert [one.verdict for one in result.saves] == ["right", "torn", "right", "right"]
    assert result.problems(pattern, delayed=False) == ["step 20: torn: optimizer.state.2.bias.exp_avg"]


def verdicts(*told):
    """What is wrong with a row whose saves ended so: "" is right, else the key that is named in a refusal."""
    saves = [
        harness.Saved(10 * number, "refused" if key else "right", key, frozenset({(0, key)} if key else ()), True, 0, 0)
        for number, key in enumerate(told, 1)
    ]
    row = harness.Pattern("row", lambda run: lambda: None, refusals=2)
    return [problem.partition(":")[0] for problem in harness.Result(tuple(saves), {}).problems(row, delayed=True)]


def test_the_table_wants_saves_that_are_right():
    assert verdicts("a", "b", "", "") == []
    assert verdicts("", "a", "", "") == []
    assert verdicts("a", "a", "", "") == ["step 20"], "the same tensor again"
    assert verdicts("a", "", "", "b") == ["step 40"], "no save behind it shows that it was the last refusal"
    assert verdicts("a", "b", "c", "", "") == ["step 10", "step 20", "step 30"], "each time another tensor"
    assert verdicts("a", "b", "c", "d") == ["step 10", "step 20", "step 30", "step 40", "step 30", "step 40"]


def test_a_large_frozen_base_is_not_copied_in_save(monkeypatch):
    """Whoever thaws it right after a later save has that save refused: it was still to be copied."""
    monkeypatch.setattr(harness, "COPY_DELAYED", "before_copy=sleep(0.4)")

    def build(run):
        base = nn.Linear(1024, 2048, bias=False).requires_grad_(False)  # 8 MiB
        adapter = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(adapter.parameters())
        run.manage(nn.ModuleDict({"base": base, "adapter": adapter}), optimizer)

        def cycle():
            if run.saves == 4:
                with torch.no_grad():
                    base.weight.add_(1)
            adapter(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return cycle

    result = run_pattern(harness.Pattern("large_frozen_base", build), "cpu", delayed=True)
    assert [one.verdict for one in result.saves] == ["right", "right", "right", "refused"]
    assert "model.base.weight changed" in result.saves[-1].detail
    assert "adapter" not in result.saves[-1].detail
