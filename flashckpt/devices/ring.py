"""Two page-locked buffers through which bytes pass where a device can't copy to or from the memory itself.

While the device fills or empties one of them, the host does the other.
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

    from flashckpt.transport.throttle import Throttle

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
_BUFFERS = 2
_ALIGN_BYTES = 64
_NO_CRCS = b""


def pinned_buffer(device: torch.device, size_bytes: int) -> torch.Tensor | None:
    """Return host memory that devices of this type copy to and from asynchronously. None where torch has none.

    Called with a device of that type as the current one.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None  # torch pins for one accelerator only
    try:
        buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("no pinned memory for %s: %s", device.type, str(error).partition("\n")[0])
        return None
    return buffer if buffer.is_pinned() else None


@dataclass(slots=True)
class _Fill:
    """What lies in one buffer: rows of (offset in the buffer, address, length)."""

    buffer: torch.Tensor
    rows: array[int] = field(default_factory=lambda: array("q"))
    event: torch.Event | None = None


class Ring:
    """The buffers of one device type. One user at a time."""

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._buffers = buffers
        self.chunk_bytes = buffers[0].numel()

    @staticmethod
    def make(device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> Ring | None:
        """Return None where pinned memory can't be had."""
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

        Each byte is at its address when this returns. If it raises, the caller has to synchronize the stream before
        anything that the pieces refer to goes.
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
        """Yield each buffer once its last copy is queued. It is free again when the next but one is asked for."""
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
    # The plain multiple memcpy of the native core: nothing is checked, the interpreter is free meanwhile.
    buffer = fill.buffer.numpy().data
    native.gather_copy(buffer, len(buffer), _NO_CRCS, fill.rows, threads, False)
