"""Undoes what a manager has hooked into the process, even if it is dropped without close()."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.training.gate import OptimizerGate
    from flashckpt.training.stopping import SignalHandlers


class Hooks:
    """The hooks of one manager. Does not refer to the manager, so that the manager can become garbage."""

    def __init__(self, gate: OptimizerGate) -> None:
        self._gate = gate
        self.signals: SignalHandlers | None = None

    def drop(self) -> None:
        """Undoes the hooks when the manager is garbage. Called in any thread, between any two instructions."""
        self._gate.retire()
        if self.signals is not None:
            self.signals.abandon()
