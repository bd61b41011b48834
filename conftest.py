"""Lets a test marked `alone` run with no other test beside it, also where several processes share the tests.

`make test` starts two of them (pytest-xdist). What such a test measures is then not what ran in the other process.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.turns import turn

if TYPE_CHECKING:
    from collections.abc import Generator

TURNS = Path(__file__).parent / "build" / "turns"


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


# Outermost: the time that a test waits for its turn does not count for its timeout.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not _is_worker():
        return (yield)
    directory = TURNS / str(os.getppid())  # the run's own: that of the process which started the workers
    directory.mkdir(parents=True, exist_ok=True)
    with turn(directory, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_unconfigure() -> None:
    if not _is_worker():
        shutil.rmtree(TURNS / str(os.getpid()), ignore_errors=True)
