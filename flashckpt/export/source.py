"""Reads the tensors for an export: one complete, verified tensor at a time. The step itself is not changed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flashckpt.errors import NotFoundError, UnusableError
from flashckpt.format.layout import decode_layout
from flashckpt.format.shard import read_envelope
from flashckpt.load.disk.elsewhere import open_path, read_tensor
from flashckpt.load.read import OpenShard, read_range
from flashckpt.save.values import unpack
from flashckpt.state.assumed import AssumedTensors, only_from_one
from flashckpt.state.cover import index, uncovered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.state.cover import Piece
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]


class SavedStep(Protocol):
    """Reads one saved step."""

    step: int

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors by key, in the order in which they were saved, without those that belong to one rank
        alone.
        """

    def read(self, key: str) -> torch.Tensor:
        """Return the complete tensor, on the CPU. Raises CorruptShardError if its bytes are not what was saved."""


class MemorySource:
    """Reads a generation whose shards are all in this node's memory."""

    def __init__(self, generation: Generation, shards: dict[int, OpenShard], pieces: dict[str, list[Piece]]) -> None:
        """Use `memory_source` instead."""
        self.step = generation.step
        self._shards = shards
        self._pieces = pieces

    def tensors(self) -> dict[str, TensorInfo]:
        entries = {key: pieces[0].entry for key, pieces in self._pieces.items()}
        return {key: TensorInfo(getattr(torch, one.dtype), one.global_shape) for key, one in entries.items()}

    def read(self, key: str) -> torch.Tensor:
        pieces = self._pieces[key]
        first = pieces[0].entry
        dtype = getattr(torch, first.dtype)
        whole = torch.empty(first.global_shape, dtype=dtype)
        for piece in pieces:
            entry, rank = piece.entry, piece.ranks[0]
            if not entry.length_bytes:
                continue
            data = read_range(self._shards[rank], rank, entry.offset_bytes, entry.length_bytes, True)
            part = torch.frombuffer(data, dtype=dtype).reshape(entry.box.sizes)
            region = tuple(slice(at, at + n) for at, n in zip(entry.box.offsets, entry.box.sizes, strict=True))
            whole[region] = part
        return whole


class PathSource:
    """Reads a persisted step, a foreign DCP checkpoint, or a Hugging Face model, whose names are below `model`."""

    def __init__(self, path: str) -> None:
        """Open the step. NotFoundError if there is none; files that must not be trusted are refused."""
        self._source = open_path(path)
        self.step = self._source.generation.step

    def tensors(self) -> dict[str, TensorInfo]:
        entries = {key: pieces[0].entry for (key, owner), pieces in self._source.stored.items() if owner is None}
        return {key: TensorInfo(getattr(torch, one.dtype), one.global_shape) for key, one in entries.items()}

    def read(self, key: str) -> torch.Tensor:
        return read_tensor(self._source, key)


@contextlib.contextmanager
def memory_source(store: SlotStore, job: str, generation: Generation) -> Iterator[MemorySource]:
    """Open every shard of `generation`. UnusableError if this node does not hold all of them."""
    found = {one.shard.rank: one for one in store.scan() if one.shard.generation == generation}
    if not found:
        raise NotFoundError(f"{generation}: not in this node's memory", step=generation.step)
    world = next(iter(found.values())).shard.world
    missing = [rank for rank in range(world) if rank not in found]
    if missing:
        raise UnusableError(
            f"{generation}: this node holds {len(found)} of {world} shards, none of ranks {missing[:8]}",
            hint="export a persisted step, or on a node that holds all shards",
        )
    with contextlib.ExitStack() as opened:
        shards, layouts, ends = {}, [], []
        for rank in range(world):
            fd = store.open_shard(found[rank])
            opened.callback(os.close, fd)
            envelope = read_envelope(fd, expect=found[rank].shard, job=job)
            layouts.append(decode_layout(envelope.layout_bytes, f"{found[rank].shard}: layout"))
            shards[rank] = OpenShard(fd, envelope, layouts[-1])
            where = envelope.values_offset_bytes, envelope.values_length_bytes
            ends.append(unpack(read_range(shards[rank], rank, *where, True)).assumed_bytes)
        owners = [(rank,) for rank in range(world)]
        assumed = AssumedTensors(layouts, owners, ends, dict.fromkeys(range(world), 0))
        stored = only_from_one(index(layouts, owners), assumed)
        problems = uncovered(stored)
        if problems:
            raise UnusableError(f"{generation}: {'; '.join(problems[:4])}")
        shared = {key: pieces for (key, owner), pieces in stored.items() if owner is None}
        yield MemorySource(generation, shards, shared)
