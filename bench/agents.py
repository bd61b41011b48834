"""Agents that contenders started: found by the directories they serve, watched from outside, ended by id."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.errors import BenchError
from flashckpt.agent.lock import LOCK_NAME, AgentLock
from flashckpt.agent.process import LOG_NAME
from flashckpt.agent.start import stop_agent
from flashckpt.errors import FlashError
from flashckpt.store.directory import open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = "bench"  # of all contenders
_STOP_SECONDS = 5.0
_SCHEDULED = 2  # the kernel's CPUCLOCK_SCHED
_FLUSH = re.compile(r"step (\d+): this node's part lies in .*: (\d+) bytes in ([0-9.]+) s")
_PUSH = re.compile(r"push of shard (\d+)/\d+ of step (\d+) .* bytes in ([0-9.]+) s")


@dataclass(frozen=True, slots=True)
class Agent:
    memory_dir: Path
    pid: int

    def cpu_seconds(self) -> float:
        """Of all its threads, in the kernel and outside, those included that have ended."""
        # What clock_getcpuclockid(3) makes of a pid: /proc counts in hundredths of a second.
        return time.clock_gettime(~self.pid << 3 | _SCHEDULED)

    def push_seconds(self, rank: int, step: int) -> float:
        """How long the push of that shard took, from its first message to the acknowledgement, as its log says."""
        for match in _PUSH.finditer(self._log()):
            if (int(match[1]), int(match[2])) == (rank, step):
                return float(match[3])
        raise BenchError(f"{self.memory_dir}: expected the push of step {step} in the agent's log, found none")

    def flush_seconds(self, step: int) -> float:
        """How long its flusher took for that step, from the look into persist_dir until `latest` named it, as its log
        says. Without the start of the process."""
        found = [float(match[3]) for match in _FLUSH.finditer(self._log()) if int(match[1]) == step]
        if not found:
            raise BenchError(f"{self.memory_dir}: expected the flush of step {step} in the agent's log, found none")
        return found[-1]

    def _log(self) -> str:
        logs = self.memory_dir.glob(f"*/{LOG_NAME}*")
        return "".join(log.read_text(errors="replace") for log in logs)


def agent_of(memory_dir: Path) -> Agent:
    directory = open_directory(str(memory_dir), JOB, create=False)
    try:
        holder = AgentLock(directory).holder()
    finally:
        directory.close()
    if holder is None:
        raise BenchError(f"{memory_dir}: expected an agent, found none")
    return Agent(memory_dir, holder.pid)


def end_agents(directory: Path) -> float:
    """Ends all that serve a directory below this one; returns the CPU seconds that they took in all."""
    seconds = 0.0
    for agent in _below(directory):
        with contextlib.suppress(OSError):
            seconds += agent.cpu_seconds()
        with contextlib.suppress(FlashError):  # it may end by itself just now
            stop_agent(str(agent.memory_dir), JOB, _STOP_SECONDS, kill=True)
    return seconds


def _below(directory: Path) -> Iterator[Agent]:
    for lock in directory.rglob(LOCK_NAME):
        with contextlib.suppress(BenchError, FlashError, OSError):
            yield agent_of(lock.parent.parent)
