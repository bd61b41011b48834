"""Turns between the processes of one test run: many tests at a time, or one that is alone."""

from __future__ import annotations

import fcntl
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Longer than any test may take.
PATIENCE = 3600.0


@contextmanager
def turn(directory: Path, *, alone: bool) -> Iterator[None]:
    """Waits until no other turn in `directory` is held by one that is alone, or, if `alone`, by anybody."""
    with ExitStack() as room:
        # Whoever waits for the room holds the gate, so that those who share the room don't pass by for ever.
        with _locked(directory / "gate", fcntl.LOCK_EX):
            room.enter_context(_locked(directory / "room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    deadline = time.monotonic() + PATIENCE
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{path}: expected the test that holds it to end within {PATIENCE:.0f} s, but it is still "
                        f"locked; `fuser {path}` says by which process"
                    ) from None
                time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file open too
