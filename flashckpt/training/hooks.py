"""What a manager has hooked into the process: undone also where the manager is dropped without close()."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.training.gate import OptimizerGate
    from flashckpt.training.stopping import SignalHandlers


class Hooks:
    """Does not refer to the manager, so that this can be dropped."""

    def __init__(self, gate: OptimizerGate) -> None:
        self._gate = gate
        self.signals: SignalHandlers | None = None

    def drop(self) -> None:
        """Called when the manager is garbage: in any thread, between any two instructions."""
        self._gate.retire()
        if self.signals is not None:
            self.signals.abandon()
