"""The limit: copying the same number of bytes into a mapping that is allocated, faulted and warm."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from bench.contenders.base import Synchronous
from bench.state import tensors_of

if TYPE_CHECKING:
    from pathlib import Path

    from bench.contenders.base import Details
    from bench.state import StateDict

# A function of a CDLL runs without the GIL, so that the threads really copy at the same time.
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p

_Piece = tuple[int, int, int]  # address in the state, address in the mapping, length


class MemcpyTensors(Synchronous):
    """libc's memcpy, one call a tensor, with as many threads as flashckpt takes.

    No checksum, no seal, nothing that could be found again: not a checkpoint, but what one is measured by.
    """

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        size_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
        fd = os.open(directory / "mapping", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size_bytes += mmap.PAGESIZE  # room to start within the first page
        os.posix_fallocate(fd, 0, size_bytes)
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(self._anchor)
        ctypes.memset(base, 0, size_bytes)
        self._threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads)
        self._shares = self._divide(state, base)
        self.save(0)  # starts the threads
        return {}

    def save(self, step: int) -> Details:
        self._values = dict(self._state["trainer"])
        self._run([[(into, source, length) for source, into, length in share] for share in self._shares])
        return {}

    def load(self) -> Details:
        self._state["trainer"].update(self._values)
        self._run([[(source, into, length) for source, into, length in share] for share in self._shares])
        return {}

    def close(self) -> None:
        self._pool.shutdown()
        del self._anchor
        self._map.close()

    def _divide(self, state: StateDict, base: int) -> list[list[_Piece]]:
        tensors = tensors_of(state)
        pieces, offset = [], 0
        for tensor in tensors:
            pieces.append((tensor.data_ptr(), base + offset, tensor.nbytes))
            offset += tensor.nbytes
        bounds = [len(pieces) * i // self._threads for i in range(self._threads + 1)]
        return [pieces[a:b] for a, b in itertools.pairwise(bounds)]

    def _run(self, shares: list[list[_Piece]]) -> None:
        for done in [self._pool.submit(_copy, share) for share in shares]:
            done.result()


class MemcpyBlock(MemcpyTensors):
    """As above, but from one contiguous block with one call a thread.

    Calls of that length make libc go around the caches, which is the fastest that this machine copies. It is
    the limit that the bars are held against, although no real state lies in memory like that.
    """

    def _divide(self, state: StateDict, base: int) -> list[list[_Piece]]:
        tensors = tensors_of(state)
        block = torch.cat([tensor.reshape(-1) for tensor in tensors])
        start = 0
        for tensor in tensors:
            # The state moves into the block: what is loaded can be compared, and no second copy stays.
            tensor.data = block[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
        # At the same place within their pages on both sides: else libc copies this way at a third of its speed in
        # one of the two directions, and the limit would be none.
        base += block.data_ptr() % mmap.PAGESIZE
        length = block.nbytes // self._threads // 64 * 64
        cuts = [i * length for i in range(self._threads)] + [block.nbytes]
        return [[(block.data_ptr() + a, base + a, b - a)] for a, b in itertools.pairwise(cuts)]


def _copy(share: list[_Piece]) -> None:
    for into, source, length in share:
        _memcpy(into, source, length)
