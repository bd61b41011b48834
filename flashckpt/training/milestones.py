"""Waits for two saves: that of the first step, which has to show that saving works, and the last one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import DeadlineError, FlashError
from flashckpt.types import Level, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.save.handle import SaveHandle

log = logging.getLogger(__name__)


def prove_first(handle: SaveHandle, timeout: float, read_back: Callable[[SaveHandle], object], *, raises: bool) -> None:
    """Waits until the first save is replicated, and reads it back, so that a job that can't save shows it at once.

    Its tensors are copied already.
    """
    try:
        outcome = handle.wait(min(Level.REPLICATED, handle.highest_level), timeout)
        if outcome is Outcome.OK:
            read_back(handle)
    except FlashError as error:
        _complain(handle, str(error))
        if raises:
            raise
    else:
        if outcome is Outcome.FAILED:
            _complain(handle, handle.reason)


def bring_home(handle: SaveHandle, timeout: float, *, to_disk: bool) -> None:
    """Waits for the last save to reach its highest level, within the deadline. Agents go on with a flush after that."""
    level = Level.PERSISTED if to_disk and handle.persists else min(Level.REPLICATED, handle.highest_level)
    try:
        outcome = handle.wait(level, timeout)
    except DeadlineError as error:
        log.warning("step %d, the last save: %s", handle.step, error.message)
    else:
        log.info("step %d, the last save: %s, %s %s", handle.step, handle.level.name.lower(), outcome, handle.reason)


def _complain(handle: SaveHandle, reason: str) -> None:
    log.error("step %d, the first save: saving does not work here: %s", handle.step, reason)
