"""Runs test code in a fresh interpreter that has the simulated accelerator; the pytest process never loads it."""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import ROOT, environment
from tests.simdev import build

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN_CHARACTERS = 6000


def run_on_sim(
    target: str | Callable[..., object], *arguments: object, timeout: float = 60, **environment_extra: str
) -> str:
    """Run a snippet, or a function of a module, in a fresh interpreter after `simdev.load()`; return what it printed.

    `arguments` go to the function as JSON; a snippet finds them as the list `arguments`. `environment_extra` is added
    to the child's environment. An exception, a crash or a missed deadline of `timeout` seconds raises AssertionError
    with the child's traceback, the values at the place of the failure, and the stacks of all threads of a hang.
    """
    if isinstance(target, str):
        what, name = target, "the snippet"
    else:
        what, name = _reference(target), target.__qualname__
    child = _start("run", what, json.dumps(arguments), timeout=timeout, extra=environment_extra)
    if child.returncode != 0:
        raise AssertionError(f"{name} failed on sim ({_ending(child)}):\n{_shown(child)}")
    return child.stdout


class Cases:
    """The functions `case_*` of one module, run in one process, each in a thread of its own and on a reset device.

    A table of cases costs one start of an interpreter. Use it at the end of the module that has the cases:

        CASES = Cases(__name__)

        @pytest.mark.parametrize("name", CASES.names)
        def test_on_sim(name):
            CASES.check(name)
    """

    def __init__(self, module: str, *, timeout: float = 120, **environment_extra: str) -> None:
        self._module, self._timeout, self._extra = module, timeout, environment_extra
        functions = inspect.getmembers(sys.modules[module], inspect.isfunction)
        found = [function for name, function in functions if name.startswith("case_")]
        self.names = [one.__name__ for one in sorted(found, key=lambda one: one.__code__.co_firstlineno)]

    def check(self, name: str) -> None:
        """Raise AssertionError if the case failed. The first call runs all cases."""
        child, outcomes = self._outcomes
        if name in outcomes:
            assert outcomes[name] is None, f"{name} failed on sim:\n{outcomes[name]}"
        else:
            raise AssertionError(
                f"{name} did not end: the process that runs the cases ended before ({_ending(child)}), after "
                f"{len(outcomes)} of {len(self.names)} cases:\n{_shown(child)}"
            )

    @functools.cached_property
    def _outcomes(self) -> tuple[subprocess.CompletedProcess[str], dict[str, str | None]]:
        """The child, and for each case that ended its failure, or None if it passed."""
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
            what = json.dumps(self.names)
            child = _start("cases", self._module, what, report.name, timeout=self._timeout, extra=self._extra)
            outcomes = dict(json.loads(line) for line in Path(report.name).read_text().splitlines())
        return child, outcomes


def _reference(function: Callable[..., object]) -> str:
    if "<" in function.__qualname__:
        raise ValueError(f"expected a function at the top of a module, found {function.__qualname__}")
    return f"{function.__module__}:{function.__qualname__}"


def _start(*command: str, timeout: float, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    build.library()  # here, so that the time it takes is not the child's
    argv = [sys.executable, "-m", "tests.simdev.child", str(timeout), *command]
    # The child ends itself at the deadline and tells where it hangs. Only if it can't, it is killed later.
    started = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = started.communicate(timeout=timeout + 20)
    except subprocess.TimeoutExpired:
        started.kill()
        output, errors = started.communicate()
    return subprocess.CompletedProcess(argv, started.returncode, output, errors)


def _ending(child: subprocess.CompletedProcess[str]) -> str:
    if re.search(r"^Timeout \(", child.stderr, re.MULTILINE):
        return f"not done within {child.args[3]} s"
    return f"killed by signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"


def _shown(child: subprocess.CompletedProcess[str]) -> str:
    printed = f"printed: {child.stdout}\n" if child.stdout else ""
    return (printed + child.stderr)[-_SHOWN_CHARACTERS:]
