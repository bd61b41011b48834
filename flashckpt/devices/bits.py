"""Treats tensors as plain bytes: their address, their view as integers, and pieces of limited size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashckpt.errors import InternalError, UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One tensor and the byte range of the slot's data area that it goes to."""

    source: torch.Tensor
    offset_bytes: int
    length_bytes: int


def native_address(fqn: str, tensor: torch.Tensor) -> int | None:
    """Return the address that the native core may copy from or to. None: torch has to make the copy.

    Raises UnsupportedValueError if the tensor has no memory.
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
    """Return the same bytes as integers, so that copying works for dtypes that torch has no copy kernel for."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BY_ITEMSIZE[tensor.itemsize])


def pieces(bits: torch.Tensor, limit_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield views of at most `limit_bytes` (at least one element each), with their offset in the contiguous bytes.

    Tensors of odd strides are cut too: the copy of each piece takes temporary device memory of its size.
    """
    itemsize = bits.itemsize
    size = bits.numel() * itemsize
    if bits.is_contiguous():
        flat = bits.view(-1)
        step = max(1, limit_bytes // itemsize)
        if step >= flat.numel():
            if size:
                yield flat, 0
            return
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step], start * itemsize
    elif size <= limit_bytes:
        yield bits, 0
    else:
        # All dimensions before this one have size 1, so a row's offset is its index times its size.
        dim = next(at for at, count in enumerate(bits.shape) if count > 1)
        row_bytes = size // bits.shape[dim]
        rows = max(1, limit_bytes // row_bytes)
        for start in range(0, bits.shape[dim], rows):
            part = bits.narrow(dim, start, min(rows, bits.shape[dim] - start))
            for piece, offset in pieces(part, limit_bytes):
                yield piece, start * row_bytes + offset


def place(area: torch.Tensor, offset_bytes: int, bits: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `area` (one-dimensional, uint8) from `offset_bytes` on in the form of `bits`."""
    length = bits.numel() * bits.itemsize
    return area[offset_bytes : offset_bytes + length].view(bits.dtype).view(bits.shape)


def bits_of(one: DeviceCopy) -> torch.Tensor:
    """Return the integer view of a copy's source. Raises InternalError if it does not fill its byte range."""
    bits = as_bits(one.source)
    if bits.numel() * bits.itemsize != one.length_bytes:
        raise InternalError(
            f"copy to offset {one.offset_bytes}: expected {one.length_bytes} bytes, found a {one.source.dtype} of "
            f"shape {tuple(one.source.shape)}"
        )
    return bits


# Clones tensors in device memory, in the order of the caller's stream, so that later work can't change the copy.


def clone_on_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Queue a copy of each tensor's bytes, in the memory of its own device, on the caller's current stream.

    What the caller queues on that stream from now on, a replay of a CUDA graph included, does not change the copies.
    The clones are contiguous integers, as `as_bits` returns them. None: the tensor is on the host, or its device had no
    room for a clone (torch.OutOfMemoryError).
    """
    clones: list[torch.Tensor | None] = []
    # A failed allocation makes the driver synchronize, so nothing of the same size or larger is tried again.
    too_large: dict[torch.device, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if tensor.is_cpu or size >= too_large.get(tensor.device, size + 1):
            clones.append(None)
            continue
        try:
            clones.append(as_bits(tensor).clone(memory_format=torch.contiguous_format))
        except torch.OutOfMemoryError:
            too_large[tensor.device] = size
            clones.append(None)
    return clones
