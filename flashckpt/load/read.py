"""Reads chunks of sealed shards into the live tensors, in place, and verifies them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashckpt import native
from flashckpt.collector import collector_paused
from flashckpt.devices import Upload, copy_into, native_address
from flashckpt.errors import CorruptShardError
from flashckpt.failpoints import failpoint
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.state.cover import keys_in_chunks
from flashckpt.state.regions import narrow
from flashckpt.state.runs import Int64s, runs
from flashckpt.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flashckpt.format.shard import ShardEnvelope
    from flashckpt.load.plan import Transfer
    from flashckpt.types import Layout

_ALIGN_BYTES = 64
# What can't be read directly into its tensor goes through host buffers (devices/upload.py) of at most this size in all.
BOUNCE_BYTES = 256 << 20


class Target(NamedTuple):
    """A live local tensor, and its box in the global tensor."""

    tensor: torch.Tensor
    box: Box


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard, or its fetched part, with its parsed header. Whoever made it closes the descriptor."""

    fd: int
    head: ShardEnvelope
    layout: Layout  # for messages
    mapped: memoryview | None = None  # the whole file, if this process wrote it: it neither changes nor shrinks


class _Bounce(NamedTuple):
    """A part of a transfer that goes through the staging buffer, and its offset there."""

    transfer: Transfer
    offset_bytes: int


class _Batch(NamedTuple):
    direct: list[tuple[Transfer, int]]  # with the address of the tensor
    bounces: list[_Bounce]


def read(
    transfers: Sequence[Transfer],
    shards: Mapping[int, OpenShard],
    targets: Sequence[Target],
    *,
    threads: int,
    verify: bool,
) -> None:
    """Carries out the transfers. Bytes reach a tensor only after their chunk's checksum was found right.

    What goes to a device is read and verified into one staging buffer while the device copies from the other. When
    this returns or raises, no copy is under way. Raises CorruptShardError (with `.shard_index`) if a chunk is bad;
    other chunks may be in the tensors by then.
    """
    device = next((target.tensor.device for target in targets if not target.tensor.is_cpu), None)
    with Upload(BOUNCE_BYTES, device) as upload:
        for batch in _batches(transfers, targets, upload.buffer_bytes):
            buffer = upload.next_buffer() if batch.bounces else None
            by_shard: dict[int, array[int]] = {}
            with collector_paused():
                for transfer, address in batch.direct:
                    pieces = by_shard.setdefault(transfer.shard, array("q"))
                    _add_pieces(pieces, transfer, targets[transfer.want.target].box, address)
                for transfer, offset in batch.bounces:
                    pieces = by_shard.setdefault(transfer.shard, array("q"))
                    if buffer is not None:
                        _add_pieces(pieces, transfer, transfer.overlap, buffer.data_ptr() + offset)
            count_writes([targets[transfer.want.target].tensor for transfer, _ in (*batch.direct, *batch.bounces)])
            for number, pieces in by_shard.items():
                failpoint("mid_read")
                _gather(shards[number], number, pieces, threads, verify)
            for transfer, offset in batch.bounces:
                if buffer is not None:
                    target = targets[transfer.want.target]
                    upload.put(_staged(buffer, transfer, offset), _place(transfer.overlap, target))


def pieces_for(transfers: Iterable[Transfer], targets: Sequence[Target]) -> dict[int, Int64s] | None:
    """Returns, for each shard, where its bytes belong: ascending rows of (offset in the data area, address, length).

    Returns None if bytes can't be written directly into a tensor: it is on a device, of another dtype or not laid out
    like the stored bytes, or several tensors want the same bytes.
    """
    by_shard: dict[int, array[int]] = {}
    with collector_paused():
        for transfer in transfers:
            target = targets[transfer.want.target]
            address = _address(transfer, target)
            if address is None:
                return None
            _add_pieces(by_shard.setdefault(transfer.shard, array("q")), transfer, target.box, address)
    found: dict[int, Int64s] = {}
    for rank, triples in by_shard.items():
        rows = np.frombuffer(triples, dtype=np.int64).reshape(-1, 3)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        if (rows[:-1, 0] + rows[:-1, 2] > rows[1:, 0]).any():
            return None
        found[rank] = rows
    return found


def read_range(shard: OpenShard, number: int, offset_bytes: int, length_bytes: int, verify: bool) -> bytearray:
    """Reads and verifies a byte range of the data area."""
    data = bytearray(length_bytes)
    if length_bytes:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        _gather(shard, number, array("q", (offset_bytes, address, length_bytes)), 1, verify)
    return data


def _batches(transfers: Sequence[Transfer], targets: Sequence[Target], limit_bytes: int) -> Iterator[_Batch]:
    """Groups transfers so that the staged bytes of a group fit in one staging buffer, and cuts larger transfers.

    A transfer without staging never starts a new group.
    """
    addresses = [_address(transfer, targets[transfer.want.target]) for transfer in transfers]
    order: Sequence[int] = range(len(transfers))
    if None in addresses:
        # In the order of the file, because chunks that two groups share are read and verified in each.
        order = sorted(order, key=lambda at: (transfers[at].shard, transfers[at].entry.offset_bytes))
    batch, used = _Batch([], []), 0
    for at in order:
        address = addresses[at]
        if address is not None:
            batch.direct.append((transfers[at], address))
            continue
        for part in _cut(transfers[at], limit_bytes):
            size = part.overlap.volume * ITEMSIZE[part.entry.dtype]
            start = -(-used // _ALIGN_BYTES) * _ALIGN_BYTES
            if batch.bounces and start + size > limit_bytes:
                yield batch
                batch, start = _Batch([], []), 0
            batch.bounces.append(_Bounce(part, start))
            used = start + size
    if batch.direct or batch.bounces:
        yield batch


def _cut(transfer: Transfer, limit_bytes: int) -> Iterator[Transfer]:
    """Cuts a transfer into rows, or parts of rows, of at most `limit_bytes` (at least one element each)."""
    box = transfer.overlap
    size = box.volume * ITEMSIZE[transfer.entry.dtype]
    dim = next((at for at, count in enumerate(box.sizes) if count > 1), None)
    if size <= limit_bytes or dim is None:
        yield transfer
        return
    count = box.sizes[dim]
    rows = max(1, limit_bytes // (size // count))
    for start in range(0, count, rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(rows, count - start), *box.sizes[dim + 1 :])
        yield from _cut(transfer._replace(overlap=Box(offsets, sizes)), limit_bytes)


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that these tensors have changed: it does not see what the native core writes."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _address(transfer: Transfer, target: Target) -> int | None:
    if transfer.entry.dtype != transfer.want.dtype:
        return None
    return native_address(transfer.want.fqn, target.tensor)


def _add_pieces(pieces: array[int], transfer: Transfer, inside: Box, address: int) -> None:
    """Appends triples (offset in the data area, address, length) for native.gather_read. `inside`: the box whose
    elements lie at `address`, in row-major order."""
    if transfer.overlap == transfer.entry.box == inside:
        # Nearly every transfer: all of an entry into all of a tensor.
        pieces.extend((transfer.entry.offset_bytes, address, transfer.entry.length_bytes))
        return
    itemsize = ITEMSIZE[transfer.entry.dtype]
    sources, destinations, length = runs(transfer.overlap, transfer.entry.box, inside, itemsize)
    triples = np.empty((len(sources), 3), dtype=np.int64)
    triples[:, 0] = sources + transfer.entry.offset_bytes
    triples[:, 1] = destinations + address
    triples[:, 2] = length
    pieces.frombytes(triples.tobytes())


def _staged(buffer: torch.Tensor, transfer: Transfer, offset_bytes: int) -> torch.Tensor:
    """Returns the bytes of a transfer in the staging buffer as a tensor of the stored dtype."""
    dtype: torch.dtype = getattr(torch, transfer.entry.dtype)
    length = transfer.overlap.volume * dtype.itemsize
    return buffer[offset_bytes : offset_bytes + length].view(dtype).view(transfer.overlap.sizes)


def _place(overlap: Box, target: Target) -> torch.Tensor:
    start = (at - base for at, base in zip(overlap.offsets, target.box.offsets, strict=True))
    return narrow(target.tensor.detach(), start, overlap.sizes)


def copy_to_target(source: torch.Tensor, overlap: Box, target: Target) -> None:
    """Copies from host memory to its place in a tensor of any device, stride or dtype."""
    copy_into(_place(overlap, target), source)


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
        hint="the copy in memory is damaged; another copy or generation is used if there is one",
        shard=head.shard,
        shard_index=number,
    )
