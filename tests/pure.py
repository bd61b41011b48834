"""Keeps `tests/unit` what `make test-unit` can run in a minute on any machine: one process, and no waiting."""

from __future__ import annotations

import _posixsubprocess
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

WHERE = "such a test belongs in tests/integration/parts, or another directory that `make test-unit` does not run"
LONGEST_SLEEP = 0.01  # seconds; what polls may sleep that long
_STARTS = [
    (subprocess, "_fork_exec"),
    (_posixsubprocess, "fork_exec"),  # multiprocessing
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp")),
]


@contextmanager
def one_process_and_no_clock() -> Iterator[None]:
    """Fails the test that starts a process, connects to another host or sleeps within the block, even if the code under
    test catches the exception."""
    found: list[str] = []
    sleep, connect = time.sleep, socket.socket.connect

    def refuse(what: str) -> None:
        found.append(f"this test {what}: {WHERE}")
        pytest.fail(found[-1])

    def short_sleep(seconds: float) -> None:
        if seconds > LONGEST_SLEEP:
            refuse(f"sleeps for {seconds:g} s")
        sleep(seconds)

    def connect_here(self: socket.socket, address: tuple[str, int] | str) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            refuse(f"connects to {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in _STARTS:
            patch.setattr(module, name, lambda *_, **__: refuse("starts a process"))
        patch.setattr(time, "sleep", short_sleep)
        patch.setattr(socket.socket, "connect", connect_here)
        yield
    if found:
        pytest.fail(found[0])
