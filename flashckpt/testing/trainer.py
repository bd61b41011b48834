"""Runs a rank that saves and loads on command, so that a test drives real trainers without a launcher for every step.

    torchrun … -m flashckpt.testing.trainer --directory DIR --config '{"replicas": 1}' --mebibytes 4

Commands are lines of JSON in DIR/commands, the same for all ranks; what happened is written to DIR/rank<N>.jsonl.
Its state is a function of step and rank, so that what comes back from a load can be judged without a copy.

| command | fields | events |
|---|---|---|
| save | step, level, timeout | saved (outcome, seconds of the call), then level (level reached or outcome, seconds) |
| run | first, last, pause | saved for each step; done. Does not wait for any level |
| wait | step, level, timeout | level |
| load | step or null, arguments | loaded (step, source, digest, expected, matches; step null: nothing saved yet) |
| status | | status (text of Checkpointer.status()) |
| close | | closed |
| exit | code | ended |

Whatever raises becomes the event `error` (type, code, message), and the rank goes on to its next command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import flashckpt
from flashckpt.errors import ConfigError, FlashError
from flashckpt.testing.trainers import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt import Checkpointer, SaveHandle

_POLL_SECONDS = 0.005
_TENSORS = 4
_SHARED_ELEMENTS = 16384  # the same on every rank: 64 KiB


def main() -> None:
    options = parse_arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    report = options.directory / f"rank{rank}.jsonl"
    # Workers that torchrun restarted must not repeat what their predecessor was told. The number of restarts does not
    # tell whether they were, because each node counts its own.
    position = (options.directory / COMMANDS).stat().st_size if report.exists() else 0
    journal = Journal(report, rank)
    journal.tell("started", pid=os.getpid(), world=world, restarts=restarts)
    if world > 1:
        dist.init_process_group("gloo")
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig.from_dict(json.loads(options.config))) as checkpointer:
        journal.tell("ready", pid=os.getpid(), restarts=restarts)
        rank_at_work = Rank(checkpointer, journal, rank, int(options.mebibytes * (1 << 20)))
        code = rank_at_work.obey(follow(options.directory / COMMANDS, position))
    if world > 1:
        dist.destroy_process_group()
    journal.tell("ended", code=code)
    raise SystemExit(code)


def make_state(step: int, rank: int, size_bytes: int) -> dict[str, Any]:
    """Return what rank `rank` holds at `step`; no two steps, ranks or tensors are alike."""
    elements = max(1, size_bytes // 4 // _TENSORS)
    mine = {f"tensor{i}": _pattern(elements, step, rank + 1, i) for i in range(_TENSORS)}
    return {"shared": _pattern(_SHARED_ELEMENTS, step, 0, 0), "mine": flashckpt.PerRank(mine)}


def digest(state: dict[str, Any]) -> str:
    """Return a digest of every bit of the state."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in (state["shared"], *state["mine"].value.values()):
        found.update(tensor.numpy())
    return found.hexdigest()


class Rank:
    """Runs the commands, one after the other."""

    def __init__(self, checkpointer: Checkpointer, journal: Journal, rank: int, size_bytes: int) -> None:
        self._checkpointer, self._journal = checkpointer, journal
        self._rank, self._size_bytes = rank, size_bytes
        self._handles: dict[int, tuple[SaveHandle, float]] = {}  # by step, with the time of the call

    def obey(self, commands: Iterator[dict[str, Any]]) -> int:
        """Run commands until `exit`; returns the exit code."""
        for command in commands:
            if command["ranks"] is not None and self._rank not in command["ranks"]:
                continue
            if command["do"] == "exit":
                return int(command.get("code", 0))
            self._journal.number = command["number"]
            try:
                self._do(command)
            except Exception as error:
                code = error.code if isinstance(error, FlashError) else ""
                self._journal.tell("error", type=type(error).__name__, code=code, message=str(error))
        return 0

    def _do(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "save":
                self._save(command["step"])
                self._wait(command["step"], command["level"], command["timeout"])
            case "run":
                for step in range(command["first"], command["last"] + 1):
                    self._save(step)
                    time.sleep(command["pause"])
                self._journal.tell("done")
            case "wait":
                self._wait(command["step"], command["level"], command["timeout"])
            case "load":
                self._load(command["step"], command["arguments"])
            case "status":
                self._journal.tell("status", text=repr(self._checkpointer.status()))
            case "close":
                self._checkpointer.close()
                self._journal.tell("closed")
            case other:
                raise ConfigError(f"trainer: expected a command, found {other!r}")

    def _save(self, step: int) -> None:
        state = make_state(step, self._rank, self._size_bytes)
        began = time.monotonic()
        handle = self._checkpointer.save(step, state)
        self._handles[step] = (handle, began)
        # What is saved is the value at the time of the call: later changes must not matter.
        state["shared"].zero_()
        self._journal.tell(
            "saved",
            step=step,
            outcome=handle.outcome,
            reason=handle.reason,
            generation=handle.generation,
            seconds=time.monotonic() - began,
        )

    def _wait(self, step: int, level: str, timeout: float) -> None:
        handle, began = self._handles[step]
        outcome = handle.wait(level, timeout)
        self._journal.tell(
            "level",
            step=step,
            level=handle.level.name.lower(),
            outcome=outcome,
            reason=handle.reason,
            seconds=time.monotonic() - began,
        )

    def _load(self, step: int | None, arguments: dict[str, Any]) -> None:
        state = make_state(0, self._rank, self._size_bytes)
        began = time.monotonic()
        result = self._checkpointer.load(state, step, **arguments)
        seconds = time.monotonic() - began
        if result is None:
            self._journal.tell("loaded", step=None, source=None, seconds=seconds)
            return
        found, expected = digest(state), digest(make_state(result.step, self._rank, self._size_bytes))
        self._journal.tell(
            "loaded",
            step=result.step,
            source=result.source,
            digest=found,
            expected=expected,
            matches=found == expected,
            stepped_over=result.stepped_over,
            seconds=seconds,
        )


class Journal:
    """Writes what this rank reports: one line per event, never a part of one."""

    def __init__(self, path: Path, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._rank = rank
        self.number: int | None = None  # number of the command that is running

    def tell(self, event: str, **fields: Any) -> None:
        line = {"event": event, "rank": self._rank, "number": self.number, "time": time.time(), **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def follow(path: Path, position: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of a growing file as they come, forever."""
    with path.open("rb") as file:
        file.seek(position)
        rest = b""
        while True:
            read = file.read()
            if not read:
                time.sleep(_POLL_SECONDS)
                continue
            *lines, rest = (rest + read).split(b"\n")
            yield from map(json.loads, lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A rank that saves and loads on command.")
    parser.add_argument("--directory", type=Path, required=True, help="of commands and reports")
    parser.add_argument("--config", default="{}", help="fields of CheckpointConfig, as JSON")
    parser.add_argument("--mebibytes", type=float, default=1.0, help="of state for each rank")
    return parser.parse_args()


def _pattern(elements: int, *key: int) -> torch.Tensor:
    """Return numbers of a generator seeded with `key` draws: bytes of any value, NaNs included if read as floats."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (elements,), dtype=torch.int32, generator=generator)


if __name__ == "__main__":
    main()
