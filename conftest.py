"""Lets a test marked `alone` run with no other test beside it, also where several processes share the tests.

`make test` starts two of them (pytest-xdist). What such a test measures is then not what ran in the other process.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

TURNS = Path(__file__).parent / "build" / "turns"
LONGEST_SECONDS = 3600.0


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    deadline = time.monotonic() + LONGEST_SECONDS
    with (TURNS / name).open("w") as file:
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{file.name} was still locked after {LONGEST_SECONDS:.0f} s: expected the test that holds it "
                        "to end; `fuser` says which process it is"
                    ) from None
                time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child that was forked holds the file too


@contextmanager
def _turn(alone: bool) -> Iterator[None]:
    TURNS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as room:
        # Whoever waits for the room holds the gate, so that those who share it don't pass by for ever.
        with _locked("gate", fcntl.LOCK_EX):
            room.enter_context(_locked("room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with _turn(item.get_closest_marker("alone") is not None):
        return (yield)
