"""The README's snippets run, in a process of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import ROOT


def python_snippets(path):
    """(line number, code) of each fenced Python block."""
    found, start, lines = [], None, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() == "```python":
            start, lines = number + 1, []
        elif line.strip() == "```" and start is not None:
            found.append((start, "\n".join(lines)))
            start = None
        elif start is not None:
            lines.append(line)
    return found


@pytest.fixture
def memory_dir():
    directory = Path("/dev/shm") / f"flashckpt-test-docs-{os.getpid()}-{secrets.token_hex(4)}"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def run_snippets(snippets, memory_dir, tail=""):
    """One after the other in one process, as a reader would try them; tracebacks show the README's own lines."""
    program = "namespace = {'__name__': '__main__'}\n"
    for line, code in snippets:
        padded = "\n" * (line - 1) + code
        program += f"exec(compile({padded!r}, 'README.md', 'exec'), namespace)\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")}
    result = subprocess.run(
        [sys.executable, "-c", program + f"exec({tail!r}, namespace)\n"],
        cwd=ROOT,
        env={**environment, "FLASHCKPT_MEMORY_DIR": str(memory_dir)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_snippet_of_the_readme_runs(memory_dir):
    snippets = python_snippets(ROOT / "README.md")
    assert len(snippets) >= 5
    output = run_snippets(snippets, memory_dir)
    assert "ok SEALED" in output
    assert "FC-VAL-001 callback" in output


def test_the_quickstart_resumes(memory_dir):
    quickstart = python_snippets(ROOT / "README.md")[:1]
    tail = "print('resumed', resumed and resumed.step, float(optimizer.state[model.weight]['step']))"
    # 40 steps of the optimizer, not 41: a load that finds nothing must not have made the optimizer's state.
    assert "resumed None 40.0" in run_snippets(quickstart, memory_dir, tail)
    assert "resumed 40 40.0" in run_snippets(quickstart, memory_dir, tail)
