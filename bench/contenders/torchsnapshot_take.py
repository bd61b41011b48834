"""torchsnapshot to tmpfs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found]

from bench.contenders.base import Synchronous
from bench.contenders.step_files import StepFiles

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details


class TorchSnapshot(Synchronous):
    """Snapshot.take; restore fills the live tensors by itself."""

    def set_up(self, state: dict[str, Any], directory: Path) -> Details:
        self._live = state
        # Its StateDict is a mapping of its own: the tensors are the live ones, the plain values are copied over.
        self._app_state = {"model": StateDict(**state["model"]), "trainer": StateDict(**state["trainer"])}
        self._files = StepFiles(directory)
        return {}

    def save(self, step: int) -> Details:
        self._app_state["trainer"].update(self._live["trainer"])
        Snapshot.take(str(self._files.new(step)), self._app_state)
        return {}

    def settle(self) -> Details:
        self._files.make_room()
        return {}

    def load(self) -> Details:
        Snapshot(str(self._files.newest())).restore(self._app_state)
        self._live["trainer"].update(self._app_state["trainer"])
        return {}


class TorchSnapshotAsync(TorchSnapshot):
    """Snapshot.async_take: returns after staging."""

    _pending: Any = None

    def save(self, step: int) -> Details:
        self.finish()
        self._app_state["trainer"].update(self._live["trainer"])
        self._pending = Snapshot.async_take(str(self._files.new(step)), self._app_state)
        return {}

    def finish(self) -> Details:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return {}

    def close(self) -> None:
        self.finish()
