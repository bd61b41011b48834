"""The model, checked by Spin: a small configuration holds, and its mutants are found. `make spec` runs all of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.unit.test_spec import SPEC

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(SPEC / "run"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_model_holds_and_its_mutants_are_killed():
    result = run("--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    base = re.search(r"^steady +([\d,]+) +\S+ +holds", result.stdout, re.M)
    assert base is not None, result.stdout
    assert int(base[1].replace(",", "")) > 50_000
    killed = dict(re.findall(r"^(\S+) +steady .* killed in \d+ events: (I\d)$", result.stdout, re.M))
    assert killed == {"commit-on-first-report": "I6", "report-on-seal": "I6", "zombie-accepted": "I8"}


def test_without_spin_it_says_how_to_get_it(tmp_path):
    result = run("--quick", PATH=str(tmp_path))
    assert result.returncode == 2
    assert "not found: spin, gcc" in result.stderr
    assert "apt-get install spin gcc" in result.stderr
