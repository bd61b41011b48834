"""flashckpt on one node through its public interface, with the settings a user gets."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import flashckpt
from bench.agents import JOB
from bench.contenders.base import Synchronous
from bench.errors import BenchError

# Both are imported by the first use; imports are not what is measured.
from flashckpt import CheckpointConfig, Checkpointer

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from bench.contenders.base import Details
    from bench.state import StateDict
    from flashckpt import SaveHandle

# An agent that a killed run left behind does not stay long.
LINGER_SECONDS = 60.0
_DEADLINE = 120.0


class Flash(Synchronous):
    """Checkpointer.save to SEALED, checksums included; Checkpointer.load with every checksum verified."""

    _agent: Literal["auto", "off"] = "auto"

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        config = CheckpointConfig(
            job=JOB, memory_dir=str(directory), on_save_error="raise", agent=self._agent, agent_linger=LINGER_SECONDS
        )
        self._checkpointer = Checkpointer(config)
        return {}

    def save(self, step: int) -> Details:
        handle = self._checkpointer.save(step, self._state)
        if handle.outcome is not flashckpt.Outcome.OK or handle.level < flashckpt.Level.SEALED:
            raise BenchError(f"save of step {step}: expected ok and sealed, found {handle!r}")
        return dataclasses.asdict(handle.timings)

    def load(self) -> Details:
        result = self._checkpointer.load(self._state)
        if result is None or result.source != "memory":
            raise BenchError(f"load: expected a checkpoint from memory, found {result!r}")
        return dataclasses.asdict(result.timings)

    def close(self) -> None:
        self._checkpointer.close()


class FlashOverlapped(Flash):
    """save(overlap=True): the copy runs beside forward and backward; the gate, which the CheckpointManager installs at
    optimizer.step(), waits for what is left of it.
    """

    _handle: SaveHandle | None = None

    def save(self, step: int) -> Details:
        self.finish()
        self._handle = self._checkpointer.save(step, self._state, overlap=True)
        return {}

    def gate(self) -> Details:
        self._wait("staged")
        return {}

    def finish(self) -> Details:
        self._wait("sealed")
        return {}

    def _wait(self, level: Literal["staged", "sealed"]) -> None:
        if self._handle is not None and self._handle.wait(level, _DEADLINE) is not flashckpt.Outcome.OK:
            raise BenchError(f"save: expected it {level}, found {self._handle!r}")


class FlashOff(Flash):
    """As above, without an agent: the trainer manages its slots itself, and nothing is replicated."""

    _agent = "off"


class FlashPrewarmed(Flash):
    """As Flash, with prewarm() before the first save, as a trainer would call it while it starts."""

    def set_up(self, state: StateDict, directory: Path) -> Details:
        super().set_up(state, directory)
        began = time.perf_counter()
        self._checkpointer.prewarm(state)
        return {"prewarm": time.perf_counter() - began}
