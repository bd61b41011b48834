"""Compares assumed tensors between ranks, which count as the same but may differ.

The first save, which is collective anyway, compares all of them. Some of the later saves compare a few of those in host
memory, without communication between ranks: each rank packs checksums into its shard, and the lowest rank of the node
reads those of the others afterwards.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashckpt import native
from flashckpt.devices import as_bits
from flashckpt.errors import FlashError, InternalError
from flashckpt.format.shard import read_envelope
from flashckpt.save.values import unpack
from flashckpt.state.regions import local_parts, plain_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import Sealed, SlotStore
    from flashckpt.types import Generation

log = logging.getLogger(__name__)

WAYS_ON = (
    "If each rank needs its own values, wrap them in flashckpt.PerRank; or make the ranks equal before the save, e.g. "
    "with dist.broadcast; or turn this check off with same_on_ranks='ignore'."
)

# Bytes that the first save reads from the middle of each tensor, and of all tensors: takes some milliseconds.
WINDOW_BYTES = 64 << 10
BUDGET_BYTES = 64 << 20
# Tensors per later sample, and bytes read of each.
SAMPLE_TENSORS = 64
SAMPLE_WINDOW_BYTES = 8 << 10
SAMPLE_EVERY = 8  # one in this many saves, on average, is sampled

_GATHER_BYTES = 4 << 20  # at most so many bytes of all ranks' checksums are gathered if summaries differ
_FEWEST_SUMS = 64
_PENDING = 2  # at most so many samples wait for the shards of the other ranks
_SHOWN = 4

_COMPARING = "comparing tensors that count as the same on all ranks"
_SUMMARY = struct.Struct("<QQ")


class Summary(NamedTuple):
    """Summarizes the assumed tensors of one rank at the first save."""

    names: int  # hash of the keys: only ranks with the same keys compare
    digest: int  # hash of their checksums; 0: not taken


NOTHING = Summary(0, 0)


class Comparer:
    """Compares for one rank. Warns at most once about the first save, and at most once about later samples."""

    def __init__(self, topology: Topology, store: SlotStore, job: str, *, enabled: bool) -> None:
        self._topology = topology
        self._store = store
        self._job = job
        self._enabled = enabled
        self._sums: array[int] = array("Q")
        self.is_due = topology.world > 1  # the first save has not been compared yet; the same on all ranks
        self._told: set[str] = set()
        self._samples = enabled and len(topology.node_ranks) > 1
        self._pending: dict[Generation, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    # --- at the first save ----------------------------------------------------------------------------------

    def summary(self, flat: Flat, plan: SavePlan) -> Summary:
        """Summarize this rank's assumed tensors. Local. Never raises, because the other ranks wait for the summary."""
        if not self._enabled or not plan.assumed or not self.is_due:
            return NOTHING
        try:
            window = max(64, min(WINDOW_BYTES, BUDGET_BYTES // len(plan.assumed)))
            self._sums = array("Q", checksums(flat, plan.assumed, window))
        except (FlashError, RuntimeError) as error:
            log.info("this rank does not compare tensors that count as the same on all ranks: %s", error)
            return NOTHING
        return Summary(_names(flat, plan.assumed), _hash(self._sums.tobytes()))

    def meet(self, group: PrivateGroup, flat: Flat | None, plan: SavePlan | None) -> None:
        """Gathers the summaries and compares them. Collective; a rank that has nothing to save passes None."""
        mine = NOTHING if flat is None or plan is None else self.summary(flat, plan)
        answers = group.gather(_SUMMARY.pack(*mine), _COMPARING)
        self.compare(group, [Summary(*_SUMMARY.unpack(one)) for one in answers], flat, plan)

    def compare(
        self, group: PrivateGroup, summaries: Sequence[Summary], flat: Flat | None, plan: SavePlan | None
    ) -> None:
        """Finds which tensors differ if the summaries do. Collective: each rank passes the same summaries."""
        self.is_due = False
        groups: dict[int, list[int]] = {}
        for rank, one in enumerate(summaries):
            if one.digest:
                groups.setdefault(one.names, []).append(rank)
        differing = [ranks for ranks in groups.values() if len({summaries[rank].digest for rank in ranks}) > 1]
        if not differing:
            return
        mine = next((ranks for ranks in differing if self._topology.rank in ranks), None)
        most = max(_FEWEST_SUMS, _GATHER_BYTES // 8 // self._topology.world)
        runs = _runs(len(self._sums), most) if mine else []
        sums = array("Q", (_run_sum(self._sums, run) for run in runs))
        answers = group.gather(sums.tobytes(), _COMPARING)
        if mine is None or flat is None or plan is None:
            return
        theirs = {rank: array("Q", answers[rank]) for rank in mine}
        if len({len(one) for one in theirs.values()}) > 1:
            raise InternalError(f"checksums of ranks {mine}: expected as many of each, found {list(map(len, answers))}")
        keys = _keys(flat, plan.assumed)
        found = [number for number in range(len(runs)) if len({one[number] for one in theirs.values()}) > 1]
        self._told.update(key for number in found for key in keys[runs[number].start : runs[number].stop])
        if self._topology.rank == mine[0] and found:
            named = [_named(keys, runs[number]) for number in found]
            _warn(named, {rank: one[found[0]] for rank, one in theirs.items()}, "")

    # --- afterwards -----------------------------------------------------------------------------------------

    def sample(self, flat: Flat, plan: SavePlan, generation: Generation) -> tuple[int, ...]:
        """Returns checksums of a few tensors to pack into the shard; () if this generation is not sampled."""
        if not self._samples or not plan.assumed or not is_sampled(generation.step):
            return ()
        leaves = list(flat.tensors.values())
        near = [index for index in plan.assumed if leaves[index].is_cpu]  # the training thread would wait for a device
        count = len(near)
        if not count:
            return ()
        first = _spread(generation.step) % count
        picked = tuple(near[(first + i) % count] for i in range(min(count, SAMPLE_TENSORS)))
        try:
            sums = tuple(checksums(flat, picked, SAMPLE_WINDOW_BYTES))
        except (FlashError, RuntimeError):
            return ()
        sample = (_names(flat, picked), *sums)
        if self._topology.is_leader:
            self._pending[generation] = _keys(flat, picked), sample
        return sample

    def look_back(self) -> None:
        """Compares earlier samples with those in the shards of the other ranks. For the lowest rank of a node only."""
        while len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]
        if not self._pending:
            return
        present = {(one.shard.generation, one.shard.rank): one for one in self._store.scan()}
        others = self._topology.node_ranks[1:]
        for generation in list(self._pending):
            sealed = {rank: present[generation, rank] for rank in others if (generation, rank) in present}
            if len(sealed) == len(others):
                self._compare_samples(generation, *self._pending.pop(generation), sealed)

    def _compare_samples(
        self, generation: Generation, keys: Sequence[str], mine: tuple[int, ...], sealed: Mapping[int, Sealed]
    ) -> None:
        theirs = {rank: self._sample_of(one) for rank, one in sealed.items()}
        # Leave out ranks whose sample is missing or has other keys.
        known = {rank: one for rank, one in theirs.items() if len(one) == len(mine) and one[0] == mine[0]}
        known[self._topology.rank] = mine
        found = [
            number
            for number, key in enumerate(keys, start=1)
            if key not in self._told and len({one[number] for one in known.values()}) > 1
        ]
        if found:
            self._samples = False
            named = [repr(keys[number - 1]) for number in found]
            _warn(named, {rank: one[found[0]] for rank, one in sorted(known.items())}, f"{generation}: ")

    def _sample_of(self, sealed: Sealed) -> tuple[int, ...]:
        """Returns the sample in a shard; () if it can't be read, because its slot may have been recycled."""
        try:
            fd = self._store.open_shard(sealed)
            try:
                head = read_envelope(fd, expect=sealed.shard, job=self._job)
                values = bytearray(head.values_length_bytes)
                address = ctypes.addressof((ctypes.c_char * len(values)).from_buffer(values)) if values else 0
                pieces = array("q", (head.values_offset_bytes, address, len(values)))
                area = (fd, head.data_offset_bytes, head.data_length_bytes, head.chunk_bytes, head.chunk_crcs)
                if not values or native.gather_read(*area, pieces, 1):
                    return ()
                return unpack(values).sample
            finally:
                os.close(fd)
        except (FlashError, OSError):
            return ()


def is_sampled(step: int) -> bool:
    """Returns the same on every rank. Steps are hashed, so that multiples of any save interval are sampled too."""
    return _spread(step) % SAMPLE_EVERY == 0


def checksums(flat: Flat, which: Iterable[int], window_bytes: int) -> list[int]:
    """Returns one number for each of these tensors, from at most `window_bytes` of its middle.

    For host memory it is a CRC32C. For an accelerator it is a weighted sum that the device computes; this thread waits
    for it, and so for everything that is queued on the device before it.
    """
    tensors, fqns = list(flat.tensors.values()), list(flat.tensors)
    sums: list[int] = []
    queued: list[tuple[int, torch.Tensor]] = []
    for index in which:
        tensor = plain_local(tensors[index])
        if tensor is None:
            (tensor,) = local_parts(fqns[index], tensors[index])
        size = tensor.numel() * tensor.itemsize
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
            length = min(size, window_bytes)
            start = (size - length) // 2
            address = tensor.data_ptr()
            # SAFETY: `flat` holds the tensor, and the core keeps nothing.
            sums.append(native.crc32c((ctypes.c_char * length).from_address(address + start)) if address else 0)
        elif tensor.is_cpu:
            bits = as_bits(_window(tensor, window_bytes)).contiguous().view(-1).view(torch.uint8)
            sums.append(native.crc32c(bits.numpy().data))
        else:
            queued.append((len(sums), _weighted_sum(_window(tensor, window_bytes))))
            sums.append(0)
    # Wait once per device and not once per tensor.
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for one in queued:
        by_device.setdefault(one[1].device, []).append(one)
    for many in by_device.values():
        told = torch.stack([value for _, value in many]).tolist()
        for (at, _), value in zip(many, told, strict=True):
            sums[at] = value & ((1 << 64) - 1)
    return sums


def _window(tensor: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """Returns a view of at most `most_bytes` from the middle of a tensor, but of at least one element."""
    tensor = tensor.detach()
    while tensor.dim() and tensor.numel() * tensor.itemsize > most_bytes and tensor.numel() > 1:
        rows = most_bytes // (tensor.numel() // tensor.shape[0] * tensor.itemsize)
        start = (tensor.shape[0] - rows) // 2
        tensor = tensor[start : start + rows] if rows else tensor[tensor.shape[0] // 2]
    return tensor


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the elements' bits as integers, each times its place, so that another order is found too."""
    bits = as_bits(tensor).reshape(-1).to(torch.int64)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def _keys(flat: Flat, which: Iterable[int]) -> tuple[str, ...]:
    fqns = list(flat.tensors)
    return tuple(fqns[index] for index in which)


def _names(flat: Flat, which: Iterable[int]) -> int:
    return _hash("\0".join(_keys(flat, which)).encode(errors="surrogatepass"))


def _hash(data: bytes) -> int:
    """Returns a hash that is never 0, because 0 means that no checksum was taken."""
    return struct.unpack("<Q", hashlib.blake2b(data, digest_size=8).digest())[0] >> 1 or 1


def _spread(step: int) -> int:
    return (step * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 32


def _runs(count: int, most: int) -> list[range]:
    """Divides `count` indices into at most `most` ranges."""
    most = min(count, most)
    return [range(count * i // most, count * (i + 1) // most) for i in range(most)]


def _run_sum(sums: array[int], run: range) -> int:
    return sums[run.start] if len(run) == 1 else _hash(sums[run.start : run.stop].tobytes())


def _named(keys: Sequence[str], run: range) -> str:
    if len(run) == 1:
        return repr(keys[run.start])
    return f"some of {len(run)} from {keys[run.start]!r} to {keys[run.stop - 1]!r}"


def _warn(named: Sequence[str], by_rank: Mapping[int, int], where: str) -> None:
    alike: dict[int, list[int]] = {}
    for rank, value in by_rank.items():
        alike.setdefault(value, []).append(rank)
    sides = [f"{ranks[:8]}{' and more' if len(ranks) > 8 else ''}" for ranks in list(alike.values())[:_SHOWN]]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    log.warning(
        "%stensors that count as the same on all ranks differ between ranks: %s%s (%s: ranks %s%s). A load gives all "
        "ranks the values of rank %d. %s",
        where,
        ", ".join(named[:_SHOWN]),
        more,
        named[0],
        " against ".join(sides),
        f" and {len(alike) - _SHOWN} more groups" if len(alike) > _SHOWN else "",
        min(by_rank),
        WAYS_ON,
    )
