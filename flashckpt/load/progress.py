"""Shows the progress of a retrieval: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

log = logging.getLogger(__name__)

_LINE_SECONDS = 5.0


class Progress:
    """A context manager; `update` may come from another thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._said = time.monotonic()
        self._done = self._total = 0
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            # Imported here: trainers that log to a file need no rich.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            log.info("%s: %s", self._what, self._told())

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self._done, self._total = done_bytes, total_bytes
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
        elif time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            log.info("%s: %s", self._what, self._told())

    def _told(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._began)
        return (
            f"{self._done >> 20} of {self._total >> 20} MiB in {seconds:.1f} s, {self._done / seconds / 1e6:.0f} MB/s"
        )
