"""Formats what is printed: escaped text, sizes and ages for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from flashckpt.store.room import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["age", "format_bytes", "make_console", "note", "print_json", "print_table", "printable"]

# Wide enough that nothing is cut if no terminal says how wide it is.
_FILE_WIDTH = 240


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Escape everything in a text from a file or another process that a terminal would act upon.

    These are control characters (escape codes), marks that change the writing direction, and halves of surrogate pairs.
    """
    return "".join(
        char if char.isprintable() or (keep_lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def age(seconds: float) -> str:
    """Format an age for people: one number and a unit."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def print_json(schema: str, content: dict[str, Any]) -> None:
    """Print one object with its schema first. Sizes are in bytes, times in seconds."""
    # ASCII only, so that escape codes in names are harmless here too.
    click.echo(json.dumps({"schema": f"flashckpt.{schema}", **content}, indent=2, ensure_ascii=True))


def note(text: str) -> None:
    """Print a line for people, to stderr."""
    click.echo(printable(text, keep_lines=True), err=True)


def make_console(*, plain: bool = False) -> Console:
    """Return a console for stdout. Rich leaves colours out if NO_COLOR is set or stdout is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=width, no_color=plain or None, highlight=False, emoji=False, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table whose columns are as wide as needed. `right` are the indices of columns of numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        # Numbers are never broken; text is folded if the terminal is narrow, never cut.
        number = index in right
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    make_console().print(table)
