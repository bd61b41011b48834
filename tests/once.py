"""Work that several test processes need, done by one of them: pytest-xdist may give each a part of a module's tests."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a directory that `make` has filled. Other test processes wait for it meanwhile; if it fails, the next one
    tries."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of the whole run
    directory, made = base / f"once-{name}", base / f"once-{name}.made"
    with (base / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            directory.mkdir(exist_ok=True)
            make(directory)
            made.touch()
    return directory
