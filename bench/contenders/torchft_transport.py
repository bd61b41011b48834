"""torchft's transports: how a replica that comes back gets the state of a healthy one.

This process is the one that comes back and loads; the healthy one is bench/donor.py, in a process of its own. `save`
tells it which state it has. torchft keeps no checkpoint: when the healthy one is gone too, there is nothing to load.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchft.checkpointing.http_transport import HTTPTransport  # type: ignore[import-not-found]
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store  # type: ignore[import-not-found]

from bench.contenders.base import Synchronous
from bench.contenders.live import copy_into
from bench.errors import BenchError
from bench.state import tensors_of

if TYPE_CHECKING:
    from bench.contenders.base import Details
    from bench.state import StateDict

_ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = timedelta(seconds=60)
DONOR, HEALED = 0, 1  # ranks


class Http(Synchronous):
    """HTTPTransport.recv_checkpoint, unchunked, which gives new tensors; then a copy into the live ones."""

    kind = "http"
    _step = 0

    def set_up(self, state: StateDict, directory: Path) -> Details:
        logging.disable(logging.WARNING)
        self._state = state
        tensors = tensors_of(state)
        command = [sys.executable, "-m", "bench.donor", self.kind, str(len(tensors)), str(tensors[0].nbytes)]
        self._donor = subprocess.Popen(
            [*command, str(directory)], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self._connect(self._answer())
        except BaseException:
            self._end()
            raise
        return {}

    def _connect(self, told: str) -> None:
        self._metadata = told
        self._transport: Any = HTTPTransport(TIMEOUT, num_chunks=0)

    def save(self, step: int) -> Details:
        self._step = step
        self._tell(f"have {step}")
        self._answer()
        return {}

    def load(self) -> Details:
        copy_into(self._state, self._transport.recv_checkpoint(DONOR, self._metadata, self._step, TIMEOUT))
        return {}

    def close(self) -> None:
        self._tell("close")
        self._answer()
        self._transport.shutdown(wait=False)
        self._end()

    def _tell(self, command: str) -> None:
        assert self._donor.stdin is not None
        self._donor.stdin.write(command + "\n")
        self._donor.stdin.flush()

    def _answer(self) -> str:
        assert self._donor.stdout is not None
        answer = self._donor.stdout.readline().strip()
        if not answer:
            raise BenchError("torchft: expected an answer of the healthy replica, found that it ended")
        return answer

    def _end(self) -> None:
        self._donor.kill()
        self._donor.wait()


class InPlace(Http):
    """PGTransport over gloo, received straight into the live tensors."""

    kind = "pg"

    def _connect(self, told: str) -> None:
        group = ProcessGroupGloo(timeout=TIMEOUT)
        reconfigure_with_store(group, told, HEALED, 2)
        self._transport = PGTransport(group, TIMEOUT, torch.device("cpu"), state_dict=lambda: self._state)

    def load(self) -> Details:
        self._tell("send")
        loaded = self._transport.recv_checkpoint(DONOR, "", self._step, TIMEOUT)
        self._state["trainer"].update(loaded["trainer"])
        self._answer()
        return {}

    def close(self) -> None:
        self._tell("close")
        self._answer()
        self._end()
