"""Checksums tensors before and after a copy. This finds changes that version counters do not show."""

from __future__ import annotations

import contextlib
import itertools
import logging
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashckpt import native
from flashckpt.devices import event_of, native_address, side_stream, weighted_sum, weighted_sum_of_bytes
from flashckpt.errors import UnsupportedValueError
from flashckpt.format.caps import CRC_BYTES
from flashckpt.state.regions import local_parts, narrow, plain_local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.save.plan import TensorSource
    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20  # bytes per checksum; several threads share a larger tensor


class _Near(NamedTuple):
    """Bytes of one entry that the native core can read, and their offset in the data area of the slot."""

    key: str
    address: int
    offset_bytes: int
    length_bytes: int


class _Far(NamedTuple):
    """An entry, or a part of one, that torch sums on its own device, and its place in the data area of the slot."""

    key: str
    view: torch.Tensor
    offset_bytes: int
    length_bytes: int


class Checksums:
    """Holds checksums of entries, taken when this object is made: all bytes of `whole`, a few of each of `sampled`.

    For memory that the native core can read, it has one CRC32C per block. For all other tensors torch sums the words,
    each with a weight of its place, on the tensor's own device. A sample is at most `window_bytes` of an entry, at the
    place `window_at`: 0 is its beginning, 1 its end.
    """

    def __init__(
        self,
        whole: Iterable[TensorSource],
        sampled: Iterable[TensorSource],
        flat: Flat,
        threads: int,
        *,
        window_bytes: int,
        window_at: float,
    ) -> None:
        self._threads = threads
        self._at = window_at
        self._keep: list[torch.Tensor] = []  # SAFETY: the native core reads at their addresses
        self._near: list[_Near] = []
        self._far: list[_Far] = []
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        for source in whole:
            key = fqns[source.tensor]
            self._add(key, view_of(key, leaves[source.tensor], source), source, None)
        self.is_sample = not self._near and not self._far
        self._far_whole = len(self._far)  # as many of `_far`, from the first, are whole entries
        wholes = self._far_whole + len(self._near)
        for source in sampled:
            key = fqns[source.tensor]
            with contextlib.suppress(UnsupportedValueError):  # the copy raises the same error
                self._add(key, view_of(key, leaves[source.tensor], source), source, window_bytes)
        self.has_samples = len(self._near) + len(self._far) > wholes
        self._crcs = self._near_now()
        self._sums: list[torch.Tensor] = []
        self._take_sums()
        devices = {value.device for value in self._sums if not value.is_cpu}
        self._events = {device: event_of(device) for device in devices}

    def _add(self, key: str, view: torch.Tensor, source: TensorSource, window_bytes: int | None) -> None:
        address = native_address(key, view)
        if address is None:
            part, skipped = (view, 0) if window_bytes is None else window(view, window_bytes, self._at)
            self._far.append(_Far(key, part, source.offset_bytes + skipped, part.numel() * part.itemsize))
            return
        length = source.length_bytes if window_bytes is None else min(source.length_bytes, window_bytes)
        skipped = int((source.length_bytes - length) * self._at)
        self._keep.append(view)
        self._near.append(_Near(key, address + skipped, source.offset_bytes + skipped, length))

    def differing(self, data: memoryview) -> list[str]:
        """Return the keys whose bytes in `data`, the data area of a slot, do not have the checksums taken at first."""
        base = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        found = self._unequal(self._crcs_of([(base + one.offset_bytes, one.length_bytes) for one in self._near]))
        for one, known in zip(self._far, self._read_sums(), strict=True):
            with data[one.offset_bytes : one.offset_bytes + one.length_bytes] as area:
                if weighted_sum_of_bytes(area, one.view.itemsize) != known:
                    found.append(one.key)
        return list(dict.fromkeys(found))

    def changed_sources(self) -> list[str]:
        """Return the keys of tensors that no longer have the checksums taken at first.

        Samples on devices are left out: the caller would wait until the device's queue is empty.
        """
        found = self._unequal(self._near_now())
        for one, known in zip(self._far[: self._far_whole], self._sums, strict=False):
            try:
                if int(weighted_sum(one.view)) != int(known):
                    found.append(one.key)
            except torch.OutOfMemoryError as error:
                log.info("%s is not checksummed again, only its version counter is compared: %s", one.key, error)
        return list(dict.fromkeys(found))

    def _take_sums(self) -> None:
        """Sum the tensors on devices. If a device has no room for that, only version counters prove the rest."""
        for number, one in enumerate(self._far):
            try:
                self._sums.append(weighted_sum(one.view))
            except torch.OutOfMemoryError as error:
                log.info(
                    "%d entries, the first on %s, are not checksummed, only version counters are compared: %s",
                    len(self._far) - number,
                    one.view.device,
                    error,
                )
                del self._far[number:]
                self._far_whole = min(self._far_whole, number)
                return

    def _read_sums(self) -> list[int]:
        """Read the sums from the devices. Waits for the sums, but not for what was queued behind them."""
        sums = [int(value) if value.is_cpu else 0 for value in self._sums]
        for device, event in self._events.items():
            here = [number for number, value in enumerate(self._sums) if value.device == device]
            stream = side_stream(device)
            with stream:
                stream.wait_event(event)
                told = torch.stack([self._sums[number] for number in here]).tolist()
            for number, value in zip(here, told, strict=True):
                sums[number] = value
        return sums

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


def window(tensor: torch.Tensor, most_bytes: int, at: float) -> tuple[torch.Tensor, int]:
    """Return a view of at most so many bytes (or of one element) and its offset in the tensor's contiguous bytes.

    `at`: where the view lies, from 0 (at the tensor's beginning) to just below 1 (at its end).
    """
    tensor = tensor.detach()
    skipped = 0
    while tensor.dim() and tensor.numel() > 1 and (size := tensor.numel() * tensor.itemsize) > most_bytes:
        row_bytes = size // tensor.shape[0]
        rows = most_bytes // row_bytes
        start = int((tensor.shape[0] - max(rows, 1) + 1) * at)
        tensor = tensor[start : start + rows] if rows else tensor[start]
        skipped += start * row_bytes
    return tensor, skipped


def view_of(fqn: str, tensor: torch.Tensor, source: TensorSource) -> torch.Tensor:
    """Return one entry as a tensor: a view of the user's memory, of any stride, on any device."""
    if source.whole:
        local = plain_local(tensor)
        if local is not None:
            return local
    part = local_parts(fqn, tensor)[source.part]
    return part if source.whole else narrow(part, source.local_offsets, source.sizes)
