"""Copies through two page-locked buffers if a device can't copy to the slot's memory asynchronously.

While the device fills one buffer, the host empties the other.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flashckpt import native
from flashckpt.devices.bits import place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashckpt.move.throttle import Throttle

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
_BUFFERS = 2
_ALIGN_BYTES = 64
_NO_CRCS = b""


def pinned_buffer(device: torch.device, size_bytes: int) -> torch.Tensor | None:
    """Return host memory that devices of this type copy to and from asynchronously. None: torch offers none.

    Called with a device of that type as the current one.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None  # torch pins for one accelerator only
    try:
        buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning(
            "no pinned memory for %s, copies are slower with pageable memory: %s",
            device.type,
            str(error).partition("\n")[0],
        )
        return None
    return buffer if buffer.is_pinned() else None


@dataclass(slots=True)
class _Fill:
    """Lists the content of one buffer as rows of (offset in the buffer, address, length)."""

    buffer: torch.Tensor
    rows: array[int] = field(default_factory=lambda: array("q"))
    event: torch.Event | None = None


class Ring:
    """Owns the buffers of one device type. Used by one thread at a time."""

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._buffers = buffers
        self.chunk_bytes = buffers[0].numel()

    @staticmethod
    def make(device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> Ring | None:
        """Allocate the buffers. Returns None if no pinned memory is available."""
        buffers: list[torch.Tensor] = []
        for _ in range(_BUFFERS):
            buffer = pinned_buffer(device, chunk_bytes)
            if buffer is None:
                return None
            buffers.append(buffer)
        return Ring(tuple(buffers))

    def download(
        self,
        stream: torch.Stream,
        pieces: Iterable[tuple[torch.Tensor, int]],
        limit_bytes: int,
        throttle: Throttle,
        threads: int,
    ) -> None:
        """Copy device tensors to host addresses. `stream` is the current one; pieces are at most `limit_bytes` long.

        When this returns, all bytes are at their addresses. If it raises, the caller has to synchronize the stream
        before it frees the source tensors or the memory at the addresses.
        """
        full: _Fill | None = None
        for fill in self._fills(stream, pieces, limit_bytes, throttle):
            # The device copies to `fill` from now on; the host empties the buffer before it.
            if full is not None:
                _empty(full, threads)
            full = fill
        if full is not None:
            _empty(full, threads)

    def _fills(
        self, stream: torch.Stream, pieces: Iterable[tuple[torch.Tensor, int]], limit_bytes: int, throttle: Throttle
    ) -> Iterator[_Fill]:
        """Yield each buffer once its last copy is queued. It is filled again after the next buffer was yielded."""
        turn, used = 0, 0
        fill = _Fill(self._buffers[turn])
        for bits, address in pieces:
            length = bits.numel() * bits.itemsize
            start = -(-used // _ALIGN_BYTES) * _ALIGN_BYTES
            if fill.rows and start + length > limit_bytes:
                fill.event = stream.record_event()
                yield fill
                turn = (turn + 1) % _BUFFERS
                fill, start = _Fill(self._buffers[turn]), 0
            throttle.take(length)
            place(fill.buffer, start, bits).copy_(bits, non_blocking=True)
            fill.rows.extend((start, address, length))
            used = start + length
        if fill.rows:
            fill.event = stream.record_event()
            yield fill


def _empty(fill: _Fill, threads: int) -> None:
    if fill.event is not None:
        fill.event.synchronize()
    # With no CRCs the native core only copies, and releases the GIL meanwhile.
    buffer = fill.buffer.numpy().data
    native.gather_copy(buffer, len(buffer), _NO_CRCS, fill.rows, threads, False)
