"""Proves that every byte of a shard that was just sealed can be read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashckpt import native
from flashckpt.errors import CorruptShardError, NotFoundError
from flashckpt.format.shard import read_header

if TYPE_CHECKING:
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ShardId


def read_back(store: SlotStore, shard: ShardId, job: str, threads: int) -> int:
    """Checks the header and every chunk of `shard`; returns its size in bytes. Raises if it is damaged or gone."""
    found = next((one for one in store.scan() if one.shard == shard), None)
    if found is None:
        raise NotFoundError(
            f"{shard}: expected it in this node's memory, found no such shard", step=shard.generation.step
        )
    fd = store.open_shard(found)
    try:
        header = read_header(fd, expect=shard, job=job)
        bad = native.verify_file(
            fd, header.data_offset_bytes, header.data_length_bytes, header.chunk_bytes, header.chunk_crcs, threads
        )
    finally:
        os.close(fd)
    if bad:
        raise CorruptShardError(f"{shard}: {len(bad)} chunks fail their crc32c right after the save", shard=shard)
    return header.data_length_bytes
