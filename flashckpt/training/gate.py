"""Holds `optimizer.step()` until an overlapped save has copied the tensors that a step changes."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from flashckpt.save.overlap import wait_until_staged

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.hooks import RemovableHandle

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)

_retired: list[OptimizerGate] = []  # of managers that were dropped without close()

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerGate:
    """Hooks into every torch optimizer of the process, also those made later and inside wrappers.

    The gate is closed, for all callers and threads, from the moment a copy begins until it is staged or given up. While
    no copy is under way, a step costs one more comparison.
    """

    def __init__(self, timeout: float, on_held: Callable[[SaveHandle, float], None]) -> None:
        self._timeout = timeout
        self._on_held = on_held
        self._copying: SaveHandle | None = None
        # The first caller waits and looks for changes; the others pass after it. Reentrant: a signal handler may wait.
        self._lock = threading.RLock()
        self._hook: RemovableHandle | None = None

    def install(self) -> None:
        for gate in [gate for gate in _retired if not gate.protects]:
            gate.remove()
            _retired.remove(gate)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close_behind(self, handle: SaveHandle) -> None:
        """Make steps wait until `handle` is STAGED or given up."""
        self._copying = handle

    @property
    def is_open(self) -> bool:
        return self._copying is None

    @property
    def protects(self) -> bool:
        """Return True while a copy reads tensors that a step would change."""
        handle = self._copying
        return handle is not None and not handle.is_copied and not handle.is_given_up

    def wait(self) -> float:
        """Block until tensors may be changed. Returns the seconds that the caller was held.

        If an interrupt (Ctrl-C) ends the wait, the gate stays closed for the next caller.
        """
        if self.is_open:
            return 0.0
        with self._lock:
            handle = self._copying
            if handle is None:
                return 0.0
            held = wait_until_staged(handle, self._timeout)
            # Otherwise copies are only queued on devices: the streams of other threads must wait for them too.
            if handle.is_copied or handle.is_given_up:
                self._copying = None
        if held:
            self._on_held(handle, held)
        return held

    def retire(self) -> None:
        """Let the next gate that is installed remove this one. A step may be going through the hooks right now, and a
        copy that is under way is still waited for."""
        _retired.append(self)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        if self.is_open:
            return None
        if _calls_closure_first(optimizer):
            if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
                return (args[0], self._behind(args[1]), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": self._behind(kwargs["closure"])}
        self.wait()
        return None

    def _behind(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Make the closure wait for the copy at its end: forward and backward may run beside it, the update may not."""

        @functools.wraps(closure)
        def gated() -> Any:
            loss = closure()
            self.wait()
            return loss

        return gated


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if step(closure) changes nothing before it calls the closure: known for torch's own only."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim.")
