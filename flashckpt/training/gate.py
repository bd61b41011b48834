"""Holds `optimizer.step()` until an overlapped save has copied the tensors that a step changes."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from flashckpt.save.overlap import wait_until_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    import torch
    from torch.utils.hooks import RemovableHandle

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)

_retired: list[OptimizerGate] = []  # of managers that were dropped without close()

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Seconds that save() waits for steps in other threads. They may wait for other ranks, which may wait for this save().
_PATIENCE = 2.0
_POLL_SECONDS = 0.0005


def _code_around_steps() -> CodeType:
    """Return the code of the function that torch wraps around the step() of every optimizer, hooks included."""
    wrap: Callable[[Any], Any] = Optimizer.profile_hook_step
    code: CodeType = wrap(id).__code__
    return code


_STEP = _code_around_steps()


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
        self._is_shut = False  # save() is capturing the state: no thread may begin a step
        self._is_impatient = False  # a step in another thread took too long: save() does not wait for it again
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
        return self._copying is None and not self._is_shut

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Wait until other threads have ended the steps that they are in, and hold those that they begin meanwhile.

        Version counters do not show such a step reliably: torch counts a change after it was made.
        """
        with self._lock:
            try:
                self._is_shut = True
                deadline = time.monotonic() + (0.0 if self._is_impatient else _PATIENCE)
                while self._is_step_elsewhere():
                    if time.monotonic() >= deadline:
                        self._give_up_waiting()
                        break
                    time.sleep(_POLL_SECONDS)
                else:
                    self._is_impatient = False
                yield
            finally:
                self._is_shut = False

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
        """Let the next gate that is installed remove this one.

        It can't be removed now: a step may be running the hooks, and has to wait for a copy that is under way.
        """
        _retired.append(self)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _give_up_waiting(self) -> None:
        if not self._is_impatient:
            self._is_impatient = True
            log.warning(
                "optimizer.step() in another thread did not end within %.1f s: save() does not wait for it, and the "
                "save "
                "fails if that step changes a tensor before it is copied",
                _PATIENCE,
            )

    def _is_step_elsewhere(self) -> bool:
        """Return True if another thread is in a step() that this gate does not hold."""
        me = threading.get_ident()
        return any(ident != me and self._is_in_step(frame) for ident, frame in sys._current_frames().items())

    def _is_in_step(self, innermost: FrameType) -> bool:
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _WAIT and frame.f_locals.get("self") is self:
                return False
            if frame.f_code is _STEP:
                return True
            frame = frame.f_back
        return False

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


_WAIT = OptimizerGate.wait.__code__


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if step(closure) changes nothing before it calls the closure: known for torch's own only."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim.")
