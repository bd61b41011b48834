"""The parent's side of a worker: start it, ask it, watch its memory, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from bench.errors import BenchError
from bench.footprint import footprint_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from bench.spec import StateSpec

UNTIL_REPLICATED = "until_replicated"  # among the details of a save: seconds from its return
_ROOT = Path(__file__).resolve().parent.parent
_DEADLINE = 600.0  # seconds for one command; the slowest takes a tenth of that
_SAMPLE_SECONDS = 0.001
_LAST_LINES = 20
_HELPERS_SECONDS = 2.0
_TRACKER = "multiprocessing.resource_tracker"
_FOOTPRINT_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Answer:
    """What one command took, and what the contender itself says of it."""

    seconds: float
    details: dict[str, float]
    anonymous_growth_bytes: int = 0  # highest above where it began; 0 where nobody watched
    others_bytes: tuple[int, ...] = ()  # highest of each other process that was watched
    safe: float = 0.0  # seconds of a save until the checkpoint survives its process
    blocked: tuple[float, ...] = ()  # seconds of each save of a training loop


class Worker:
    """One contender in a process. A context manager: leaving it ends the process, come what may."""

    def __init__(
        self, contender: str, spec: StateSpec, directory: Path, *, python: Path | None = None, limit: float = _DEADLINE
    ) -> None:
        """`python` of the contender's own environment, if it has one; `limit` in seconds for one command."""
        self.contender = contender
        self._limit = limit
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        # A setting of the shell would make this another measurement than the one that is reported.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHCKPT_")}
        # What libraries print is of no interest, until one of them ends without an answer.
        self._log = directory.with_name(f"{directory.name}.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", "bench.worker"],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C is for the parent, which then ends its workers.
                start_new_session=True,
            )
        self._pending = b""
        try:
            self.opened = self._ask(
                {
                    "do": "set_up",
                    "contender": contender,
                    "tensors": spec.tensors,
                    "tensor_bytes": spec.tensor_bytes,
                    "directory": str(directory),
                }
            )
        except BaseException:
            self.kill()
            raise

    def save(self, step: int, *, watch: bool = False, watch_others: Sequence[int] = ()) -> Answer:
        """`watch` its anonymous memory; `watch_others`: ids of other processes whose own memory to watch."""
        return self._ask({"do": "save", "step": step}, watch=watch, watch_others=watch_others)

    def save_watching_footprint(self, step: int) -> int:
        """The most memory that it takes during a save, and whatever completes it. Looking slows it down: not timed."""
        self._send({"do": "save", "step": step})
        highest = self.footprint_bytes()
        while not self._readable(_FOOTPRINT_SAMPLE_SECONDS):
            highest = max(highest, self.footprint_bytes())
        self._receive()
        return highest

    def footprint_bytes(self) -> int:
        return footprint_bytes(self.pid, self._directory)

    def is_isolated(self, step: int) -> bool:
        self._send({"do": "isolate", "step": step})
        return cast("bool", self._receive()["isolated"])

    def train(self, first: int, steps: int, interval: int, passes: int = 1) -> Answer:
        """So many training steps with a save at the first of every `interval`; 0 = none."""
        return self._ask({"do": "train", "first": first, "steps": steps, "interval": interval, "passes": passes})

    def load(self, *, watch: bool = False) -> Answer:
        return self._ask({"do": "load"}, watch=watch)

    def expect(self, digest: str | None = None) -> str:
        """Sets what loads have to bring back: what was saved last, or the digest another worker saved."""
        self._send({"do": "expect", "digest_of_saved": digest})
        return cast("str", self._receive()["digest"])

    def close(self) -> None:
        self._send({"do": "close"})
        self._receive()
        self._process.wait(timeout=60)
        # Helpers of multiprocessing clean up after it, if they are let.
        deadline = time.monotonic() + _HELPERS_SECONDS
        while _is_group(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """And whatever helpers it started: they are in its session."""
        members = _members(self.pid)
        trackers = [pid for pid in members if _TRACKER in _command(pid)]
        for pid in members:
            if pid not in trackers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        # It removes the semaphores of those that were killed from /dev/shm, and ends by itself.
        deadline = time.monotonic() + _HELPERS_SECONDS
        while any(_TRACKER in _command(pid) for pid in trackers) and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._process.poll() is None:
            self.close()
        else:
            self.kill()

    def _ask(self, command: dict[str, Any], *, watch: bool = False, watch_others: Sequence[int] = ()) -> Answer:
        before = highest = _memory_bytes(self.pid, "RssAnon") if watch else 0
        others = [0] * len(watch_others)
        self._send(command)
        while (watch or others) and not self._readable(_SAMPLE_SECONDS):
            if watch:
                highest = max(highest, _memory_bytes(self.pid, "RssAnon"))
            others = [
                max(so_far, _memory_bytes(pid, "RssAnon")) for so_far, pid in zip(others, watch_others, strict=True)
            ]
        reply = self._receive()
        return Answer(
            seconds=reply["seconds"],
            details=reply["details"],
            anonymous_growth_bytes=highest - before,
            others_bytes=tuple(others),
            safe=reply.get("safe", 0.0),
            blocked=tuple(reply.get("blocked", ())),
        )

    def _send(self, command: dict[str, Any]) -> None:
        pipe = cast("BinaryIO", self._process.stdin)
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._gone(command["do"]) from None

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit
        pipe = cast("BinaryIO", self._process.stdout)
        while b"\n" not in self._pending:
            if not self._readable(deadline - time.monotonic()):
                raise BenchError(f"{self.contender}: no answer within {self._limit:.0f} s")
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                raise self._gone("its command")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.contender} failed:\n{reply['error']}")
        return reply

    def _readable(self, timeout: float) -> bool:
        pipe = cast("BinaryIO", self._process.stdout)
        return bool(select.select([pipe], [], [], max(0.0, timeout))[0])

    def _gone(self, doing: str) -> BenchError:
        status = self._process.wait()
        said = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:] if self._log.exists() else []
        return BenchError("\n".join([*said, f"{self.contender}: ended during {doing} with status {status}"]))


def _members(session: int) -> list[int]:
    """Processes of the session that a worker leads."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                stat = Path(entry.path, "stat").read_text()
                if int(stat.rpartition(")")[2].split()[3]) == session:
                    found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    """Empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def _memory_bytes(pid: int, field: str) -> int:
    """Seen from outside, so that watching takes no time of the one that is watched."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
