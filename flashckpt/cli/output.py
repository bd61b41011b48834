"""What reaches the terminal: escaped text, sizes and ages for people, JSON for programs."""

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

# Wide enough that nothing is cut where no terminal says how wide it is.
_FILE_WIDTH = 240


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Text from a file or another process with everything escaped that a terminal would act upon.

    That is control characters (escape codes), marks that turn the writing direction, and halves of surrogate pairs.
    """
    return "".join(
        char if char.isprintable() or (keep_lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def age(seconds: float) -> str:
    """For people: one number and a unit."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def print_json(schema: str, content: dict[str, Any]) -> None:
    """One object with its schema first; sizes are bytes, times are seconds."""
    # ASCII only, so that escape codes in names stay harmless here too.
    click.echo(json.dumps({"schema": f"flashckpt.{schema}", **content}, indent=2, ensure_ascii=True))


def note(text: str) -> None:
    """For people, beside the data."""
    click.echo(printable(text, keep_lines=True), err=True)


def make_console(*, plain: bool = False) -> Console:
    """A console for stdout. Rich itself leaves colours out where NO_COLOR is set or stdout is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=width, no_color=plain or None, highlight=False, emoji=False, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns as wide as they need to be; `right` are the indices of those that hold numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        # Numbers stay in one piece; text is folded where the terminal is narrow, never cut.
        number = index in right
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    make_console().print(table)
