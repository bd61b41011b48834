"""Finds out what `torch.save` writes around the bytes of a tensor, by asking torch, without the bytes.

It saves a tensor of untouched memory and drops what torch writes from that memory. The bytes of the real tensor then go
from the shard to the file in small tiles that stay in the processor's cache.
"""

from __future__ import annotations

import functools
import io
import threading
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import torch

_crc_options = threading.Lock()  # torch has one setting for the whole process


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds `head` and `tail`. Together with the tensor's bytes in between, they are what torch.save would write."""

    head: bytes
    tail: bytes


@functools.lru_cache(4096)
def frame_of(dtype: torch.dtype, sizes: tuple[int, ...], size_bytes: int) -> Frame | None:
    """Return the frame, or None if torch does not write the bytes in one piece without a copy. Every known version
    does.
    """
    memory = np.empty(size_bytes, dtype=np.uint8)  # untouched, so it takes no memory, whatever its size
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes) if size_bytes else None
    found = _Recorder(memory.ctypes.data, size_bytes)
    _save(torch.empty(sizes, dtype=dtype) if tensor is None else tensor, found)
    return found.frame()


def _save(tensor: torch.Tensor, target: _Recorder) -> None:
    with _crc_options:
        before = torch.serialization.get_crc32_options()
        # The zip's own checksum precedes its bytes, and no reader of torch checks it; our checksums are in
        # __checksums.flash.
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, cast("IO[bytes]", target))
        finally:
            torch.serialization.set_crc32_options(before)


class _Recorder(io.RawIOBase):
    """Keeps what is written, except what is in the tensor's memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        super().__init__()
        self._address, self._size_bytes = address, size_bytes
        self._parts = [bytearray()]  # before the tensor's bytes, after them
        self._left_out = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        length = len(view)
        start = np.frombuffer(view, dtype=np.uint8).ctypes.data - self._address if length else -1
        if not 0 <= start < self._size_bytes:
            self._parts[-1] += view
        elif start == self._left_out and start + length <= self._size_bytes:
            self._parts += [bytearray()] if start == 0 else []
            self._left_out += length
        else:
            self._left_out = -1  # out of order: there is no frame
        return length

    def frame(self) -> Frame | None:
        whole = self._left_out == self._size_bytes and len(self._parts) == (2 if self._size_bytes else 1)
        return Frame(bytes(self._parts[0]), bytes(b"".join(self._parts[1:]))) if whole else None
