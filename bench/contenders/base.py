"""What every contender has to offer, and what the clock covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from bench.state import StateDict

Details = dict[str, float]  # seconds by stage, as far as the contender tells them itself


class Contender(Protocol):
    """One way to save a state to this machine's memory and to load it back.

    Everything is called from one thread of one worker process. `directory` is the contender's own, on tmpfs,
    and removed by the harness; what lies in it when a process ends is what its successor finds.
    """

    def set_up(self, state: StateDict, directory: Path) -> Details:
        """Imports and opens what it needs; keeps `state` to save from and load into. Allocates nothing ahead,
        unless that is what the contender is about.
        """
        ...

    def save(self, step: int) -> Details:
        """Timed. Returns once the checkpoint survives the end of this process and the state may be changed.

        A contender that returns earlier has to say so in its row. At most two checkpoints may be kept.
        """
        ...

    def settle(self) -> Details:
        """Not timed, called after each save: waits for work behind its back, removes what is too old."""
        ...

    def load(self) -> Details:
        """Timed. Fills the state, in place, from the newest checkpoint in the directory, whoever made it."""
        ...

    def close(self) -> None: ...
