"""Reads a sealed shard to send it: piece by piece with verification, or mapped without.

What this process looks at is read through the descriptor. A file that is cut short or recycled meanwhile gives an
error, never a signal, and never a chunk that does not fit the header it was announced with. What is sent without being
read goes through a window, where only the kernel reads it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING

from flashckpt import native
from flashckpt.errors import ConfigError
from flashckpt.format import preamble as preambles
from flashckpt.format.caps import CRC_BYTES, PREAMBLE_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.format.shard import name_of, read_envelope
from flashckpt.types import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.store.handles import Sealed
    from flashckpt.store.windows import Window
    from flashckpt.types import ChunkRange, ShardId

DIGEST_BYTES = 16
PIECE_BYTES = 1 << 20
_CRC = struct.Struct("<I")


class Outgoing:
    """One shard to send. The caller owns the descriptor and has to keep it open."""

    def __init__(
        self, fd: int, shard: ShardId, job: str, open_window: Callable[[], Window | None] = lambda: None
    ) -> None:
        """Raise CorruptShardError or IncompatibleError if the file is not that shard, complete up to its data area.

        `open_window` opens a window of the file when something is to be sent; without one every chunk is read.
        """
        envelope = read_envelope(fd, expect=shard, job=job)
        # The layout is as large as the rest of the header, and only the shard's reader needs it.
        self.shard = shard
        self.head_bytes = envelope.data_offset_bytes
        self.size_bytes = envelope.data_offset_bytes + envelope.data_length_bytes
        self.chunk_bytes = envelope.chunk_bytes
        self.chunks = len(envelope.chunk_crcs) // CRC_BYTES
        self._data_length_bytes = envelope.data_length_bytes
        self._chunk_crcs = envelope.chunk_crcs
        self._fd = fd
        self._open_window = open_window
        self._window: Window | None = None
        del envelope
        self.digest = digest_of(fd)

    def read_head(self, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes of what lies before the data area; b"" at its end."""
        if not 0 <= offset <= self.head_bytes or limit <= 0:
            raise ConfigError(
                f"head of {self.shard}: expected an offset from 0 to {self.head_bytes} and a limit above 0, "
                f"found {offset} and {limit}"
            )
        return _read(self._fd, offset, min(limit, self.head_bytes - offset))

    def read_chunk(self, index: int) -> bytes:
        """Return a complete chunk, after checking its checksum."""
        if not 0 <= index < self.chunks:
            raise ConfigError(f"{self.shard}: expected a chunk from 0 to {self.chunks - 1}, found {index}")
        start = index * self.chunk_bytes
        length = min(self.chunk_bytes, self._data_length_bytes - start)
        data = _read(self._fd, self.head_bytes + start, length)
        (expected,) = _CRC.unpack_from(self._chunk_crcs, index * CRC_BYTES)
        found = native.crc32c(data)
        if found != expected:
            corrupt(f"{name_of(self._fd)}: chunk {index}", f"crc32c {expected:#010x}", f"{found:#010x}")
        return data

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        """Return a mapped view of these chunks, to be sent unread; the caller releases it. None: they have to be
        read."""
        if chunks.first < 0 or chunks.first + chunks.count > self.chunks:
            raise ConfigError(f"{self.shard}: expected chunks from 0 to {self.chunks - 1}, found {chunks}")
        start = chunks.first * self.chunk_bytes
        length = min(chunks.count * self.chunk_bytes, self._data_length_bytes - start)
        if self._window is None:
            self._window = self._open_window()
        return None if self._window is None else self._window.view_of(self.head_bytes + start, length)

    def forget_window(self) -> None:
        """Close the window when nobody sends any more: it would keep the memory of a removed file.

        No window is opened after that: the descriptor may be another file's by then.
        """
        self._open_window = lambda: None
        self._window = None


def digest_of(fd: int) -> bytes:
    """Return the digest that names a shard's content: BLAKE2b of everything before the data area, checksums
    included."""
    first = os.pread(fd, PREAMBLE_BYTES, 0)
    head_bytes = preambles.unpack(first, os.fstat(fd).st_size, name_of(fd)).data_offset_bytes
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for offset in range(0, head_bytes, PIECE_BYTES):
        digest.update(_read(fd, offset, min(PIECE_BYTES, head_bytes - offset)))
    return digest.digest()


def hold(fd: int, sealed: Sealed, *, job: str | None = None) -> Held:
    """Return a sealed shard with its digest. Its header is checked, its data is not.

    Raise CorruptShardError or IncompatibleError if it is not what its name says, or belongs to another job than `job`.
    """
    envelope = read_envelope(fd, expect=sealed.shard, job=job)
    size_bytes = envelope.data_offset_bytes + envelope.data_length_bytes
    del envelope
    return Held(sealed.shard, digest_of(fd), size_bytes, sealed.tag)


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    # Reading a regular file returns fewer bytes than asked for only at its end.
    if len(data) != length:
        corrupt(name_of(fd), f"{length} bytes at {offset}", f"{len(data)}: it was cut short")
    return data
