"""Streams and events of whatever accelerator torch has."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# Only "yes" is remembered: a backend may be registered after the first question.
_found = threading.Event()


def has_accelerator() -> bool:
    """Return True if a tensor of this process can be elsewhere than in its own memory."""
    if not _found.is_set() and torch.accelerator.is_available():
        _found.set()
    return _found.is_set()


def event_of(device: torch.device) -> torch.Event:
    """Return an event behind all that this thread has queued on the device so far."""
    return torch.accelerator.current_stream(device).record_event()


def side_stream(device: torch.device) -> torch.Stream:
    """Make a stream of the lowest priority that the backend offers, so that copies give way to compute."""
    try:
        return torch.Stream(device=device, priority=_lowest_priority(device))
    except (RuntimeError, TypeError):
        return torch.Stream(device=device)


def _lowest_priority(device: torch.device) -> int:
    """Return 0, the default, where the backend does not tell (CUDA's range ends there; XPU has a lower one)."""
    stream_type: Any = getattr(torch.get_device_module(device), "Stream", None)
    try:
        return int(stream_type.priority_range()[0])
    except (AttributeError, RuntimeError, TypeError):
        return 0


def synchronize(streams: Iterable[torch.Stream]) -> None:
    """Wait for every stream, also where one of them raises; then raise the first error.

    IMPORTANT: an interrupt that arrives meanwhile (Ctrl-C, an alarm) is held back until all have ended. Whoever calls
    this is about to give the memory back that the streams write to.
    """
    first: BaseException | None = None
    for stream in streams:
        while True:
            try:
                stream.synchronize()
            except Exception as error:
                first = first or error
            except BaseException as interrupt:
                first = first or interrupt
                continue  # it may have come before the wait was over
            break
    if first is not None:
        raise first
