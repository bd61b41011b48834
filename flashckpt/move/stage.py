"""Keeps the head of a shard that is being received until it is known to be right."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, IncompatibleError
from flashckpt.format.caps import DATA_ALIGNMENT_BYTES, MAX_HEADER_BYTES, PREAMBLE_BYTES
from flashckpt.format.shard import name_of, read_envelope

if TYPE_CHECKING:
    from flashckpt.types import ShardId

MAX_HEAD_BYTES = -(-(PREAMBLE_BYTES + MAX_HEADER_BYTES) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Table:
    """What the receiver needs of a header. Its layout, which is most of it, is not kept."""

    data_offset_bytes: int
    chunk_bytes: int
    chunk_crcs: bytes


class HeadStage:
    """Memory for a head that is not verified yet: outside this process's heap, freed with the object.

    Not in the slot: with its preamble in place the slot would look like a shard, without it it can't be parsed.
    """

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("flashckpt-head", os.MFD_CLOEXEC)
        # As long as the shard, because its length is checked; only what is written takes memory.
        os.ftruncate(self._fd, size_bytes)

    def write(self, offset: int, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            done += os.pwrite(self._fd, piece[done:], offset + done)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def parse(self, where: str, shard: ShardId, job: str) -> Table:
        name = name_of(self._fd)
        try:
            envelope = read_envelope(self._fd, expect=shard, job=job)
        except (CorruptShardError, IncompatibleError) as error:
            message = f"{where}: {error.message.removeprefix(name + ': ')}"
            raise type(error)(message, hint=error.hint, **{**error.fields, "where": where}) from error
        return Table(envelope.data_offset_bytes, envelope.chunk_bytes, envelope.chunk_crcs)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
