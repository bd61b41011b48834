"""Read: verified chunks of sealed shards into the live tensors, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashckpt import native
from flashckpt.devices import as_bits, native_address
from flashckpt.errors import CorruptShardError
from flashckpt.failpoints import failpoint
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.load.cover import keys_in_chunks
from flashckpt.load.plan import Int64s, Transfer, runs
from flashckpt.state.regions import narrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from flashckpt.format.shard import Envelope
    from flashckpt.types import Box, Layout

# What can't be read straight into its tensor goes through host buffers of at most this size in total.
BOUNCE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A live local tensor and the box of the global tensor that it is."""

    tensor: torch.Tensor
    box: Box


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard with its parsed header, whole or as far as it was fetched; the descriptor stays the owner's."""

    fd: int
    head: Envelope
    layout: Layout  # for messages


@dataclass(frozen=True, slots=True)
class _Bounce:
    buffer: torch.Tensor
    transfer: Transfer


def read(
    transfers: Sequence[Transfer],
    shards: Mapping[int, OpenShard],
    targets: Sequence[Target],
    *,
    threads: int,
    verify: bool,
) -> None:
    """Carries out the transfers. Bytes reach a tensor only once their chunk's checksum was found right.

    Raises CorruptShardError (with `.shard_index`) where a chunk is bad; other chunks may be in place by then.
    """
    for batch in _batches(transfers, targets):
        by_shard: dict[int, list[Int64s]] = {}
        bounces: list[_Bounce] = []
        for transfer in batch:
            pieces = _pieces(transfer, targets[transfer.want.target], bounces)
            by_shard.setdefault(transfer.shard, []).append(pieces)
        _count_writes([targets[transfer.want.target].tensor for transfer in batch])
        for number, pieces_list in by_shard.items():
            failpoint("mid_read")
            _gather(shards[number], number, np.concatenate(pieces_list), threads, verify)
        for bounce in bounces:
            land(bounce.buffer, bounce.transfer.overlap, targets[bounce.transfer.want.target])


def read_range(shard: OpenShard, number: int, offset_bytes: int, length_bytes: int, verify: bool) -> bytearray:
    """A byte range of the data area, verified."""
    data = bytearray(length_bytes)
    if length_bytes:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        _gather(shard, number, np.array([[offset_bytes, address, length_bytes]], dtype=np.int64), 1, verify)
    return data


def _batches(transfers: Sequence[Transfer], targets: Sequence[Target]) -> Iterator[list[Transfer]]:
    """Groups transfers so that bounce buffers stay bounded; what needs none never starts a new group."""
    batch: list[Transfer] = []
    bounced = 0
    for transfer in transfers:
        size = transfer.overlap.volume * ITEMSIZE[transfer.entry.dtype]
        if not _direct(transfer, targets[transfer.want.target]):
            if bounced and bounced + size > BOUNCE_BYTES:
                yield batch
                batch, bounced = [], 0
            bounced += size
        batch.append(transfer)
    if batch:
        yield batch


def _count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd, which does not see the native core write, that saved tensors are no longer what they were."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _direct(transfer: Transfer, target: Target) -> bool:
    return transfer.entry.dtype == transfer.want.dtype and native_address(transfer.want.fqn, target.tensor) is not None


def _pieces(transfer: Transfer, target: Target, bounces: list[_Bounce]) -> Int64s:
    itemsize = ITEMSIZE[transfer.entry.dtype]
    if _direct(transfer, target):
        base, inside = target.tensor.data_ptr(), target.box
    else:
        dtype = getattr(torch, transfer.entry.dtype)
        buffer = torch.empty(transfer.overlap.sizes, dtype=dtype)
        bounces.append(_Bounce(buffer, transfer))
        base, inside = buffer.data_ptr(), transfer.overlap
    sources, destinations, length = runs(transfer.overlap, transfer.entry.box, inside, itemsize)
    pieces = np.empty((len(sources), 3), dtype=np.int64)
    pieces[:, 0] = sources + transfer.entry.offset_bytes
    pieces[:, 1] = destinations + base
    pieces[:, 2] = length
    return pieces


def land(source: torch.Tensor, overlap: Box, target: Target) -> None:
    """From host memory into its place in a tensor of whatever device, stride or dtype."""
    start = (at - base for at, base in zip(overlap.offsets, target.box.offsets, strict=True))
    into = narrow(target.tensor.detach(), start, overlap.sizes)
    if source.dtype == into.dtype and not (into.is_neg() or into.is_conj()):
        as_bits(into).copy_(as_bits(source))
    else:
        into.copy_(source)


def _gather(shard: OpenShard, number: int, pieces: Int64s, threads: int, verify: bool) -> None:
    head = shard.head
    bad = native.gather_read(
        shard.fd,
        head.data_offset_bytes,
        head.data_length_bytes,
        head.chunk_bytes,
        head.chunk_crcs,
        np.ascontiguousarray(pieces).data,
        threads,
        verify,
    )
    if bad:
        raise _corrupt(shard, number, bad)


def _corrupt(shard: OpenShard, number: int, bad: Sequence[int]) -> CorruptShardError:
    head = shard.head
    size = head.chunk_bytes
    return CorruptShardError(
        f"{head.shard}: {len(bad)} of {-(-head.data_length_bytes // size)} chunks fail their crc32c or are cut "
        f"off, first chunk {bad[0]} at byte {head.data_offset_bytes + bad[0] * size}; "
        f"keys {keys_in_chunks(shard.layout, size, bad)[:8]}",
        hint="the copy in memory is damaged; another copy or generation is used where there is one",
        shard=head.shard,
        shard_index=number,
    )
