"""Checksums of tensors before and after a copy: what a version counter does not see, they do."""

from __future__ import annotations

import itertools
import logging
from array import array
from typing import TYPE_CHECKING

import torch

from flashckpt import native
from flashckpt.devices import as_bits, native_address
from flashckpt.format.caps import CRC_BYTES
from flashckpt.state.regions import local_parts, narrow, plain_local

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.save.plan import SavePlan, Source
    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20  # of one checksum, so that several threads share a large tensor


class Checksums:
    """Of the tensors `indices` as they are when this is made.

    What the native core can read has a CRC32C for each block; of everything else torch sums the words, where the tensor
    is.
    """

    def __init__(self, plan: SavePlan, flat: Flat, indices: Collection[int], threads: int) -> None:
        self._threads = threads
        self._fqns = list(flat.tensors)
        leaves = list(flat.tensors.values())
        self._near: list[tuple[Source, torch.Tensor, int]] = []
        self._far: list[tuple[Source, torch.Tensor]] = []
        for source in plan.sources:
            if source.tensor not in indices:
                continue
            view = view_of(self._fqns[source.tensor], leaves[source.tensor], source)
            address = native_address(self._fqns[source.tensor], view)
            if address is None:
                self._far.append((source, view))
            else:
                self._near.append((source, view, address))
        self._crcs = self._near_now()
        self._sums: list[torch.Tensor] = []
        self._take_sums()

    def differing(self, data: memoryview) -> list[str]:
        """Keys whose bytes in `data`, the data area of a slot, are not those that were there in the beginning."""
        area = torch.frombuffer(data, dtype=torch.uint8)
        base = area.data_ptr()
        crcs = self._crcs_of([(base + source.offset_bytes, source.length_bytes) for source, _, _ in self._near])
        found = self._unequal(crcs)
        for (source, view), known in zip(self._far, self._sums, strict=True):
            here = area[source.offset_bytes : source.offset_bytes + source.length_bytes].view(as_bits(view).dtype)
            if int(here.sum(dtype=torch.int64)) != int(known):
                found.append(self._fqns[source.tensor])
        return list(dict.fromkeys(found))

    def changed_sources(self) -> list[str]:
        """Keys of tensors that are no longer what they were in the beginning."""
        found = self._unequal(self._near_now())
        for (source, view), known in zip(self._far, self._sums, strict=True):
            try:
                if int(_sum(view)) != int(known):
                    found.append(self._fqns[source.tensor])
            except torch.OutOfMemoryError as error:
                log.info("%s is not checksummed again: %s", self._fqns[source.tensor], error)
        return list(dict.fromkeys(found))

    def _take_sums(self) -> None:
        """Leaves out what a device has no room to sum up: version counters have to do."""
        for number, (_, view) in enumerate(self._far):
            try:
                self._sums.append(_sum(view))
            except torch.OutOfMemoryError as error:
                log.info("%d tensors on %s are not checksummed: %s", len(self._far) - number, view.device, error)
                del self._far[number:]
                return

    def _near_now(self) -> list[bytes]:
        return self._crcs_of([(address, source.length_bytes) for source, _, address in self._near])

    def _crcs_of(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """For each range the checksums of its blocks."""
        blocks = array("q")
        counts = []
        for address, length in ranges:
            starts = range(0, length, _BLOCK_BYTES)
            counts.append(len(starts))
            for start in starts:
                blocks.extend((address + start, min(_BLOCK_BYTES, length - start)))
        crcs = native.checksum_ranges(blocks, self._threads)
        ends = itertools.accumulate(counts, initial=0)
        return [crcs[CRC_BYTES * first : CRC_BYTES * last] for first, last in itertools.pairwise(ends)]

    def _unequal(self, crcs: list[bytes]) -> list[str]:
        pairs = zip(self._near, self._crcs, crcs, strict=True)
        return [self._fqns[source.tensor] for (source, _, _), known, found in pairs if known != found]


def _sum(view: torch.Tensor) -> torch.Tensor:
    return as_bits(view).sum(dtype=torch.int64)


def view_of(fqn: str, tensor: torch.Tensor, source: Source) -> torch.Tensor:
    """The bytes of one entry as a tensor: a view of the user's memory, any stride, any device."""
    if source.whole:
        local = plain_local(tensor)
        if local is not None:
            return local
    part = local_parts(fqn, tensor)[source.part]
    return part if source.whole else narrow(part, source.local_offsets, source.sizes)
