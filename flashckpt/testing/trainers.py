"""Drives flashckpt.testing.trainer from a test: sends commands to real ranks and waits for their reports."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from flashckpt.errors import DeadlineError, PeerError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from flashckpt.testing.launch import Launch

COMMANDS = "commands"
_POLL_SECONDS = 0.005
Event = dict[str, Any]


class Trainers:
    """Drives all ranks of one launch. Commands go to all of them, or to `ranks`; each runs its commands in order."""

    def __init__(self, launch: Launch, directory: Path) -> None:
        self.launch = launch
        self.directory = directory
        self._sent = 0

    @staticmethod
    def prepare(directory: Path, config: Mapping[str, Any], mebibytes: float) -> list[str]:
        """Make the directory. Returns the arguments of the script."""
        directory.mkdir()
        (directory / COMMANDS).touch()
        return ["--directory", str(directory), "--config", json.dumps(dict(config)), "--mebibytes", str(mebibytes)]

    @property
    def world(self) -> int:
        return self.launch.world

    def send(self, do: str, *, ranks: Collection[int] | None = None, **arguments: Any) -> int:
        """Append a command and return its number, which is in every event that results from it."""
        number = self._sent
        self._sent += 1
        command = {"number": number, "do": do, "ranks": None if ranks is None else sorted(ranks), **arguments}
        with (self.directory / COMMANDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(command) + "\n")
        return number

    def events(self, rank: int) -> list[Event]:
        """Return everything that a rank has reported so far."""
        try:
            text = (self.directory / f"rank{rank}.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        # The last line may be half written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(
        self, event: str, *, timeout: float = 60.0, ranks: Collection[int] | None = None, **fields: Any
    ) -> dict[int, Event]:
        """Wait for the first event of that name with these fields, of each rank.

        PeerError, with its last output, if a rank ended or reported an error for the same command before;
        DeadlineError, naming the ranks that are missing, if the time is over.
        """
        deadline = time.monotonic() + timeout
        found: dict[int, Event] = {}
        wanted = sorted(range(self.world) if ranks is None else ranks)
        while True:
            ended = self._ended()  # checked first: what was written before the end counts
            missing = [rank for rank in wanted if rank not in found]
            for rank in missing:
                for one in self.events(rank):
                    if one["event"] == event and all(one.get(name) == value for name, value in fields.items()):
                        found[rank] = one
                        break
                    if one["event"] == "error" and event != "error" and one["number"] == fields.get("number"):
                        raise PeerError(f"rank {rank}: expected {event!r}, found {one['type']}: {one['message']}")
            missing = [rank for rank in wanted if rank not in found]
            if not missing:
                return found
            if ended:
                raise PeerError(
                    f"ranks {missing}: expected {event!r}, found that {ended} ended; last output:\n{self.launch.output}"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"expected {event!r} {fields or ''} within {timeout} s, found nothing of ranks {missing}; "
                    f"last output:\n{self.launch.output}"
                )
            time.sleep(_POLL_SECONDS)

    def wait_started(self, timeout: float = 120.0) -> dict[int, Event]:
        """Wait until every rank has its Checkpointer."""
        return self.wait_for("ready", timeout=timeout)

    def save(self, step: int, level: str = "sealed", *, timeout: float = 60.0) -> dict[int, Event]:
        """Save a step on every rank and wait for the level, or for another outcome."""
        number = self.send("save", step=step, level=level, timeout=timeout)
        return self.wait_for("level", number=number, timeout=timeout + 10)

    def load(self, step: int | None = None, *, timeout: float = 60.0, **arguments: Any) -> dict[int, Event]:
        """Load on every rank. Each event has `step`, `source`, `digest`, and whether the state is what was saved."""
        number = self.send("load", step=step, arguments=arguments)
        return self.wait_for("loaded", number=number, timeout=timeout)

    def status(self, *, timeout: float = 60.0) -> dict[int, Event]:
        number = self.send("status")
        return self.wait_for("status", number=number, timeout=timeout)

    def stop(self, *, timeout: float = 60.0) -> list[int]:
        """End the ranks by command. Returns the exit codes."""
        self.send("exit")
        return self.launch.wait(timeout)

    def kill(self) -> None:
        """Kill all ranks and their launchers with SIGKILL; agents stay."""
        self.launch.kill()

    def _ended(self) -> list[str]:
        return [
            f"{process.what} ({process.returncode})"
            for process in self.launch.processes
            if process.returncode is not None
        ]
