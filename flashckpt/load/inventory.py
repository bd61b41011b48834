"""Inventory: which shards there are, gathered once a node in a compact typed encoding."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import InternalError
from flashckpt.types import Fence, Generation, ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable

_HEAD = struct.Struct("<IIqQQI")  # version, quarantined, fence (step, epoch, nonce), number of shards
_SHARD = struct.Struct("<QQqQIII")  # epoch, nonce, step, seq, rank, world, tag
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one node holds."""

    tags: dict[ShardId, int]
    fence: Fence | None
    quarantined: int = 0


def encode(inventory: Inventory) -> bytes:
    fence = inventory.fence or Fence(step=0, epoch=0, nonce=0)
    parts = [_HEAD.pack(_VERSION, inventory.quarantined, fence.step, fence.epoch, fence.nonce, len(inventory.tags))]
    for shard, tag in inventory.tags.items():
        g = shard.generation
        parts.append(_SHARD.pack(g.epoch, g.nonce, g.step, g.seq, shard.rank, shard.world, tag))
    return b"".join(parts)


def decode(data: bytes) -> Inventory:
    if len(data) < _HEAD.size:
        raise InternalError(f"inventory of {len(data)} bytes, expected at least {_HEAD.size}")
    version, quarantined, step, epoch, nonce, count = _HEAD.unpack_from(data)
    if version != _VERSION or len(data) != _HEAD.size + count * _SHARD.size:
        raise InternalError(f"inventory version {version} of {len(data)} bytes with {count} shards")
    tags = {}
    for e, n, s, q, rank, world, tag in _SHARD.iter_unpack(data[_HEAD.size :]):
        tags[ShardId(Generation(e, n, s, q), rank, world)] = tag
    # Epoch 0 is never a launch's: it stands for "no fence".
    return Inventory(tags, Fence(step, epoch, nonce) if epoch else None, quarantined)


def merge(inventories: Iterable[Inventory]) -> Inventory:
    """What all nodes hold together; the fence of the highest epoch counts."""
    tags: dict[ShardId, int] = {}
    fence: Fence | None = None
    quarantined = 0
    for one in inventories:
        tags.update(one.tags)
        quarantined += one.quarantined
        if one.fence is not None and (fence is None or fence.order < one.fence.order):
            fence = one.fence
    return Inventory(tags, fence, quarantined)
