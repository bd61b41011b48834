"""Stops the training on a signal: all ranks save the same last step, whichever rank got the signal.

Ranks of a synchronous job are at most one step apart. A rank that was signalled writes the step after its own into the
store that torch.distributed keeps for the job; every rank looks there once per step. No rank can finish that step
before the signalled one has begun it, so each of them learns of it in time. No collective is needed.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from flashckpt.manager import CheckpointManager

log = logging.getLogger(__name__)

_KEY = "stop-at-step"


class StopBoard:
    """Agrees with the other ranks of the launch on the step to stop at. With one rank, no store is needed."""

    def __init__(self, name: str, world: int) -> None:
        self._store = job_store(name) if world > 1 else None
        self._agreed: int | None = None

    def propose(self, step: int) -> int:
        """Propose to stop, after this rank was signalled and has finished `step`. Returns the step that all stop at."""
        if self._agreed is None:
            if self._store is None:
                self._agreed = step
            else:
                self._agreed = int(self._store.compare_set(_KEY, "", str(step + 1)))
        return self._agreed

    def read(self) -> int | None:
        if self._agreed is None and self._store is not None and self._store.check([_KEY]):
            self._agreed = int(self._store.get(_KEY))
        return self._agreed


def job_store(name: str) -> Store:
    """Returns the store that torch.distributed keeps for the job, with a prefix for one launch."""
    # torch has no public name for it; torchft and torchelastic reach it the same way.
    return PrefixStore(f"flashckpt/{name}", dist.distributed_c10d._get_default_store())


class SignalHandlers:
    """The signal handlers of this process. They only note the signal; `manager.save` acts on it at the step's end."""

    def __init__(self, signals: Sequence[int], deadline: float, board: StopBoard, exit_code: int | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("signal handlers: expected the main thread", hint="install them where the process starts")
        if not deadline > 0:
            raise ConfigError(f"deadline: expected seconds above 0, found {deadline!r}")
        self.exit_code = exit_code
        self._deadline = deadline
        self._board = board
        self._noticed: float | None = None  # when this rank learned that it has to stop
        self._received = 0
        self._finished = False
        self._abandoned = False
        self._previous: dict[int, Any] = {}
        try:
            for number in signals:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._note)
        except BaseException:
            self.restore()
            raise

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._abandoned:
            self.restore()
            signal.raise_signal(number)
            return
        if not self._received:
            self._received, self._noticed = number, time.monotonic()

    @property
    def requested(self) -> bool:
        """True if this process or another rank got a signal."""
        return self._noticed is not None

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        since = 0.0 if self._noticed is None else time.monotonic() - self._noticed
        return max(0.0, self._deadline - since)

    def is_final(self, step: int) -> bool:
        """Return True if `step`, which was just finished, is the one to stop at. Called once per step."""
        if self._finished:
            return False
        try:
            target = self._board.propose(step) if self._received else self._board.read()
        except Exception as error:  # the store died with its rank: the job is ending anyway
            log.warning(
                "can't agree with the other ranks on the step to stop at (%s): stopping here if signalled", error
            )
            target = step if self._received else None
        if target is None:
            return False
        if self._noticed is None:
            self._noticed = time.monotonic()
            log.info("another rank was signalled: stopping after step %d", target)
        if step > target:
            log.warning("step %d is beyond step %d, where all ranks were to stop: the last save is late", step, target)
        return step >= target

    def finish(self) -> None:
        self._finished = True

    def restore(self) -> None:
        """Puts the previous handlers back. May be called twice."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:  # otherwise it was replaced since
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def abandon(self) -> None:
        """Put the previous handlers back, here or in `_note`: the manager is gone and can't act on a signal."""
        self._abandoned = True
        if threading.current_thread() is threading.main_thread():
            self.restore()

    def __enter__(self) -> SignalHandlers:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def install_signal_handlers(
    manager: CheckpointManager,
    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
    *,
    deadline: float = 60.0,
    exit_code: int | None = None,
) -> SignalHandlers:
    """Makes all ranks save, replicate and flush a last step when any rank gets one of `signals`.

    Nothing waits longer than `deadline` seconds after the signal. Afterwards `manager.stop_requested` is True, so that
    the loop can end; with `exit_code`, `save` raises SystemExit instead. Needs `manager.save(step)` at every step.
    """
    return manager.install_signal_handlers(signals, deadline=deadline, exit_code=exit_code)
