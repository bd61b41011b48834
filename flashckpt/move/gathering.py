"""Keeps what a retrieval fetches: a shard, or parts of it, from several holders at once, verified chunk by chunk.

    HEAD ──head is right──▶ DATA ──want, chunks in any order──▶ finish ──▶ DONE
      └───────────────────────┴──────────── abandon ────────────▶ ABANDONED

A complete shard is received into a slot and sealed, as a replica is. A part goes into a sparse file beside the shards,
with memory only behind the head and the chunks that are wanted. The preamble is written last in both.

Failpoints: `mid_retrieve` (a chunk is verified, not yet written) · `before_fetched_seal`.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import threading
from typing import TYPE_CHECKING, NoReturn, Protocol

from flashckpt.errors import ClosedError, ConfigError
from flashckpt.failpoints import failpoint
from flashckpt.format.caps import DATA_ALIGNMENT_BYTES, PREAMBLE_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.move.filling import Filling, runs
from flashckpt.move.outgoing import DIGEST_BYTES, PIECE_BYTES
from flashckpt.move.sealing import seal
from flashckpt.move.stage import MAX_HEAD_BYTES, HeadStage
from flashckpt.store.fetched import FetchedFile
from flashckpt.types import ChunkRange, Held

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from flashckpt.move.stage import Table
    from flashckpt.store.handles import Slot, SlotFile
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Retrieval, ShardId


class GatheringState(enum.Enum):
    HEAD = "head"  # the head is not known yet
    DATA = "data"  # the head is right; chunks may follow
    DONE = "done"
    ABANDONED = "abandoned"


class Gathering:
    """One shard that is being retrieved. Threads may share it."""

    def __init__(self, store: SlotStore, job: str, retrieval: Retrieval, *, max_shard_bytes: int | None = None) -> None:
        """For a complete shard, take its slot at once: what can't be kept is not fetched (NoSpaceError)."""
        self.shard = retrieval.shard
        self.whole = retrieval.whole
        self.head_bytes = 0
        self.chunk_bytes = 0
        self._held = Held(retrieval.shard, retrieval.digest, retrieval.size_bytes, retrieval.tag)
        self._where = f"fetched copy of {retrieval.shard}"
        self._store = store
        self._job = job
        if max_shard_bytes is not None and self.size_bytes > max_shard_bytes:
            self._refuse(f"a shard of at most {max_shard_bytes} bytes", f"{self.size_bytes}")
        self._lock = threading.Lock()  # protects what follows
        self._state = GatheringState.HEAD
        self._filling: Filling | None = None
        self._preamble = b""
        self._wanted = bytearray()
        self._file: Slot | SlotFile | None = store.claim_to_receive(self.size_bytes) if self.whole else None

    @property
    def size_bytes(self) -> int:
        return self._held.size_bytes

    @property
    def digest(self) -> bytes:
        return self._held.digest

    @property
    def tag(self) -> int:
        return self._held.tag

    @property
    def state(self) -> GatheringState:
        return self._state

    @property
    def chunks(self) -> int:
        """The number of chunks; 0 until the head is known."""
        return 0 if self._filling is None else self._filling.chunks

    def missing(self, ranges: Iterable[ChunkRange]) -> tuple[ChunkRange, ...]:
        """Return which of these chunks have not arrived yet: the next holder is asked for them."""
        return tuple(ranges) if self._filling is None else self._filling.missing(ranges)

    def read_head(self) -> HeadReader:
        """Return a reader for one attempt to fetch the head from one holder."""
        return HeadReader(self, self._job)

    def take_head(self, table: Table, stage: HeadStage) -> None:
        """Take a head whose digest is right. A second one changes nothing."""
        with self._lock:
            self._check_state("a head", GatheringState.HEAD, GatheringState.DATA)
            if self._state is GatheringState.DATA:
                return
            if self._file is None:
                file = self._store.create_fetched(self.size_bytes)
                try:
                    file.give_memory([(0, table.data_offset_bytes)])
                except BaseException:
                    file.remove()
                    raise
                self._file = file
            for offset in range(PREAMBLE_BYTES, table.data_offset_bytes, PIECE_BYTES):
                piece = stage.read(offset, min(PIECE_BYTES, table.data_offset_bytes - offset))
                self._file.write_at(offset, piece)
            self._preamble = stage.read(0, PREAMBLE_BYTES)
            self.head_bytes, self.chunk_bytes = table.data_offset_bytes, table.chunk_bytes
            self._filling = Filling(self._file, self.shard, self._where, table, self.size_bytes, "mid_retrieve")
            self._wanted = bytearray(self.chunks)
            self._state = GatheringState.DATA

    def want(self, ranges: Iterable[ChunkRange]) -> int:
        """Make room for these chunks (NoSpaceError), and return how many bytes they have. Call it once, after the
        head."""
        ranges = tuple(ranges)
        with self._lock:
            self._check_state("what is wanted", GatheringState.DATA)
            filling = self._filling
            if filling is None:
                return 0
            for one in ranges:
                if one.first < 0 or one.count <= 0 or one.first + one.count > self.chunks:
                    self._refuse(f"chunks from 0 to {self.chunks - 1}", f"{one.first} to {one.first + one.count - 1}")
                if any(self._wanted[one.first : one.first + one.count]):
                    self._refuse(
                        "each chunk in one portion", f"one of {one.first} to {one.first + one.count - 1} in two"
                    )
                self._wanted[one.first : one.first + one.count] = b"\1" * one.count
            if isinstance(self._file, FetchedFile):
                self._file.give_memory([filling.bytes_of(one) for one in ranges])
        return sum(length for _, length in map(filling.bytes_of, ranges))

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Receive complete chunks from a socket, verified and counted. Return False if the caller has to read and put
        them."""
        return self._checked(first, size_bytes).receive(first, size_bytes, fd, scratch)

    def put_chunks(self, first: int, data: Buffer) -> None:
        """Take complete, consecutive chunks. Raise CorruptShardError if the checksum of one is wrong.

        A chunk that is here already changes nothing. Several threads may call it at once.
        """
        with memoryview(data).cast("B") as view:
            self._checked(first, len(view)).put(first, view)

    def _checked(self, first: int, size_bytes: int) -> Filling:
        """Return the data area that these chunks, which are wanted, belong to."""
        with self._lock:
            self._check_state(f"chunk {first}", GatheringState.DATA)
            filling = self._filling
        if filling is None:
            self._refuse("the head first", f"chunk {first}")
        count = max(1, -(-size_bytes // filling.chunk_bytes))
        if first < 0 or not all(self._wanted[first : first + count]) or first + count > filling.chunks:
            self._refuse("a chunk that is wanted", f"{count} from {first} on, of {filling.chunks}")
        return filling

    def finish(self) -> str:
        """Complete the file. Return "" if it is a sealed shard now, else the name of the file.

        Raise ConflictError if a shard of that name with other content lies here.
        """
        with self._lock:
            self._check_state("the end", GatheringState.DATA)
            lacking = sum(one.count for one in self.missing(self._wanted_ranges()))
            if lacking:
                self._refuse("all chunks that are wanted", f"the end with {lacking} missing")
            failpoint("before_fetched_seal")
            if isinstance(self._file, FetchedFile):
                self._file.write_at(0, self._preamble)
                self._file.close()
                self._state = GatheringState.DONE
                return self._file.name
            if self._file is not None:
                found = seal(self._store, self._job, self._file, self._held, self._preamble)
                if found is not self._held:
                    self._store.abandon(self._file)
            self._file = None
            self._state = GatheringState.DONE
            return ""

    def abandon(self) -> None:
        """Give back what did not become a shard, also after finish(). May be called at any time and again."""
        with self._lock:
            file, self._file = self._file, None
            self._state = GatheringState.ABANDONED
            filling = self._filling
        if filling is not None:
            filling.close()  # IMPORTANT: a thread that still wrote would write into the slot's next shard
        # A store that was closed has given the slot back already.
        with contextlib.suppress(ClosedError):
            if isinstance(file, FetchedFile):
                file.remove()
            elif file is not None:
                self._store.abandon(file)

    def _wanted_ranges(self) -> Iterable[ChunkRange]:
        if self.whole:
            return (ChunkRange(0, self.chunks),) if self.chunks else ()
        return runs(self._wanted, 1, 0, self.chunks)

    def _check_state(self, what: str, *allowed: GatheringState) -> None:
        if self._state in (GatheringState.DONE, GatheringState.ABANDONED):
            raise ClosedError(
                f"{self._where}: expected nothing after it was {self._state.value}, found {what}", shard=self.shard
            )
        if self._state not in allowed:
            self._refuse("the head first", what)

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ConfigError(f"{self._where}: expected {expected}, found {found}", shard=self.shard)


class TakesHead(Protocol):
    """What HeadReader needs: the shard's name and sizes, and a place for its head."""

    @property
    def shard(self) -> ShardId: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def tag(self) -> int: ...

    def take_head(self, table: Table, stage: HeadStage) -> None:
        """Take a head whose digest is right. A second one changes nothing."""


class HeadReader:
    """One attempt to fetch the head. Nothing of it counts before all of it is known to be right."""

    def __init__(self, gathering: TakesHead, job: str) -> None:
        self._gathering = gathering
        self._job = job
        self._where = f"fetched copy of {gathering.shard}"
        self._stage = HeadStage(gathering.size_bytes)
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._head_bytes = 0

    def expect(self, size_bytes: int, head_bytes: int, tag: int) -> None:
        """Check what the holder says of its copy."""
        wanted = (self._gathering.size_bytes, self._gathering.tag)
        if (size_bytes, tag) != wanted:
            corrupt(self._where, f"size {wanted[0]} and tag {wanted[1]}", f"{size_bytes} and {tag}")
        if head_bytes % DATA_ALIGNMENT_BYTES or not 0 < head_bytes <= min(MAX_HEAD_BYTES, size_bytes):
            corrupt(self._where, f"a head of 1 to {min(MAX_HEAD_BYTES, size_bytes)} bytes", f"{head_bytes}")
        self._head_bytes = head_bytes

    def put(self, offset: int, data: Buffer) -> None:
        """Take the next piece. With the last one, raise CorruptShardError or IncompatibleError if it is not that
        shard's head."""
        with memoryview(data).cast("B") as piece:
            if offset + len(piece) > self._head_bytes:
                corrupt(self._where, f"a head of {self._head_bytes} bytes", f"a piece up to {offset + len(piece)}")
            self._stage.write(offset, piece)
            self._hash.update(piece)
            if offset + len(piece) == self._head_bytes:
                self._check()

    def _check(self) -> None:
        found = self._hash.digest()
        if found != self._gathering.digest:
            corrupt(f"{self._where}: head", f"digest {self._gathering.digest.hex()}", found.hex())
        table = self._stage.parse(self._where, self._gathering.shard, self._job)
        if table.data_offset_bytes != self._head_bytes:
            corrupt(self._where, f"data at {self._head_bytes}", f"at {table.data_offset_bytes}")
        self._gathering.take_head(table, self._stage)

    def close(self) -> None:
        self._stage.close()
