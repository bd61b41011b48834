"""Shows the demo on a terminal: a live table of nodes below a line for each event. Elsewhere it prints only lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

from flashckpt.store.room import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_STATE_STYLES = {"training": "green", "starting": "yellow", "LOST": "bold red", "blank": "cyan", "stopped": "yellow"}


@dataclass(frozen=True, slots=True)
class Row:
    """Describes one node at one moment."""

    node: str
    rank: int
    state: str
    step: int = 0
    sealed_step: int = 0
    replicated_step: int = 0
    loss: str = ""
    held_bytes: int = 0


class Screen:
    """Prints the demo. A context manager: `tell` prints an event, `show` updates the table."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True) if live else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, text: str, style: str = "") -> None:
        line = Text(f"{time.monotonic() - self._began:6.1f} s  ", "dim")
        line.append(text, style)
        self._console.print(line)

    def show(self, title: str, rows: Sequence[Row]) -> None:
        if self._live is not None:
            self._live.update(as_table(title, rows))


def as_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", min_width=76)
    for name in ("node", "rank", "state", "step", "sealed", "replicated", "loss", "holds"):
        table.add_column(name, justify="left" if name in ("node", "state") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.node,
            str(row.rank),
            Text(row.state, _STATE_STYLES.get(row.state, "")),
            *(str(step) if step else "" for step in (row.step, row.sealed_step, row.replicated_step)),
            f"{float(row.loss):.6f}" if row.loss else "",
            format_bytes(row.held_bytes) if row.held_bytes else "",
        )
    return table
