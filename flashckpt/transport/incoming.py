"""The receiver's half of a push: a replica that becomes a shard only when every byte of it was verified.

    OPEN ──head──▶ HEAD ──complete and right──▶ DATA ──finish──▶ SEALED
      ▲──────wrong──┘         └──────── abandon ────────▶ ABANDONED

Head and chunks come strictly in order, so that where to go on after a broken connection is one number each. A
piece that is refused changes nothing, except that a head that turns out wrong starts again. The preamble is
written last, then the file is renamed: a receiver that dies anywhere before has left no shard.

Failpoints: `mid_put` (a chunk is verified, not yet written) · `before_replica_seal` · `after_replica_seal`.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import struct
import threading
from typing import TYPE_CHECKING, NoReturn

from flashckpt import native
from flashckpt.errors import (
    ClosedError,
    ConfigError,
)
from flashckpt.failpoints import failpoint
from flashckpt.format.caps import CRC_BYTES, DATA_ALIGNMENT_BYTES, PREAMBLE_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.transport.outgoing import DIGEST_BYTES, PIECE_BYTES
from flashckpt.transport.sealing import seal
from flashckpt.transport.stage import MAX_HEAD_BYTES, Stage
from flashckpt.types import Held

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from flashckpt.store.handles import SlotFile
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ShardId

_CRC = struct.Struct("<I")


class State(enum.Enum):
    OPEN = "open"  # nothing was received
    HEAD = "head"  # some of the head was
    DATA = "data"  # the head is right; chunks may follow
    SEALED = "sealed"
    ABANDONED = "abandoned"


class Incoming:
    """One replica being received. Threads may share it: a call waits for the one before."""

    def __init__(
        self,
        store: SlotStore,
        job: str,
        shard: ShardId,
        tag: int,
        size_bytes: int,
        head_bytes: int,
        digest: bytes,
        *,
        max_shard_bytes: int | None = None,
    ) -> None:
        """Takes a slot of that size at once: what can't be kept is refused before it is sent (NoSpaceError)."""
        self.shard = shard
        self.tag = tag
        self.size_bytes = size_bytes
        self.head_bytes = head_bytes
        self.digest = digest
        self._where = f"replica of {shard}"
        self._store = store
        self._job = job
        self._check_announcement(max_shard_bytes)
        self._lock = threading.Lock()
        self._state = State.OPEN
        self._next_head_offset = 0
        self._next_chunk = 0
        self._chunk_bytes = 0
        self._chunk_crcs = b""
        self._preamble = b""
        self._held: Held | None = None
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._slot: SlotFile = store.claim_file(size_bytes)
        try:
            self._stage = Stage(size_bytes)
        except BaseException:
            store.abandon(self._slot)
            raise

    @property
    def state(self) -> State:
        return self._state

    @property
    def next_head_offset(self) -> int:
        """Where the sender has to go on; `head_bytes` once the head is right."""
        return self._next_head_offset

    @property
    def next_chunk(self) -> int:
        return self._next_chunk

    @property
    def chunks(self) -> int:
        """How many there are; 0 until the head is known."""
        return len(self._chunk_crcs) // CRC_BYTES

    def put_head(self, offset: int, data: Buffer) -> None:
        """The next piece of what lies before the data area. With the last one everything in it is checked.

        CorruptShardError, IncompatibleError: the head is not what was announced, and starts again at 0.
        """
        with self._lock, memoryview(data).cast("B") as piece:
            self._check_state("a piece of the head", State.OPEN, State.HEAD)
            end = offset + len(piece)
            if offset != self._next_head_offset:
                self._refuse(f"the piece of the head at {self._next_head_offset}", f"one at {offset}")
            if not len(piece) or end > self.head_bytes:
                self._refuse(f"1 to {self.head_bytes - offset} bytes of the head", f"{len(piece)}")
            self._stage.write(offset, piece)
            self._hash.update(piece)
            self._next_head_offset = end
            self._state = State.HEAD
            if end == self.head_bytes:
                self._take_head()

    def put_chunk(self, index: int, data: Buffer) -> None:
        """The next chunk of the data area, whole. CorruptShardError: its checksum is wrong; it may be sent again."""
        with self._lock, memoryview(data).cast("B") as chunk:
            self._check_state(f"chunk {index}", State.DATA)
            if index != self._next_chunk or index >= self.chunks:
                expected = f"chunk {self._next_chunk}" if self._next_chunk < self.chunks else "no chunk any more"
                self._refuse(expected, f"chunk {index} of {self.chunks}")
            start = self.head_bytes + index * self._chunk_bytes
            length = min(self._chunk_bytes, self.size_bytes - start)
            if len(chunk) != length:
                self._refuse(f"{length} bytes of chunk {index}", f"{len(chunk)}")
            (expected_crc,) = _CRC.unpack_from(self._chunk_crcs, index * CRC_BYTES)
            found_crc = native.crc32c(chunk)
            if found_crc != expected_crc:
                corrupt(f"{self._where}: chunk {index}", f"crc32c {expected_crc:#010x}", f"{found_crc:#010x}")
            failpoint("mid_put")
            self._slot.write_at(start, chunk)
            self._next_chunk = index + 1

    def finish(self) -> Held:
        """Makes it a shard. Only after this returned may it be acknowledged. May be called again after that.

        Where the shard came here in another way meanwhile, that one is returned. ConflictError where it has
        other content: somebody acts as the same rank of the same launch.
        """
        with self._lock:
            if self._held is not None:
                return self._held
            self._check_state("the end", State.DATA)
            if self._next_chunk != self.chunks:
                self._refuse(f"chunk {self._next_chunk} of {self.chunks}", "the end")
            failpoint("before_replica_seal")
            self._held = self._seal()
            failpoint("after_replica_seal")
            return self._held

    def abandon(self) -> None:
        """Gives the slot back, unless it became a shard. May be called at any time and again."""
        with self._lock:
            self._abandon()

    # -- inside; under the lock ---------------------------------------------------------------------------

    def _take_head(self) -> None:
        try:
            found = self._hash.digest()
            if found != self.digest:
                corrupt(f"{self._where}: head", f"digest {self.digest.hex()}", found.hex())
            table = self._stage.parse(self._where, self.shard, self._job)
            if table.data_offset_bytes != self.head_bytes:
                corrupt(self._where, f"data at {self.head_bytes}", f"at {table.data_offset_bytes}")
            # All but the preamble: it comes last.
            for offset in range(PREAMBLE_BYTES, self.head_bytes, PIECE_BYTES):
                self._slot.write_at(offset, self._stage.read(offset, min(PIECE_BYTES, self.head_bytes - offset)))
        except BaseException:
            self._next_head_offset = 0
            self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
            self._state = State.OPEN
            raise
        self._chunk_bytes, self._chunk_crcs = table.chunk_bytes, table.chunk_crcs
        self._preamble = self._stage.read(0, PREAMBLE_BYTES)
        self._stage.close()
        self._state = State.DATA

    def _seal(self) -> Held:
        held = Held(self.shard, self.digest, self.size_bytes, self.tag)
        found = seal(self._store, self._job, self._slot, held, self._preamble)
        if found is not held:
            self._abandon()
        self._state = State.SEALED
        return found

    def _abandon(self) -> None:
        if self._state in (State.SEALED, State.ABANDONED):
            return
        self._state = State.ABANDONED
        self._stage.close()
        # A store that was closed has given it back already.
        with contextlib.suppress(ClosedError):
            self._store.abandon(self._slot)

    def _check_state(self, what: str, *allowed: State) -> None:
        if self._state in allowed:
            return
        if self._state in (State.SEALED, State.ABANDONED):
            raise ClosedError(
                f"{self._where}: expected nothing after it was {self._state.value}, found {what}",
                hint="open the push again",
                shard=self.shard,
            )
        expected = "the rest of the head" if self._state is not State.DATA else "chunks"
        self._refuse(expected, what)

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: expected {expected}, found {found}",
            hint="the sender is of another version or broken: head and chunks come once, whole and in order",
            shard=self.shard,
            where=self._where,
            expected=expected,
            found=found,
        )

    def _check_announcement(self, max_shard_bytes: int | None) -> None:
        if len(self.digest) != DIGEST_BYTES:
            self._refuse(f"a digest of {DIGEST_BYTES} bytes", f"{len(self.digest)}")
        if self.head_bytes % DATA_ALIGNMENT_BYTES or not 0 < self.head_bytes <= MAX_HEAD_BYTES:
            self._refuse(
                f"a head of {DATA_ALIGNMENT_BYTES} to {MAX_HEAD_BYTES} bytes, in whole pages", f"{self.head_bytes}"
            )
        if self.size_bytes < self.head_bytes:
            self._refuse(f"a shard of at least its head's {self.head_bytes} bytes", f"{self.size_bytes}")
        if max_shard_bytes is not None and self.size_bytes > max_shard_bytes:
            self._refuse(f"a shard of at most {max_shard_bytes} bytes", f"{self.size_bytes}")
