"""Copies into a slot that the native core can't make: from an accelerator, or from odd strides."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor and the byte range it goes to."""

    source: torch.Tensor
    offset_bytes: int
    length_bytes: int


def native_address(tensor: torch.Tensor) -> int | None:
    """The address the native core may copy from or to; None where it has to be done by torch."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.data_ptr()
    return None


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, so that copying works for dtypes torch has no copy kernel for."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BY_ITEMSIZE[tensor.itemsize])


class Copier:
    """Owns the side streams and the registration of slots with the device driver."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._registered: dict[int, int] = {}  # address -> length

    def copy(self, data: memoryview, copies: Sequence[DeviceCopy]) -> None:
        """Copies into `data`; once this returns the tensors may be mutated."""
        if not copies:
            return
        area = torch.frombuffer(data, dtype=torch.uint8)
        streams: dict[torch.device, torch.Stream] = {}
        for one in copies:
            bits = as_bits(one.source)
            target = area[one.offset_bytes : one.offset_bytes + one.length_bytes].view(bits.dtype).view(bits.shape)
            if bits.is_cpu:
                target.copy_(bits)
                continue
            if bits.device not in streams:
                streams[bits.device] = self._side_stream(bits.device, area)
            with streams[bits.device]:
                target.copy_(bits, non_blocking=True)
        # IMPORTANT: STAGED promises that the caller may mutate its tensors, so every copy has to have ended.
        for stream in streams.values():
            stream.synchronize()

    def _side_stream(self, device: torch.device, area: torch.Tensor) -> torch.Stream:
        """A stream of our own that starts after the work queued so far, and pinned memory to copy into."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        if device.type == "cuda":
            self._register(area)
        return stream

    def _register(self, area: torch.Tensor) -> None:
        address, length = area.data_ptr(), area.numel()
        if self._registered.get(address) == length:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if address in self._registered:
            cudart.cudaHostUnregister(address)
        error = cudart.cudaHostRegister(address, length, 1)  # 1: portable, for all contexts
        if int(error) != 0:
            # Copies still work, through the driver's own staging buffer, at a fraction of the speed.
            log.warning("cudaHostRegister of %d bytes failed with error %s; copies will be slower", length, error)
        self._registered[address] = length

    def close(self) -> None:
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._registered.clear()
