"""One launch of the training script by torchrun, followed event by event through a FIFO."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashckpt.demo.processes import kill_descendants
from flashckpt.errors import DeadlineError, FlashError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("train.py")
_READ_BYTES = 1 << 16
# So that a job that fails without a word is noticed soon.
_LOOK_SECONDS = 0.5


class JobFailedError(FlashError):
    """The training script of the demo ended by itself with an error."""

    code = "FC-DEMO-001"


@dataclass(frozen=True, slots=True)
class Event:
    """One line that one rank wrote, and when the launcher read it."""

    kind: str  # ready, loaded, step, saved, done
    rank: int
    step: int
    details: Mapping[str, Any]
    at: float  # time.monotonic()


@dataclass(slots=True)
class Run:
    """What one launch told."""

    ranks: int
    started_at: float
    events: list[Event] = field(default_factory=list)
    killed_at: float | None = None
    killed_processes: int = 0

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def losses(self) -> dict[int, str]:
        """Step → loss as an exact hexadecimal float, as rank 0 saw it; it is the mean over all ranks."""
        return {event.step: event.details["loss"] for event in self.of("step") if event.rank == 0}

    def saved_steps(self) -> list[int]:
        """Steps whose snapshot every rank reported as sealed."""
        ranks: dict[int, set[int]] = {}
        for event in self.of("saved"):
            if event.details["outcome"] == "ok":
                ranks.setdefault(event.step, set()).add(event.rank)
        return sorted(step for step, who in ranks.items() if len(who) == self.ranks)

    def first(self, kind: str) -> Event | None:
        return next((event for event in self.events if event.kind == kind and event.rank == 0), None)

    @property
    def digest(self) -> str:
        done = self.first("done")
        return "" if done is None else str(done.details["digest"])


class Job:
    """A context manager: whatever happens inside, no process is left afterwards."""

    def __init__(
        self,
        directory: Path,
        memory_dir: Path,
        *,
        ranks: int,
        steps: int,
        every: int,
        name: str,
        disabled: bool = False,
    ) -> None:
        self._log_path = directory / f"{name}.log"
        self._fifo_path = directory / f"{name}.fifo"
        self._command = [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0"),
            str(_SCRIPT),
            *("--steps", str(steps), "--every", str(every), "--progress", str(self._fifo_path)),
        ]
        inherited = os.environ.get("PYTHONPATH")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")},
            "FLASHCKPT_JOB": "demo",
            "FLASHCKPT_DISABLE": "1" if disabled else "0",
            "FLASHCKPT_MEMORY_DIR": str(memory_dir),
            # Equal sums need equal numbers of threads; torchrun would choose by the number of ranks.
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_PACKAGE_PARENT), *([inherited] if inherited else [])]),
        }
        self.run = Run(ranks, 0.0)
        self._buffer = b""

    def __enter__(self) -> Job:
        os.mkfifo(self._fifo_path, 0o600)
        # For reading and writing, so that neither side waits for the other and no rank's exit is an end of file.
        self._fifo = os.open(self._fifo_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.run.started_at = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # Ctrl-C on the terminal is for the demo, which then ends the job.
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        os.close(self._fifo)
        self._fifo_path.unlink()

    def follow(self, timeout: float) -> Iterator[Event]:
        """Events as they come, until the job ends well. Each has to come within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            readable, _, _ = select.select([self._fifo], [], [], _LOOK_SECONDS)
            # Looked at before reading: what was written before the end is then read.
            code = self._process.poll()
            for event in self._drain() if readable else ():
                yield event
                deadline = time.monotonic() + timeout
            if code is not None and not readable:
                if code != 0:
                    raise JobFailedError(f"torchrun ended with exit code {code}", hint=self._last_words())
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"expected a sign of life from the training script within {timeout:.0f} s, found none "
                    f"after {len(self.run.events)} events",
                    hint=self._last_words(),
                )

    def kill(self) -> None:
        """SIGKILL to torchrun and all ranks at once: no handler runs, nothing is flushed."""
        self.run.killed_at = time.monotonic()
        self.run.killed_processes = self._end()
        self._drain()

    def _end(self) -> int:
        count = kill_descendants()
        self._process.wait()
        return count

    def _drain(self) -> list[Event]:
        try:
            while data := os.read(self._fifo, _READ_BYTES):
                self._buffer += data
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        now = time.monotonic()
        fresh = []
        for line in lines:
            details = json.loads(line)
            fresh.append(Event(details.pop("event"), details.pop("rank"), details.pop("step"), details, now))
        self.run.events += fresh
        return fresh

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        # Behind this torchrun tells at length that a rank failed; why it did stands before.
        ends = [number for number, line in enumerate(lines) if "failed (exitcode" in line]
        lines = lines[: ends[0]] if ends else lines
        return "the last lines it wrote:\n" + "\n".join(lines[-30:]) if lines else "it wrote nothing"
