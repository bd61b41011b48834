"""Copies from staging buffers into tensors for a load, asynchronously if the tensor is on a device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self

import torch

from flashckpt.devices.bits import as_bits
from flashckpt.devices.ring import CHUNK_BYTES, pinned_buffer
from flashckpt.devices.streams import event_of, side_stream, synchronize

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger(__name__)


class Upload:
    """Owns two staging buffers, used in turn, and a side stream per device.

    A context manager: after its exit no copy is under way, even if its body raised.
    """

    def __init__(self, limit_bytes: int, device: torch.device | None) -> None:
        """`limit_bytes` limits both buffers together. `device`: one that will be copied to; None: only host tensors."""
        self.buffer_bytes = max(1, min(CHUNK_BYTES, limit_bytes // 2))
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._turn = 0
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: tuple[list[torch.Event], list[torch.Event]] = ([], [])  # after the last copies from each buffer

    def next_buffer(self) -> torch.Tensor:
        """Return a buffer that no copy reads from any more. Copies from the other one may be under way."""
        self._events[self._turn].extend(stream.record_event() for stream in self._streams.values())
        self._turn = 1 - self._turn
        for event in self._events[self._turn]:
            event.synchronize()
        self._events[self._turn].clear()
        while len(self._buffers) <= self._turn:
            self._buffers.append(self._allocate())
        return self._buffers[self._turn]

    def put(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy `source`, a view of the current buffer, into a tensor of any device, stride or dtype."""
        stream = None if into.is_cpu else self._stream(into.device)
        if stream is None:
            copy_into(into, source)
            return
        with stream:
            copy_into(into, source, non_blocking=self._buffers[self._turn].is_pinned())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        synchronize(self._streams.values())

    def _allocate(self) -> torch.Tensor:
        stream = None if self._device is None else self._stream(self._device)
        if self._device is not None and stream is not None:
            with stream:
                buffer = pinned_buffer(self._device, self.buffer_bytes)
            if buffer is not None:
                return buffer
        return torch.empty(self.buffer_bytes, dtype=torch.uint8)

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """Return the side stream of the device, which first waits for what the caller has queued there.

        None: the backend has no streams, and copies are synchronous.
        """
        stream = self._streams.get(device)
        if stream is None:
            try:
                stream = side_stream(device)
                stream.wait_event(event_of(device))
            except RuntimeError as error:
                log.debug("no stream of %s: %s", device, error)
                return None
            self._streams[device] = stream
        return stream


def copy_into(into: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy host memory into a tensor and convert the dtype if needed.

    Only a copy without conversion can be asynchronous: torch frees the host memory that it converts in too early.
    """
    if source.dtype == into.dtype and not (into.is_neg() or into.is_conj()):
        as_bits(into).copy_(as_bits(source), non_blocking=non_blocking)
    else:
        into.copy_(source)
