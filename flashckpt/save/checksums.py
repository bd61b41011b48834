"""Checksums tensors before and after a copy. This finds changes that version counters do not show."""

from __future__ import annotations

import itertools
import logging
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashckpt import native
from flashckpt.devices import as_bits, native_address
from flashckpt.errors import UnsupportedValueError
from flashckpt.format.caps import CRC_BYTES
from flashckpt.state.regions import local_parts, narrow, plain_local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.save.plan import Source
    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20  # bytes per checksum; several threads share a larger tensor


class _Near(NamedTuple):
    """Bytes of one entry that the native core can read, and their offset in the data area of the slot."""

    key: str
    address: int
    offset_bytes: int
    length_bytes: int


class Checksums:
    """Holds checksums of the entries `sources`, taken when this object is made.

    For memory that the native core can read, it has one CRC32C per block. For all other tensors torch sums the words,
    on the tensor's own device. With `window_bytes` it is a sample: at most so many bytes from the middle of each entry
    that the native core can read.
    """

    def __init__(self, sources: Iterable[Source], flat: Flat, threads: int, *, window_bytes: int | None = None) -> None:
        self.is_sample = window_bytes is not None
        self._threads = threads
        self._keep: list[torch.Tensor] = []  # SAFETY: the native core reads at their addresses
        self._near: list[_Near] = []
        self._far: list[tuple[str, Source, torch.Tensor]] = []
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        for source in sources:
            key = fqns[source.tensor]
            try:
                view = view_of(key, leaves[source.tensor], source)
                address = native_address(key, view)
            except UnsupportedValueError:
                if window_bytes is None:
                    raise
                continue  # the copy raises the same error
            if address is not None:
                length = source.length_bytes if window_bytes is None else min(source.length_bytes, window_bytes)
                skipped = (source.length_bytes - length) // 2
                self._keep.append(view)
                self._near.append(_Near(key, address + skipped, source.offset_bytes + skipped, length))
            elif window_bytes is None:
                self._far.append((key, source, view))
        self._crcs = self._near_now()
        self._sums: list[torch.Tensor] = []
        self._take_sums()

    def differing(self, data: memoryview) -> list[str]:
        """Return the keys whose bytes in `data`, the data area of a slot, do not have the checksums taken at first."""
        area = torch.frombuffer(data, dtype=torch.uint8)
        base = area.data_ptr()
        found = self._unequal(self._crcs_of([(base + one.offset_bytes, one.length_bytes) for one in self._near]))
        for (key, source, view), known in zip(self._far, self._sums, strict=True):
            here = area[source.offset_bytes : source.offset_bytes + source.length_bytes].view(as_bits(view).dtype)
            if int(here.sum(dtype=torch.int64)) != int(known):
                found.append(key)
        return list(dict.fromkeys(found))

    def changed_sources(self) -> list[str]:
        """Return the keys of tensors that no longer have the checksums taken at first."""
        found = self._unequal(self._near_now())
        for (key, _, view), known in zip(self._far, self._sums, strict=True):
            try:
                if int(_sum(view)) != int(known):
                    found.append(key)
            except torch.OutOfMemoryError as error:
                log.info("%s is not checksummed again, only its version counter is compared: %s", key, error)
        return list(dict.fromkeys(found))

    def _take_sums(self) -> None:
        """Sum the tensors on devices. If a device has no room for that, only version counters prove the rest."""
        for number, (_, _, view) in enumerate(self._far):
            try:
                self._sums.append(_sum(view))
            except torch.OutOfMemoryError as error:
                log.info(
                    "%d entries, the first on %s, are not checksummed, only version counters are compared: %s",
                    len(self._far) - number,
                    view.device,
                    error,
                )
                del self._far[number:]
                return

    def _near_now(self) -> list[bytes]:
        return self._crcs_of([(one.address, one.length_bytes) for one in self._near])

    def _crcs_of(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return for each range the checksums of its blocks."""
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
        return [one.key for one, known, found in pairs if known != found]


def _sum(view: torch.Tensor) -> torch.Tensor:
    return as_bits(view).sum(dtype=torch.int64)


def view_of(fqn: str, tensor: torch.Tensor, source: Source) -> torch.Tensor:
    """Return one entry as a tensor: a view of the user's memory, of any stride, on any device."""
    if source.whole:
        local = plain_local(tensor)
        if local is not None:
            return local
    part = local_parts(fqn, tensor)[source.part]
    return part if source.whole else narrow(part, source.local_offsets, source.sizes)
