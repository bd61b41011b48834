"""Receives the data area of a shard: chunks in any order, from any thread, verified before they count.

Verifying and writing happen outside the lock, so that connections do not wait for each other. A chunk that one thread
has claimed is not written by another one, and a chunk that is here is never written again. After `close` no thread
writes.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from array import array
from typing import TYPE_CHECKING, NoReturn

from flashckpt import native
from flashckpt.errors import ClosedError, ConfigError
from flashckpt.failpoints import failpoint
from flashckpt.format.caps import CRC_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.types import ChunkRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Buffer

    from flashckpt.move.stage import Table
    from flashckpt.store.handles import Slot, SlotFile
    from flashckpt.types import ShardId

_CRC = struct.Struct("<I")


class Filling:
    """The data area of one shard, from the moment its head is known."""

    def __init__(
        self, file: Slot | SlotFile, shard: ShardId, where: str, table: Table, size_bytes: int, before_write: str
    ) -> None:
        """`before_write`: the failpoint between verifying and writing."""
        self.head_bytes = table.data_offset_bytes
        self.chunk_bytes = table.chunk_bytes
        self.chunks = len(table.chunk_crcs) // CRC_BYTES
        self._file = file
        self._shard = shard
        self._where = where
        self._crcs = table.chunk_crcs
        self._size_bytes = size_bytes
        self._before_write = before_write
        self._state = threading.Condition()  # protects what follows
        self._here = bytearray(self.chunks)
        self._claimed = bytearray(self.chunks)
        self._writers = 0
        self._closed = False

    def length_of(self, index: int) -> int:
        return min(self.chunk_bytes, self._size_bytes - self.head_bytes - index * self.chunk_bytes)

    def bytes_of(self, one: ChunkRange) -> tuple[int, int]:
        """Return the offset in the file, and the number of bytes."""
        start = self.head_bytes + one.first * self.chunk_bytes
        return start, min(one.count * self.chunk_bytes, self._size_bytes - start)

    @property
    def next_missing(self) -> int:
        """The index of the first chunk that is missing; `chunks` if none is."""
        with self._state:
            found = self._here.find(0)
            return self.chunks if found < 0 else found

    def missing(self, ranges: Iterable[ChunkRange]) -> tuple[ChunkRange, ...]:
        with self._state:
            return tuple(run for one in ranges for run in runs(self._here, 0, one.first, one.first + one.count))

    def put(self, first: int, data: Buffer) -> None:
        """Take complete, consecutive chunks. Raise CorruptShardError, and take none, if the checksum of one is wrong.

        A chunk that is here already changes nothing.
        """
        with memoryview(data).cast("B") as view:
            count = self._verify(first, view)
            failpoint(self._before_write)
            claimed, done = self._claim(first, count), 0
            try:
                for run in claimed:
                    start, length = self.bytes_of(run)
                    at = (run.first - first) * self.chunk_bytes
                    self._file.write_at(start, view[at : at + length])
                    done += 1
            finally:
                self._settle(claimed, done)

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Receive these chunks from a socket: verify them in `scratch`, which has room for two, then copy them to their
        place.

        Return False, with nothing read, if the caller has to read and put them. If it raises, the chunks are still
        missing; OSError is the socket's.
        """
        view = self._file.view
        if view is None or len(scratch) < 2 * self.chunk_bytes:
            return False
        wanted = ChunkRange(first, self._count(first, size_bytes))
        claimed, done = self._claim(wanted.first, wanted.count), 0
        try:
            if claimed != [wanted]:
                return False
            start, length = self.bytes_of(wanted)
            with view[start : start + length] as room:
                place = array("q", (0, _address_of(room), length))
                bad = native.receive_chunks(fd, 0, length, self.chunk_bytes, self._crcs_of(wanted), place, scratch)
            if bad:
                (expected,) = _CRC.unpack_from(self._crcs, (first + bad[0]) * CRC_BYTES)
                corrupt(f"{self._where}: chunk {first + bad[0]}", f"crc32c {expected:#010x}", "another one")
            failpoint(self._before_write)
            done = 1
        finally:
            self._settle(claimed, done)
        return True

    def _verify(self, first: int, view: memoryview) -> int:
        """Return the number of chunks in the view."""
        count = self._count(first, len(view))
        if bad := native.verify_chunks(view, self.chunk_bytes, self._crcs_of(ChunkRange(first, count)), 1):
            self._refuse_chunk(first, bad[0], view)
        return count

    def _crcs_of(self, chunks: ChunkRange) -> bytes:
        return self._crcs[chunks.first * CRC_BYTES : (chunks.first + chunks.count) * CRC_BYTES]

    def close(self) -> None:
        """Wait for the threads that write. May be called again."""
        with self._state:
            self._closed = True
            self._state.wait_for(lambda: not self._writers)

    def _claim(self, first: int, count: int) -> list[ChunkRange]:
        with self._state:
            if self._closed:
                raise ClosedError(
                    f"{self._where}: expected nothing after its end, found chunk {first}",
                    hint="open the push again",
                    shard=self._shard,
                )
            # A chunk is not written if it is here, or if another thread has claimed it.
            taken = bytes(map(int.__or__, self._here[first : first + count], self._claimed[first : first + count]))
            found = [ChunkRange(first + one.first, one.count) for one in runs(taken, 0, 0, count)]
            for one in found:
                self._claimed[one.first : one.first + one.count] = b"\1" * one.count
            self._writers += 1
            return found

    def _settle(self, claimed: list[ChunkRange], done: int) -> None:
        """Mark the first `done` chunks as written and release the claims on the others."""
        with self._state:
            for number, run in enumerate(claimed):
                span = slice(run.first, run.first + run.count)
                self._claimed[span] = bytes(run.count)
                if number < done:
                    self._here[span] = b"\1" * run.count
            self._writers -= 1
            self._state.notify_all()

    def _count(self, first: int, size_bytes: int) -> int:
        if not 0 <= first < self.chunks:
            self._refuse(f"a chunk from 0 to {self.chunks - 1}", f"chunk {first}")
        count = max(1, -(-size_bytes // self.chunk_bytes))
        expected = self.bytes_of(ChunkRange(first, min(count, self.chunks - first)))[1]
        if size_bytes != expected:
            self._refuse(f"{expected} bytes of {'chunk' if count == 1 else 'chunks from'} {first}", f"{size_bytes}")
        return count

    def _refuse_chunk(self, first: int, bad: int, view: memoryview) -> NoReturn:
        (expected,) = _CRC.unpack_from(self._crcs, (first + bad) * CRC_BYTES)
        start = bad * self.chunk_bytes
        found = native.crc32c(view[start : start + self.length_of(first + bad)])
        corrupt(f"{self._where}: chunk {first + bad}", f"crc32c {expected:#010x}", f"{found:#010x}")

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: expected {expected}, found {found}",
            hint="the sender is of another version or broken: chunks have to be complete",
            shard=self._shard,
            where=self._where,
            expected=expected,
            found=found,
        )


def runs(flags: bytes | bytearray, value: int, first: int, end: int) -> Iterator[ChunkRange]:
    """Yield the stretches of chunks whose flag is `value`."""
    at = first
    while (start := flags.find(value, at, end)) >= 0:
        stop = flags.find(1 - value, start, end)
        at = end if stop < 0 else stop
        yield ChunkRange(start, at - start)


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
