"""The gate at `optimizer.step()`: it holds the step while an overlapped save still copies what the step will change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flashckpt.save.overlap import wait_until_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.utils.hooks import RemovableHandle

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)


class OptimizerGate:
    """Hooks into every optimizer; with no copy under way a step costs one comparison."""

    def __init__(self, timeout: float, on_held: Callable[[SaveHandle, float], None]) -> None:
        self._timeout = timeout
        self._on_held = on_held
        self._copying: SaveHandle | None = None
        self._hooks: list[RemovableHandle] = []

    def install(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._hooks += [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close_behind(self, handle: SaveHandle) -> None:
        """From now on steps wait until `handle` is STAGED."""
        self._copying = handle

    def wait(self) -> float:
        """Returns once tensors may be changed, and for how many seconds it held the caller."""
        handle, self._copying = self._copying, None
        if handle is None:
            return 0.0
        held = wait_until_staged(handle, self._timeout)
        if held:
            self._on_held(handle, held)
        return held

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_step(self, *_: Any) -> None:
        self.wait()
