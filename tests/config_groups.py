"""Writes flashckpt/config/groups.py from the flat settings and the table of groups: `python -m tests.config_groups`."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

PLACE = Path(__file__).parents[1] / "flashckpt" / "config"
HEAD = '''"""The groups of settings. Made by `python -m tests.config_groups` from fields.py and table.py: edit those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from flashckpt.config.grouping import Given, records_given

if TYPE_CHECKING:
    from collections.abc import Mapping
'''
CLASS = '''

@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class {cls}(Given):
    """{about}

{names}
    """

    group: ClassVar[str] = "{argument}"
{fields}'''


def flat_fields() -> dict[str, tuple[str, str]]:
    """The type and the default of each flat setting, as they are written."""
    tree = ast.parse((PLACE / "fields.py").read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CheckpointConfig")
    return {
        ast.unparse(node.target): (ast.unparse(node.annotation), ast.unparse(node.value))
        for node in config.body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    }


def groups() -> str:
    """The text of groups.py."""
    # Not imported: flashckpt itself needs groups.py, which may be out of date.
    table, flat, text = runpy.run_path(str(PLACE / "table.py"))["GROUPS"], flat_fields(), HEAD
    for argument, row in table.items():
        lines = [f"    {name}: {flat[of][0]} = {flat[of][1]}" for name, of in row.names.items()]
        renamed = ", ".join(f"`{name}` is `{of}`" for name, of in row.names.items() if name != of)
        same = ", ".join(f"`{name}`" for name, of in row.names.items() if name == of)
        names = "; ".join(filter(None, [renamed, same])) + ". `CheckpointConfig` describes them."
        names = textwrap.fill(names, 120, initial_indent="    ", subsequent_indent="    ")
        text += CLASS.format(cls=row.cls, about=row.about, argument=argument, names=names, fields="\n".join(lines))
        text += "\n"
    ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", str(PLACE / "groups.py"), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    (PLACE / "groups.py").write_text(groups())
