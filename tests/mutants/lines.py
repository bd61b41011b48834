"""Which fast test executes which lines: recorded once per test file, and kept in build/mutants."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.mutants.plugin import ROOT

KEPT = ROOT / "build" / "mutants"
# No file of the tree is written, hypothesis draws the same examples, and tests that measure time are left out.
_OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not slow and not alone"]


@dataclass(frozen=True, slots=True)
class Traced:
    """What one test executes."""

    test: str  # pytest's node id
    seconds: float
    lines: dict[str, frozenset[int]]  # by module's path


def trace(paths, workers):
    """Runs the test files below `paths` whose record is missing or old, and returns all tests that pass."""
    KEPT.mkdir(parents=True, exist_ok=True)
    found = {one for path in paths for one in (ROOT / path, *(ROOT / path).rglob("test_*.py")) if one.is_file()}
    files = sorted(str(one.relative_to(ROOT)) for one in found)
    stale = [file for file in files if _read(file) is None]
    print(f"recording what {len(stale)} of {len(files)} test files execute", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(_record, stale))
    tests = [one for file in files for one in (_read(file) or {"tests": ()})["tests"] if one["passed"]]
    return [Traced(one["test"], one["seconds"], {p: frozenset(n) for p, n in one["lines"].items()}) for one in tests]


def run_pytest(arguments, timeout, **environment):
    """Returns (exit status, output) of a pytest of its own; the status is None if it took too long."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS, "-p", "tests.mutants.plugin", *arguments]
    env = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(KEPT / "hypothesis"), **environment}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stdout=output, stderr=output)
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
        with contextlib.suppress(ProcessLookupError):  # also what the tests have left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def _record(file):
    # If a file takes too long, those of its tests count that have ended.
    said, digest = _place(file).with_suffix(".jsonl"), _digest(file)
    said.write_text("")
    run_pytest([file], 900.0, FLASHCKPT_MUTANTS_LINES=str(said))
    tests = [json.loads(line) for line in said.read_text().splitlines()]
    digests = {file: digest, **{path: _digest(path) for one in tests for path in one["lines"]}}
    _place(file).write_text(json.dumps({"digests": digests, "tests": tests}))
    said.unlink()


def _read(file):
    """None if there is no record, or the test file or a module that its tests execute has changed since."""
    try:
        record = json.loads(_place(file).read_text())
    except (OSError, ValueError):
        return None
    return record if all(_digest(path) == digest for path, digest in record["digests"].items()) else None


def _place(file):
    return KEPT / f"{file.replace('/', '.')}.json"


def _digest(file):
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16] if (ROOT / file).exists() else ""
