"""The tool that plants faults: what it finds, how it draws, and that a fault is noticed or survives as it should."""

from __future__ import annotations

import ast
import textwrap

import pytest

from tests.mutants.__main__ import attempt, core_modules, covering
from tests.mutants.faults import find_faults, sample
from tests.mutants.lines import ROOT, Traced, run_pytest

SOURCE = textwrap.dedent('''
    """Text."""
    LIMIT = max(1, 2)

    def f(a: int, b: int = min(3, 4), *c) -> str:
        """Text."""
        x: list[int] = [one for one in c if one]
        if a < b and not x:
            raise ValueError(f"{a < b}: {g(a, b)}")
        log.info("%s", g(a, b))
        self.y = g(a, *c)
        z = "ä" if a else max(a, b)
        g(a, b)
        return z
''')


@pytest.fixture(scope="module")
def faults():
    return list(find_faults("m.py", SOURCE))


def lines_of(faults, operator):
    return {one.planted(SOURCE).splitlines()[one.line - 1].strip() for one in faults if one.operator == operator}


@pytest.mark.parametrize(
    ("operator", "lines"),
    [
        ("flipped comparison", {"if ((a) >= (b)) and not x:"}),
        ("boundary", {"if ((a) <= (b)) and not x:"}),
        ("and/or", {"if ((a < b) or (not x)):"}),
        ("dropped guard", {"if False:"}),
        ("dropped statement", {"pass"}),
        ("min/max", {'z = "ä" if a else min(a, b)'}),
        ("swapped arguments", {"g(b, a)"}),
        (
            "negation",
            {
                "x: list[int] = [one for one in c if (not (one))]",
                "if (not (a < b and not x)):",
                "if a < b and (x):",
                'z = "ä" if (not (a)) else max(a, b)',
            },
        ),
    ],
)
def test_each_operator_changes_what_runs_and_nothing_that_is_only_said(faults, operator, lines):
    assert lines_of(faults, operator) == lines


def test_statements_that_are_dropped(faults):
    dropped = [one.line for one in faults if one.operator == "dropped statement"]
    assert [SOURCE.splitlines()[line - 1].split("(")[0].strip() for line in dropped] == [
        "raise ValueError",
        "self.y = g",
        "g",
    ]


def test_every_fault_of_the_core_is_a_program():
    assert len(core_modules()) > 80
    modules = core_modules(["flashckpt/load", "flashckpt/store/s"])
    drawn = sample(modules, 300, seed=1)
    assert len(drawn) == 300
    for fault in drawn:
        ast.parse(fault.planted(modules[fault.path]))
    assert drawn == sample(modules, 300, seed=1) != sample(modules, 300, seed=2)
    # Every module has its turn before one of them has a second or third.
    assert len({fault.path for fault in drawn[: len(modules) // 2]}) == len(modules) // 2


def test_the_quickest_tests_that_execute_the_line_are_chosen():
    (fault,) = (one for one in find_faults("m.py", SOURCE) if one.operator == "min/max")
    hit, miss = {"m.py": frozenset({fault.line})}, {"m.py": frozenset({1}), "n.py": frozenset({fault.line})}
    traced = [Traced("slow", 9.0, hit), Traced("other", 0.1, miss), Traced("mid", 2.0, hit), Traced("quick", 1.0, hit)]
    assert [one.test for one in covering(fault, traced, 3.0)] == ["quick", "mid"]
    assert [one.test for one in covering(fault, traced, 0.5)] == ["quick"]
    assert covering(fault, traced[1:2], 3.0) == []


TESTED = "flashckpt/load/parts.py"
TEST = "tests/unit/test_load_parts.py"


def test_a_fault_is_noticed_survives_or_is_not_executed_and_the_tree_stays_as_it_is():
    path = ROOT / TESTED
    source = path.read_text()
    before = (source, path.stat().st_mtime_ns)
    fault = next(one for one in find_faults(TESTED, source) if one.operator == "flipped comparison")
    strict = [Traced(f"{TEST}::test_the_shortest_prefixes_that_no_broken_key_begins_with", 0.1, {})]
    noticed = attempt(fault, source, strict)
    assert noticed.status == "noticed"
    assert noticed.by.startswith(TEST)
    assert noticed.diff.count("\n+") == noticed.diff.count("\n-") == 1
    nothing = type(fault)(TESTED, "none", fault.line, fault.line, fault.start, fault.start, "")
    assert attempt(nothing, source, strict).status == "survived"
    assert attempt(fault, source, []).status == "not executed"
    with pytest.raises(SystemExit, match="pytest ended with 42"):  # a test that never imports the module
        attempt(fault, source, [Traced("tests/integration/parts/test_turns.py", 0.1, {})])
    assert (path.read_text(), path.stat().st_mtime_ns) == before


def test_what_hangs_is_ended():
    assert run_pytest([TEST], 0.01) == (None, "")
