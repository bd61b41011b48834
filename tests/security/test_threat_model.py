"""docs/threat-model.md says what is so: each test that it names exists, and its table of roles is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from flashckpt.rpc.guard import ROLES, Role

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "threat-model.md").read_text()


def test_each_test_that_is_named_exists():
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    known = {name for text in sources.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    assert len(named) > 40
    assert named - known == set()
    for path in re.findall(r"`(tests/[\w/.]+)`", DOCUMENT):
        assert (ROOT / path).exists(), path


def test_each_attack_is_in_the_document():
    for path in sorted((ROOT / "tests" / "security").glob("test_hostile_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            assert f"`{name}`" in DOCUMENT, f"{path.name}: {name}"


def test_the_table_of_roles_is_the_codes():
    rows = re.findall(r"^\| `(/flashckpt\S+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", DOCUMENT, re.MULTILINE)
    roles = (Role.OPERATOR, Role.TRAINER, Role.MEMBER)
    found = {
        method: {role for role, cell in zip(roles, cells, strict=True) if cell.strip() == "yes"}
        for method, *cells in rows
    }
    assert found == {method: set(roles) for method, roles in ROLES.items()}
