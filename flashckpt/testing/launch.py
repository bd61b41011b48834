"""Runs processes of a cluster that can be waited for: single ones, and all the trainers of one start of the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from flashckpt.errors import DeadlineError
from flashckpt.testing import processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flashckpt.testing.node import Node

# In the environment of every process of a launch. Agents do not have it, because they outlive the launch.
LAUNCH_MARK = "TESTING_CLUSTER_LAUNCH"
_TAIL_BYTES = 4000


class Process:
    """Runs one process on a node. Its output goes to a file."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log_path: Path, what: str) -> None:
        self.what = what
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Return None while it runs, and minus the signal's number if a signal ended it."""
        return self._popen.poll()

    @property
    def output(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def tail(self) -> str:
        return self.output[-_TAIL_BYTES:]

    def wait(self, timeout: float) -> int:
        """Wait for the exit code. The DeadlineError has the end of the output."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"{self.what}: expected it to end within {timeout} s, found it running; it said last:\n{self.tail}"
            ) from error

    def kill(self) -> None:
        """Kill it and its process group with SIGKILL, and wait. A launcher's workers may be in groups of their own."""
        # Once it is reaped, its pid may belong to another process.
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()


class Launch:
    """Holds the processes of one start of the job, and whatever these started."""

    def __init__(self, mark: str, nodes: Sequence[Node], started: Sequence[Process], owners: Sequence[Node]) -> None:
        self.mark = mark
        self.nodes = tuple(nodes)
        self.processes = tuple(started)
        self.owners = tuple(owners)  # by rank: the node it runs on
        self.endpoint = ""  # address of torchrun's rendezvous, if torchrun started the launch
        self.is_elastic = False  # torchrun renumbers the ranks when nodes come and go

    @property
    def world(self) -> int:
        return len(self.owners)

    def wait(self, timeout: float) -> list[int]:
        """Return the exit codes of all processes, in the order of their start."""
        deadline = time.monotonic() + timeout
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]

    def kill(self) -> None:
        """Kill every process of the launch with SIGKILL, on all nodes; agents stay."""
        spared = {pid for node in self.nodes for pid in node.agent_pids()}
        mark = f"{LAUNCH_MARK}={self.mark}".encode()
        processes.kill_all(
            lambda: [seen.pid for seen in processes.look() if mark in seen.environment and seen.pid not in spared],
            "launch",
        )
        for process in self.processes:
            process.kill()

    @property
    def output(self) -> str:
        return "\n".join(f"--- {process.what}\n{process.tail}" for process in self.processes)
