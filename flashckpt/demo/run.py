"""Follows one launch of the training script by what its ranks write. Each rank has its own file, so lines never mix."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flashckpt.errors import FlashError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.testing import Launch, Process

_LINE = re.compile(
    r"rank (?P<rank>\d+): (?:"
    r"step (?P<step>\d+) loss (?P<loss>\S+)"
    r"|resumed step (?P<base>\d+) from (?P<source>\w+) in (?P<seconds>[\d.]+) s"
    r"|weights (?P<digest>[0-9a-f]+))"
)
_LAST_LINES = 20


class JobFailedError(FlashError):
    """Raised when the training script of the demo ended by itself with an error."""

    code = "FC-DEMO-001"


@dataclass(frozen=True, slots=True)
class Said:
    """Holds one line of one rank, and when it was read."""

    kind: Literal["step", "resumed", "weights"]
    rank: int
    at: float  # time.monotonic()
    step: int = 0
    loss: str = ""  # every digit
    source: str = ""
    seconds: float = 0.0
    digest: str = ""


def parse(line: str, at: float) -> Said | None:
    """Parse a line. None if it is not from the script: a warning, for example."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    rank = int(match["rank"])
    if match["step"] is not None:
        return Said("step", rank, at, step=int(match["step"]), loss=match["loss"])
    if match["base"] is not None:
        seconds = float(match["seconds"])
        return Said("resumed", rank, at, step=int(match["base"]), source=match["source"], seconds=seconds)
    return Said("weights", rank, at, digest=match["digest"])


@dataclass(slots=True)
class Run:
    """Holds what one launch has reported so far."""

    world: int
    started_at: float = 0.0
    said: list[Said] = field(default_factory=list)

    def of(self, kind: str, rank: int | None = None) -> list[Said]:
        return [one for one in self.said if one.kind == kind and rank in (None, one.rank)]

    def losses(self, rank: int) -> dict[int, str]:
        """Return the losses by step, as that rank wrote them. A loss is the mean over all ranks, so they must agree."""
        return {one.step: one.loss for one in self.of("step", rank)}

    def reached(self, rank: int) -> int:
        """Return the last step that this rank ended; 0 if it ended none."""
        return max((one.step for one in self.of("step", rank)), default=0)

    @property
    def furthest(self) -> int:
        return max(map(self.reached, range(self.world)))

    def resumed(self, rank: int) -> Said | None:
        return next(iter(self.of("resumed", rank)), None)

    def digests(self) -> dict[int, str]:
        return {one.rank: one.digest for one in self.of("weights")}

    def first_after(self, step: int) -> Said | None:
        """Return the first line of any rank about a step after this one."""
        return next((one for one in self.of("step") if one.step > step), None)


class Follower:
    """Reads what the ranks of a launch write, as they write it."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.run = Run(launch.world, time.monotonic())
        self._read = [0] * len(launch.processes)

    def poll(self) -> list[Said]:
        """Return what is new, in the order of the ranks."""
        fresh: list[Said] = []
        for number, process in enumerate(self.launch.processes):
            with process.log_path.open("rb") as log:
                log.seek(self._read[number])
                whole = log.read().rpartition(b"\n")[0]  # a line that is still being written is read the next time
            if whole:
                self._read[number] += len(whole) + 1
                fresh += _parse_all(whole.decode(errors="replace").splitlines())
        self.run.said += fresh
        return fresh

    def ended(self) -> list[int]:
        """Return the ranks whose process has ended, for whatever reason."""
        return [rank for rank, process in enumerate(self.launch.processes) if process.returncode is not None]

    def raise_if_failed(self) -> None:
        for process in self.launch.processes:
            if process.returncode not in (None, 0):
                code = process.returncode
                raise JobFailedError(f"{process.what} ended with exit code {code}", hint=_last_words([process]))

    def last_words(self) -> str:
        return _last_words(self.launch.processes)


def _parse_all(lines: Iterable[str]) -> list[Said]:
    now = time.monotonic()
    return [said for line in lines if (said := parse(line, now)) is not None]


def _last_words(processes: Sequence[Process]) -> str:
    """Return the last lines of these processes that are not progress of the training."""
    found: list[str] = []
    for process in processes:
        lines = [line for line in process.output.splitlines() if parse(line, 0.0) is None]
        found += [f"{process.what}: {line}" for line in lines[-_LAST_LINES:]]
    return "the last lines written:\n" + "\n".join(found) if found else "nothing was written"
