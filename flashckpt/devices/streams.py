"""Streams and events of any accelerator that torch supports."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# Only True is remembered, because a backend may be registered after the first call.
_found = threading.Event()


def has_accelerator() -> bool:
    """Return True if tensors of this process may be on an accelerator."""
    if not _found.is_set() and torch.accelerator.is_available():
        _found.set()
    return _found.is_set()


def event_of(device: torch.device) -> torch.Event:
    """Return an event that comes after all work that this thread has queued on the device's current stream."""
    return torch.accelerator.current_stream(device).record_event()


def side_stream(device: torch.device) -> torch.Stream:
    """Make a stream of the lowest priority that the backend offers, so that copies give way to compute."""
    try:
        return torch.Stream(device=device, priority=_lowest_priority(device))
    except (RuntimeError, TypeError):
        return torch.Stream(device=device)


def _lowest_priority(device: torch.device) -> int:
    """Return the lowest priority, or 0, the default, if the backend does not tell it. CUDA's lowest is 0."""
    stream_type: Any = getattr(torch.get_device_module(device), "Stream", None)
    try:
        return int(stream_type.priority_range()[0])
    except (AttributeError, RuntimeError, TypeError):
        return 0


def synchronize(streams: Iterable[torch.Stream]) -> None:
    """Wait for every stream, even if one of them raises; then raise the first error.

    IMPORTANT: an interrupt that arrives meanwhile (Ctrl-C, an alarm) is held back until all streams have ended, because
    the caller then gives back the memory that the streams write to.
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
                continue  # the wait may not be over
            break
    if first is not None:
        raise first
