"""The documents: their links lead somewhere, and their tables agree with the code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import flashckpt
from flashckpt import config, errors
from flashckpt.cli import entry

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
CODE = re.compile(r"\bFC-[A-Z]+-\d{3}\b")


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


def test_every_command_is_documented():
    documented = set(re.findall(r"^    flashckpt (\w+)", OPERATIONS.read_text(), re.M))
    assert documented == set(entry.group.list_commands(None))


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
