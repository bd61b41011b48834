"""Starts the agent's helper processes at the niceness that the agent itself was started with.

The agent is nice, and what a nice thread starts is at least as nice; only root may take that back. Niceness belongs to
a thread: this one is started before the agent becomes nice, and starts the processes.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from flashckpt.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence


class Starter:
    """One thread. Make it before the process becomes nice."""

    def __init__(self) -> None:
        self._worker = Worker("flashckpt-start-helper")
        self._worker.submit(lambda: None).wait(None)  # the thread runs, and has the niceness of now

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, with pipes for what it is told and for what it answers."""
        started = self._worker.submit(lambda: _start(command))
        started.wait(None)
        return started.result()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,  # the agent's log
        cwd="/",
        start_new_session=True,
    )
