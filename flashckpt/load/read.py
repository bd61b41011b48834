"""Read: verified chunks of sealed shards into the live tensors, in place."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashckpt import native
from flashckpt.collector import collector_paused
from flashckpt.devices import as_bits, native_address
from flashckpt.errors import CorruptShardError
from flashckpt.failpoints import failpoint
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.load.cover import keys_in_chunks
from flashckpt.load.plan import Int64s, Transfer, runs
from flashckpt.state.regions import narrow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flashckpt.format.shard import Envelope
    from flashckpt.types import Box, Layout

# What can't be read straight into its tensor goes through host buffers of at most this size in total.
BOUNCE_BYTES = 256 << 20


class Target(NamedTuple):
    """A live local tensor and the box of the global tensor that it is."""

    tensor: torch.Tensor
    box: Box


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard with its parsed header, whole or as far as it was fetched; the descriptor stays the owner's."""

    fd: int
    head: Envelope
    layout: Layout  # for messages
    mapped: memoryview | None = None  # the whole file, where this process wrote it: it neither changes nor shrinks


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
        by_shard: dict[int, array[int]] = {}
        bounces: list[_Bounce] = []
        with collector_paused():
            for transfer, address in batch:
                pieces = by_shard.get(transfer.shard)
                if pieces is None:
                    pieces = by_shard[transfer.shard] = array("q")
                _add_pieces(pieces, transfer, targets[transfer.want.target], address, bounces)
        count_writes([targets[transfer.want.target].tensor for transfer, _ in batch])
        for number, pieces in by_shard.items():
            failpoint("mid_read")
            _gather(shards[number], number, pieces, threads, verify)
        for bounce in bounces:
            land(bounce.buffer, bounce.transfer.overlap, targets[bounce.transfer.want.target])


def pieces_for(transfers: Iterable[Transfer], targets: Sequence[Target]) -> dict[int, Int64s] | None:
    """For each shard rows of (offset in the data area, address, length), ascending: where its bytes belong.

    None where they can't go straight there: a tensor on a device, of another dtype or oddly laid out, or bytes that
    several tensors want.
    """
    by_shard: dict[int, array[int]] = {}
    with collector_paused():
        for transfer in transfers:
            target = targets[transfer.want.target]
            address = _address(transfer, target)
            if address is None:
                return None
            _add_pieces(by_shard.setdefault(transfer.shard, array("q")), transfer, target, address, [])
    found: dict[int, Int64s] = {}
    for rank, triples in by_shard.items():
        rows = np.frombuffer(triples, dtype=np.int64).reshape(-1, 3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        if (rows[:-1, 0] + rows[:-1, 2] > rows[1:, 0]).any():
            return None
        found[rank] = rows
    return found


def read_range(shard: OpenShard, number: int, offset_bytes: int, length_bytes: int, verify: bool) -> bytearray:
    """A byte range of the data area, verified."""
    data = bytearray(length_bytes)
    if length_bytes:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        _gather(shard, number, array("q", (offset_bytes, address, length_bytes)), 1, verify)
    return data


def _batches(transfers: Sequence[Transfer], targets: Sequence[Target]) -> Iterator[list[tuple[Transfer, int | None]]]:
    """Groups transfers so that bounce buffers stay bounded; what needs none never starts a new group.

    With each the address of its tensor, None where it can't be read straight into it.
    """
    batch: list[tuple[Transfer, int | None]] = []
    bounced = 0
    for transfer in transfers:
        address = _address(transfer, targets[transfer.want.target])
        if address is None:
            size = transfer.overlap.volume * ITEMSIZE[transfer.entry.dtype]
            if bounced and bounced + size > BOUNCE_BYTES:
                yield batch
                batch, bounced = [], 0
            bounced += size
        batch.append((transfer, address))
    if batch:
        yield batch


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd, which does not see the native core write, that saved tensors are no longer what they were."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _address(transfer: Transfer, target: Target) -> int | None:
    if transfer.entry.dtype != transfer.want.dtype:
        return None
    return native_address(transfer.want.fqn, target.tensor)


def _add_pieces(
    pieces: array[int], transfer: Transfer, target: Target, address: int | None, bounces: list[_Bounce]
) -> None:
    """Triples (offset in the data area, address, length) as native.gather_read takes them."""
    itemsize = ITEMSIZE[transfer.entry.dtype]
    if address is not None and transfer.overlap == transfer.entry.box == target.box:
        # Nearly every transfer: all of an entry into all of a tensor.
        pieces.extend((transfer.entry.offset_bytes, address, transfer.entry.length_bytes))
        return
    if address is not None:
        base, inside = address, target.box
    else:
        dtype = getattr(torch, transfer.entry.dtype)
        buffer = torch.empty(transfer.overlap.sizes, dtype=dtype)
        bounces.append(_Bounce(buffer, transfer))
        base, inside = buffer.data_ptr(), transfer.overlap
    sources, destinations, length = runs(transfer.overlap, transfer.entry.box, inside, itemsize)
    triples = np.empty((len(sources), 3), dtype=np.int64)
    triples[:, 0] = sources + transfer.entry.offset_bytes
    triples[:, 1] = destinations + base
    triples[:, 2] = length
    pieces.frombytes(triples.tobytes())


def land(source: torch.Tensor, overlap: Box, target: Target) -> None:
    """From host memory into its place in a tensor of whatever device, stride or dtype."""
    start = (at - base for at, base in zip(overlap.offsets, target.box.offsets, strict=True))
    into = narrow(target.tensor.detach(), start, overlap.sizes)
    if source.dtype == into.dtype and not (into.is_neg() or into.is_conj()):
        as_bits(into).copy_(as_bits(source))
    else:
        into.copy_(source)


def _gather(shard: OpenShard, number: int, pieces: array[int], threads: int, verify: bool) -> None:
    head = shard.head
    start, length = head.data_offset_bytes, head.data_length_bytes
    if shard.mapped is not None:
        with shard.mapped[start : start + length] as data:
            bad = native.gather_copy(data, head.chunk_bytes, head.chunk_crcs, pieces, threads, verify)
    else:
        bad = native.gather_read(shard.fd, start, length, head.chunk_bytes, head.chunk_crcs, pieces, threads, verify)
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
