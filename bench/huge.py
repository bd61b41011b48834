"""A tmpfs with huge pages, mounted for as long as a section needs it. Takes root."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class NoHugePagesError(BenchError):
    """They can't be had here."""


@contextlib.contextmanager
def huge_pages(point: Path) -> Iterator[Path]:
    """Mounted on `point`, which is made. NoHugePagesError where that can't be done here."""
    point.mkdir()
    try:
        mount(point)
        try:
            yield point
        finally:
            unmount(point)
    finally:
        point.rmdir()


def mount(point: Path) -> None:
    try:
        _run("mount", "-t", "tmpfs", "-o", "huge=always,mode=0700", "flashckpt-bench", str(point))
    except BenchError as error:
        raise NoHugePagesError(f"a tmpfs with huge pages takes root, and a kernel that has them: {error}") from error


def unmount(point: Path) -> None:
    """Also where somebody still uses it: what is in it goes with its last user."""
    _run("umount", "--lazy", str(point))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BenchError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
