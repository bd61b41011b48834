"""Copies into a slot that the native core can't make: from an accelerator, or from odd strides."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from flashckpt.errors import UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor and the byte range it goes to."""

    source: torch.Tensor
    offset_bytes: int
    length_bytes: int


def native_address(fqn: str, tensor: torch.Tensor) -> int | None:
    """The address the native core may copy from or to; None where it has to be done by torch.

    Raises UnsupportedValueError where there is no memory at all: address 0 means something else to the core.
    """
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        address = tensor.data_ptr()
        if address == 0 and tensor.numel():
            raise UnsupportedValueError(
                f"key {fqn!r}: expected a tensor with bytes of its own, found a {type(tensor).__name__} of shape "
                f"{tuple(tensor.shape)} without storage",
                hint="a freed storage (FSDP1 between forward passes), a fake tensor or a wrapper class has no bytes",
                key=fqn,
            )
        return address
    return None


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, so that copying works for dtypes torch has no copy kernel for."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BY_ITEMSIZE[tensor.itemsize])


@cache
def has_accelerator() -> bool:
    """Whether any tensor of this process can be elsewhere than in its own memory."""
    return torch.accelerator.is_available()


def event_of(device: torch.device) -> torch.Event:
    """Behind all that this thread has queued on the device so far."""
    return torch.accelerator.current_stream(device).record_event()


class CudaRegistrar:
    """Page-locks memory that is mapped already, so that the device copies into it at full speed."""

    def register(self, address: int, length_bytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, length_bytes, 1)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            # Copies still work, through the driver's own staging buffer, at a fraction of the speed.
            log.warning("cudaHostRegister of %d bytes failed with error %s; copies will be slower", length_bytes, error)

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Copier:
    """Owns the side streams and the registration of slots with the device driver."""

    def __init__(self, registrar: CudaRegistrar | None = None) -> None:
        self._registrar = registrar or CudaRegistrar()
        self._streams: dict[torch.device, torch.Stream] = {}
        # SAFETY: holding a view keeps the slot mapped for as long as the driver has it registered; the store does
        # not unmap or resize memory that somebody has a view of. (A tensor made by frombuffer would not do: torch
        # gives the buffer back at once.)
        self._pinned: dict[int, memoryview] = {}

    def copy(
        self,
        data: memoryview,
        copies: Sequence[DeviceCopy],
        ready: Mapping[torch.device, torch.Event] | None = None,
    ) -> None:
        """Copies into `data`; once this returns the tensors may be mutated.

        `ready`: events to start behind, by device. Needed in a thread, whose current stream is not the caller's.
        """
        if not copies:
            return
        area = torch.frombuffer(data, dtype=torch.uint8)
        streams: dict[torch.device, torch.Stream] = {}
        for one in copies:
            if one.source.is_cpu:
                _put(area, one)
                continue
            device = one.source.device
            if device not in streams:
                streams[device] = self._side_stream(device, data, ready)
            with streams[device]:
                _put(area, one)
        # IMPORTANT: STAGED promises that the caller may mutate its tensors, so every copy has to have ended.
        for stream in streams.values():
            stream.synchronize()

    def pin(self, data: memoryview) -> None:
        """Registers a slot's memory once. Slots of another size are let go: the state has grown or shrunk."""
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        known = self._pinned.get(address)
        if known is not None and known.nbytes == data.nbytes:
            return
        self._let_go([other for other, held in self._pinned.items() if held.nbytes != data.nbytes])
        self._registrar.register(address, data.nbytes)
        self._pinned[address] = memoryview(data)

    def close(self) -> None:
        self._let_go(list(self._pinned))

    def _let_go(self, addresses: list[int]) -> None:
        for address in addresses:
            self._registrar.unregister(address)
            self._pinned.pop(address).release()

    def _side_stream(
        self, device: torch.device, data: memoryview, ready: Mapping[torch.device, torch.Event] | None
    ) -> torch.Stream:
        """A stream of our own that starts after the work queued so far, and pinned memory to copy into."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        stream = self._streams[device]
        stream.wait_event(ready[device] if ready is not None else event_of(device))
        if device.type == "cuda":
            self.pin(data)
        return stream


def _put(area: torch.Tensor, one: DeviceCopy) -> None:
    bits = as_bits(one.source)
    target = area[one.offset_bytes : one.offset_bytes + one.length_bytes].view(bits.dtype).view(bits.shape)
    target.copy_(bits, non_blocking=not bits.is_cpu)
