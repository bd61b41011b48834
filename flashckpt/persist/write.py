"""Writes the files of a persisted step from sealed shards. Every chunk is verified before a byte of it is written.

A tensor's part is a `torch.save` blob at an offset of a data file, and so is a value: DCP's own reader expects this.
The bytes of a tensor are copied in tiles, so that each tile is still in the processor's cache when it is checksummed
and written. persist/frame.py makes what is around them.
"""

from __future__ import annotations

import functools
import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from flashckpt import native
from flashckpt.errors import CorruptShardError
from flashckpt.failpoints import failpoint
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.shard import read_header
from flashckpt.persist.frame import frame_of
from flashckpt.persist.meta import FileInfo
from flashckpt.persist.names import data_name, values_name
from flashckpt.persist.plan import Contribution, TensorItem
from flashckpt.save.values import unpack
from flashckpt.state.runs import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flashckpt.move.throttle import Throttle
    from flashckpt.persist.plan import PersistPlan, ValueItem
    from flashckpt.persist.storage import Stage, Storage, Writer
    from flashckpt.save.values import Values
    from flashckpt.types import ShardHeader, ShardId


_TILE_BYTES = 1 << 20


class Scratch:
    """Holds memory into which one region after the other is read: faulting in new pages for each costs more than the
    copy.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)

    def tensor(self, sizes: tuple[int, ...], dtype: torch.dtype, size_bytes: int) -> torch.Tensor:
        if not size_bytes:
            return torch.empty(sizes, dtype=dtype)
        if len(self._buffer) < size_bytes:
            self._buffer = np.empty(size_bytes, dtype=np.uint8)
        # IMPORTANT: a storage of its own, exactly as long as the region, because torch.save writes whole storages.
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=size_bytes).view(dtype).view(sizes)


class Shard:
    """Reads one sealed shard. Owns its descriptor."""

    def __init__(self, fd: int, shard: ShardId, job: str) -> None:
        self.fd = fd
        self.header: ShardHeader = read_header(fd, expect=shard, job=job)
        self.values_blob = self._range(self.header.values_offset_bytes, self.header.values_length_bytes)
        self.values: Values = unpack(self.values_blob)

    @property
    def rank(self) -> int:
        return self.header.shard.rank

    def contribution(self) -> Contribution:
        values = self.values
        return Contribution(
            self.rank,
            self.header.layout.entries,
            tuple(fqn for fqn in values.values if fqn not in values.per_rank),
            tuple(fqn for fqn in values.values if fqn in values.per_rank),
            values.assumed_bytes,
        )

    def tiles(self, item: TensorItem, scratch: Scratch) -> Iterator[memoryview]:
        """Yield the bytes of the region in order, verified. Each tile is in `scratch` until the next one is read."""
        entry = item.entry
        sources, _, length = runs(item.box, entry.box, item.box, ITEMSIZE[entry.dtype])
        if length < item.size_bytes:  # many small runs: read all of them at once
            whole = self.read(item, scratch).view(-1).view(torch.uint8).numpy().data
            yield from (whole[start : start + _TILE_BYTES] for start in range(0, len(whole), _TILE_BYTES))
            return
        # Cut at chunks, which are verified completely, so that none is read twice.
        step = max(_TILE_BYTES, self.header.chunk_bytes)
        start = int(sources[0]) + entry.offset_bytes
        end = start + length
        while start < end:
            stop = min(end, (start // step + 1) * step)
            tile = scratch.tensor((stop - start,), torch.uint8, stop - start)
            self._gather(np.array([[start, tile.data_ptr(), stop - start]], dtype=np.int64), f"key {entry.fqn!r}")
            yield tile.numpy().data
            start = stop

    def read(self, item: TensorItem, scratch: Scratch) -> torch.Tensor:
        """Read the region, verified. It is in `scratch` until the next one is read."""
        entry = item.entry
        tensor = scratch.tensor(item.box.sizes, getattr(torch, entry.dtype), item.size_bytes)
        if item.box.volume:
            sources, destinations, length = runs(item.box, entry.box, item.box, ITEMSIZE[entry.dtype])
            pieces = np.empty((len(sources), 3), dtype=np.int64)
            pieces[:, 0] = sources + entry.offset_bytes
            pieces[:, 1] = destinations + tensor.data_ptr()
            pieces[:, 2] = length
            self._gather(pieces, f"key {entry.fqn!r}")
        return tensor

    def _range(self, offset_bytes: int, length_bytes: int) -> bytes:
        data = np.empty(length_bytes, dtype=np.uint8)
        if length_bytes:
            pieces = np.array([[offset_bytes, data.ctypes.data, length_bytes]], dtype=np.int64)
            self._gather(pieces, "its values")
        return data.tobytes()

    def _gather(self, pieces: Any, what: str) -> None:
        header = self.header
        bad = native.gather_read(
            self.fd,
            header.data_offset_bytes,
            header.data_length_bytes,
            header.chunk_bytes,
            header.chunk_crcs,
            np.ascontiguousarray(pieces).data,
            1,
            True,
        )
        if bad:
            raise CorruptShardError(
                f"{header.shard}: {what}: {len(bad)} chunks fail their crc32c or are cut off, first chunk {bad[0]}",
                shard=header.shard,
            )

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Placed:
    """Says where one part of the checkpoint is."""

    key: str
    offsets: tuple[int, ...] | None  # offset of the region in the tensor; None: a value
    file: str
    offset_bytes: int
    length_bytes: int
    crc32c: int


@dataclass(slots=True)
class WrittenFiles:
    """Describes what one node wrote."""

    files: dict[str, FileInfo] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)


def write_files(
    storage: Storage,
    stage: Stage,
    plan: PersistPlan,
    shards: Sequence[Shard],
    *,
    throttle: Throttle,
    concurrency: int,
    progress: Callable[[int], None],
) -> WrittenFiles:
    """Write what comes from these shards. All files are durable when this returns.

    If one file fails, no other is begun, and the first error is raised.
    """
    jobs: list[tuple[str, Shard, list[TensorItem | ValueItem]]] = []
    parts = max(1, -(-concurrency // max(1, len(shards))))
    for shard in shards:
        items = [one for one in plan.tensors if one.rank == shard.rank]
        values = [one for one in plan.values if one.rank == shard.rank]
        for number, bucket in enumerate(_buckets(items, parts)):
            if bucket or (number == 0 and values):
                name = data_name(shard.rank, number, stage.suffix)
                jobs.append((name, shard, [*bucket, *(values if number == 0 else [])]))
    result = WrittenFiles()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="flush") as pool:
        running = [
            pool.submit(_write_file, storage, stage, name, shard, items, throttle, progress)
            for name, shard, items in jobs
        ]
        try:
            # IMPORTANT: get every result, so that no thread's error is lost.
            for (name, _, _), one in zip(jobs, running, strict=True):
                result.files[name], placed = one.result()
                result.placed += placed
        except BaseException:
            for one in running:
                one.cancel()
            raise
    for shard in shards:
        name = values_name(shard.rank, stage.suffix)
        with storage.open_write(f"{stage.place}/{name}") as file:
            file.write(shard.values_blob)
        result.files[name] = FileInfo(len(shard.values_blob), native.crc32c(shard.values_blob))
        result.values[shard.rank] = name
    return result


def _write_file(
    storage: Storage,
    stage: Stage,
    name: str,
    shard: Shard,
    items: Sequence[TensorItem | ValueItem],
    throttle: Throttle,
    progress: Callable[[int], None],
) -> tuple[FileInfo, list[Placed]]:
    placed = []
    with storage.open_write(f"{stage.place}/{name}") as file:
        stream, scratch = _Stream(file, throttle, progress), Scratch()
        for item in items:
            failpoint("mid_flush")
            start, stream.part_crc32c = stream.position, 0
            if isinstance(item, TensorItem):
                _write_tensor(stream, shard, item, scratch)
                offsets: tuple[int, ...] | None = item.box.offsets
            else:
                buffer = io.BytesIO()
                torch.save(shard.values.values[item.fqn], buffer)
                stream.write(buffer.getbuffer())
                offsets = None
            length = stream.position - start
            placed.append(Placed(item.key, offsets, name, start, length, stream.part_crc32c))
    return FileInfo(stream.position, stream.crc32c), placed


def _write_tensor(stream: _Stream, shard: Shard, item: TensorItem, scratch: Scratch) -> None:
    dtype = storable(getattr(torch, item.entry.dtype))
    frame = frame_of(dtype, item.box.sizes, item.size_bytes)
    if frame is None:
        torch.save(shard.read(item, scratch).view(dtype), cast("IO[bytes]", stream))
        return
    stream.write(frame.head)
    for tile in shard.tiles(item, scratch) if item.size_bytes else ():
        stream.write(tile)
    stream.write(frame.tail)


def storable(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, or uint8 if torch.save does not know it (e.g. int2). Our own reader restores such a tensor, and
    plain DCP reads everything else.
    """
    return dtype if _torch_saves(dtype) else torch.uint8


@functools.cache
def _torch_saves(dtype: torch.dtype) -> bool:
    try:
        blob = io.BytesIO()
        torch.save(torch.empty(1, dtype=dtype), blob)
        blob.seek(0)
        torch.load(blob, weights_only=True)
    except Exception:
        return False
    return True


class _Stream(io.RawIOBase):
    """Receives what torch.save writes: counts, checksums and throttles."""

    def __init__(self, file: Writer, throttle: Throttle, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._file = file
        self._throttle = throttle
        self._progress = progress
        self.position = 0
        self.crc32c = 0  # counts for the whole file
        self.part_crc32c = 0  # counts what was written since it was last set to 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._throttle.take(len(view))
        self._file.write(view)
        # One pass over the bytes for both.
        crc = native.crc32c(view)
        self.crc32c = native.crc32c_combine(self.crc32c, crc, len(view))
        self.part_crc32c = native.crc32c_combine(self.part_crc32c, crc, len(view))
        self.position += len(view)
        self._progress(len(view))
        return len(view)


def _buckets(items: Sequence[TensorItem], count: int) -> list[list[TensorItem]]:
    """Deal out the sizes so that the bytes are as equal as the largest ones allow; the order within each part stays."""
    sizes = [0] * count
    chosen: dict[int, int] = {}
    for index in sorted(range(len(items)), key=lambda index: -items[index].size_bytes):
        bucket = sizes.index(min(sizes))
        chosen[index] = bucket
        sizes[bucket] += items[index].size_bytes
    return [[item for index, item in enumerate(items) if chosen[index] == number] for number in range(count)]
