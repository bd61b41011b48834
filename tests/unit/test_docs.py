"""The documents: their code runs, their links lead somewhere, and their tables agree with the code."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashckpt
from flashckpt import config, errors

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
CODE = re.compile(r"\bFC-[A-Z]+-\d{3}\b")


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


def error_classes():
    """Every error class of the package, wherever it is defined; private ones have the code of their base."""
    for module in pkgutil.walk_packages(flashckpt.__path__, "flashckpt."):
        # Loading a script would run it, and the native part has no errors.
        if not module.name.startswith(("flashckpt.v1", "flashckpt.native", "flashckpt.demo.train", "flashckpt.cli.__")):
            importlib.import_module(module.name)
    found, todo = set(), [errors.FlashError]
    while todo:
        cls = todo.pop()
        found.add(cls)
        todo += cls.__subclasses__()
    return {cls for cls in found if cls.__module__.startswith("flashckpt.") and not cls.__name__.startswith("_")}


def documented_codes():
    """Code → error class, from the table of operations.md."""
    rows = re.findall(r"^\| `(FC-[A-Z]+-\d{3})` \| `(\w+)` \|", OPERATIONS.read_text(), re.M)
    assert len(rows) == len({code for code, _ in rows}), "a code is in two rows"
    return dict(rows)


def test_every_error_is_documented():
    public = {cls for cls in error_classes() if not cls.__name__.startswith("_")}
    assert documented_codes() == {cls.code: cls.__name__ for cls in public - {errors.FlashError}}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_that_is_mentioned_exists(path):
    assert set(CODE.findall(path.read_text())) <= {cls.code for cls in error_classes()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_environment_variable_is_documented():
    text = OPERATIONS.read_text()
    documented = set(re.findall(r"^\| `(FLASHCKPT_\w+)`", text, re.M))
    read = set()
    for path in (ROOT / "flashckpt").rglob("*.py"):
        read.update(re.findall(r"\"(FLASHCKPT_[A-Z_]+)\"", path.read_text()))
    read.update(config.ENVIRONMENT.values())
    assert read == documented


def test_every_setting_is_documented():
    documented = set(re.findall(r"^\| `(\w+)` \|", OPERATIONS.read_text(), re.M))
    assert set(config.CheckpointConfig.__dataclass_fields__) <= documented


def coverage():
    """(id, state, test) of each row of coverage.md."""
    rows = re.findall(
        r"^\| ([A-Z]{2}-\d\d) \|[^|]*\| ([^|]*) \|(.*)\|$", (ROOT / "docs" / "coverage.md").read_text(), re.M
    )
    return [(identity, state.strip(), rest.rpartition("|")[2].strip().strip("`")) for identity, state, rest in rows]


def test_the_coverage_table_has_every_requirement_once():
    counts = {"KF": 35, "MF": 25, "TT": 15, "TN": 19, "OL": 28}
    wanted = [f"{family}-{number:02}" for family, count in counts.items() for number in range(1, count + 1)]
    assert [identity for identity, _, _ in coverage()] == wanted


@pytest.mark.parametrize(("identity", "state", "test"), coverage(), ids=lambda value: value[:5])
def test_the_coverage_table_names_tests_that_exist(identity, state, test):
    assert state in ("yes", "part", "differs", "no", "n/a")
    if not test:
        assert state in ("no", "n/a")
        return
    file, _, name = test.partition("::")
    assert name, f"{identity}: expected the name of a test, found only the file {file}"
    text = (ROOT / "tests" / file).read_text()
    assert f"def {name}(" in text, test


def failure_model():
    return (ROOT / "docs" / "failure-model.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\btests/[\w/]+(?:\.py)?(?:::\w+)?", failure_model()))))
def test_the_failure_model_names_files_that_exist(path):
    file, _, name = path.partition("::")
    assert (ROOT / file).exists(), path
    assert not name or f"def {name}(" in (ROOT / file).read_text(), path


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\btest_\w+\b(?!\.py)", failure_model()))))
def test_the_failure_model_names_tests_that_exist(name):
    files = (ROOT / "tests").rglob("test_*.py")
    assert any(re.search(rf"^ *(?:async )?def {name}\(", file.read_text(), re.M) for file in files), name
