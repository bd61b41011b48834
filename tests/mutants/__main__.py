"""Plants random faults in the core, one at a time, and tells which of them the fast tests notice.

    python -m tests.mutants --count 150 --seed 7 --json build/mutants.json

Each fault is tried against the tests that execute it. A survivor is a blind spot of the tests, or a fault without an
effect: a person has to say which. The same seed draws the same faults from the same tree.
"""

from __future__ import annotations

import argparse
import difflib
import json
import secrets
import tempfile
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.faults import Fault, sample
from tests.mutants.lines import ROOT, run_pytest, trace
from tests.unit.test_shape import PURE

PACKAGES = ("load", "save", "store", "format", "training", "persist")
SUITES = ("tests/unit", "tests/integration/parts", "tests/property", "tests/contract", "tests/sim", "tests/compat")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault."""

    fault: Fault
    status: str  # noticed, survived, not executed, not tried
    diff: str
    tests: int = 0  # that were to run, because they execute it
    by: str = ""  # the test that failed, or how else it was noticed


def core_modules(only=("",)):
    """Path → source of the modules that decide what is safe, below one of the paths `only`."""
    flashckpt = ROOT / "flashckpt"
    found = {path for name in PACKAGES for path in (flashckpt / name).rglob("*.py")}
    found |= set((flashckpt / "protocol").rglob("*.py")) or {flashckpt / name for name in PURE}
    below = tuple(str(ROOT / path) for path in only)
    return {str(one.relative_to(ROOT)): one.read_text() for one in sorted(found) if str(one).startswith(below)}


def covering(fault, traced, seconds):
    """Those that execute the fault, the quickest first, as many as fit into the time; at least one."""
    lines = set(range(fault.line, fault.end_line + 1))
    chosen = []
    for one in sorted((one for one in traced if lines & one.lines.get(fault.path, set())), key=lambda one: one.seconds):
        seconds -= one.seconds
        if seconds >= 0 or not chosen:
            chosen.append(one)
    return chosen


def attempt(fault, source, tests):
    """Runs the tests with the fault in place."""
    lines = difflib.unified_diff(source.splitlines(), fault.planted(source).splitlines(), n=1, lineterm="")
    diff = "\n".join(list(lines)[2:])
    if not tests:
        return Verdict(fault, "not executed", diff)
    with tempfile.NamedTemporaryFile() as file:
        module = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        Path(file.name).write_text(json.dumps([module, fault.planted(source)]))
        limit = 60.0 + 3.0 * sum(one.seconds for one in tests)  # to start, and three times as long as it took: it hangs
        code, output = run_pytest(["-x", *(one.test for one in tests)], limit, FLASHCKPT_MUTANTS_FAULT=file.name)
    # 2: a test file could not be imported. Below 0: a signal. Else pytest did not get as far as the fault.
    if code is not None and code > 2:
        raise SystemExit(f"{fault.path}:{fault.line}: pytest ended with {code}:\n{output[-2000:]}")
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = "" if code == 0 else "it hangs" if code is None else (failed or [f"exit status {code}"])[0]
    return Verdict(fault, "survived" if code == 0 else "noticed", diff, len(tests), by)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="faults to plant")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="the same seed, the same faults")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATH", help="in modules below these paths")
    parser.add_argument("--tests", nargs="+", default=SUITES, metavar="PATH", help="test files or directories")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no fault is planted after that")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests per fault")
    parser.add_argument("--workers", type=int, default=2, help="faults tried side by side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes to")
    options = parser.parse_args()
    modules = core_modules(options.only)
    faults = sample(modules, options.count, options.seed)
    print(f"seed {options.seed}: {len(faults)} faults in {len({one.path for one in faults})} modules", flush=True)
    traced = trace(options.tests, options.workers)
    end = time.monotonic() + 60 * options.minutes

    def take(fault):
        if time.monotonic() > end:
            return Verdict(fault, "not tried", "")
        return attempt(fault, modules[fault.path], covering(fault, traced, options.seconds))

    verdicts = []
    with ThreadPoolExecutor(options.workers) as pool:
        for one in pool.map(take, faults):
            verdicts.append(one)
            fault = one.fault
            print(f"{one.status}: {fault.path}:{fault.line}: {fault.operator}; {one.tests} tests {one.by}", flush=True)
            if one.status in ("survived", "not executed"):
                print(textwrap.indent(one.diff, "    "), flush=True)
    for operator in [*sorted({one.fault.operator for one in verdicts}), ""]:
        counts = Counter(one.status for one in verdicts if operator in ("", one.fault.operator))
        print(f"{operator or 'all':20} {', '.join(f'{counts[status]} {status}' for status in sorted(counts))}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"seed": options.seed, "verdicts": [asdict(one) for one in verdicts]}, indent=1)
        )


if __name__ == "__main__":
    main()
