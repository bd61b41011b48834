"""flashckpt on two nodes of this machine: each save is replicated to the other node's agent, over mutual TLS.

This process is the one rank of the first node and has the whole state. The second node has a rank too, in a process
of its own (bench/companion.py), with next to nothing to save: what is measured goes one way.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

import flashckpt
from bench.companion import config_of, rendezvous, wrapped
from bench.contenders.base import Synchronous
from bench.errors import BenchError
from bench.process import UNTIL_REPLICATED
from flashckpt import Checkpointer

if TYPE_CHECKING:
    from typing import IO

    from bench.contenders.base import Details
    from bench.state import StateDict
    from flashckpt import SaveHandle

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE = 120.0


class FlashReplicated(Synchronous):
    """Checkpointer.save as far as SEALED; `settle` waits for REPLICATED and says how long that took from there."""

    _handle: SaveHandle | None = None
    _log: str | None = "debug"  # the agents inherit it: their logs then say how long each push took

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = wrapped(state["model"], state["trainer"])
        if self._log is not None:
            os.environ["FLASHCKPT_LOG"] = self._log
        self._companion = _Companion(directory)
        try:
            rendezvous(directory, rank=0)
            self._checkpointer = Checkpointer(config_of(directory, rank=0))
        except BaseException:
            self._companion.kill()
            raise
        return {}

    def save(self, step: int) -> Details:
        self._companion.tell(f"save {step}")
        self._handle = self._checkpointer.save(step, self._state)
        self._sealed_at = time.perf_counter()
        return dataclasses.asdict(self._handle.timings)

    def settle(self) -> Details:
        """In a training loop nobody calls it between saves, only after the last one."""
        details: Details = {}
        if self._handle is not None:
            outcome = self._handle.wait("replicated", _DEADLINE)
            details[UNTIL_REPLICATED] = time.perf_counter() - self._sealed_at
            if outcome is not flashckpt.Outcome.OK:
                raise BenchError(f"save: expected it replicated, found {self._handle!r}")
            self._handle = None
        self._companion.settle()
        return details

    def load(self) -> Details:
        self._companion.tell("load")
        result = self._checkpointer.load(self._state)
        self._companion.settle()
        if result is None or result.source != "memory":
            raise BenchError(f"load: expected a checkpoint from memory, found {result!r}")
        return dataclasses.asdict(result.timings)

    def close(self) -> None:
        self._companion.tell("close")
        self._checkpointer.close()
        self._companion.wait_ended()
        dist.destroy_process_group()


class FlashUnlogged(FlashReplicated):
    """As above with agents that log what a user's do."""

    _log = None


class _Companion:
    """The other node's rank. Its commands are answered in order; `settle` collects the answers."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.companion", str(directory)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._unanswered = 0

    def tell(self, command: str) -> None:
        _pipe(self._process.stdin).write(command + "\n")
        _pipe(self._process.stdin).flush()
        self._unanswered += 1

    def settle(self) -> None:
        while self._unanswered:
            answer = _pipe(self._process.stdout).readline().strip()
            if answer != "ok":
                raise BenchError(f"the other node's rank: expected ok, found {answer or 'that it ended'}")
            self._unanswered -= 1

    def wait_ended(self) -> None:
        self.settle()
        self._process.wait(_DEADLINE)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise BenchError("the other node's rank: expected a pipe to it")
    return pipe
