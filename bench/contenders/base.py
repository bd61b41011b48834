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
        """Timed as *blocked*. Returns when the contender's own call returns. If the save before is still under way
        and the contender can't have two, it is waited for here. At most two checkpoints may be kept.
        """
        ...

    def gate(self) -> Details:
        """Timed as *blocked* too. Returns once the state may be changed: for contenders whose documentation asks the
        caller to wait for that. Called before the first change after a save.
        """
        ...

    def finish(self) -> Details:
        """Timed as *safe*, with the two above. Returns once the checkpoint survives the end of this process."""
        ...

    def settle(self) -> Details:
        """Not timed, called after each save: waits for what comes later, removes what is too old."""
        ...

    def load(self) -> Details:
        """Timed. Fills the state, in place, from the newest checkpoint in the directory, whoever made it."""
        ...

    def close(self) -> None: ...


class Synchronous:
    """The part of a contender that is done when `save` returns."""

    def gate(self) -> Details:
        return {}

    def finish(self) -> Details:
        return {}

    def settle(self) -> Details:
        return {}

    def close(self) -> None:
        pass
