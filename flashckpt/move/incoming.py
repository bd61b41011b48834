"""Receives a replica, which becomes a shard only when every byte of it was verified.

    OPEN ──head──▶ HEAD ──complete and right──▶ DATA ──finish──▶ SEALED
      ▲──────wrong──┘         └──────── abandon ────────▶ ABANDONED

The head arrives strictly in order, chunks in any order: several connections bring them at once. Two numbers say where
to continue after a broken connection: the first byte and the first chunk that are missing. A piece that is refused
changes nothing, except that a head that turns out wrong starts again. The preamble is written last, then the file is
renamed: a receiver that dies anywhere before has left no shard.

Failpoints: `mid_put` (a chunk is verified, not yet written) · `before_replica_seal` · `after_replica_seal`.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import threading
from typing import TYPE_CHECKING, NoReturn

from flashckpt.errors import ClosedError, ConfigError
from flashckpt.failpoints import failpoint
from flashckpt.format.caps import DATA_ALIGNMENT_BYTES, PREAMBLE_BYTES
from flashckpt.format.refuse import corrupt
from flashckpt.move.filling import Filling
from flashckpt.move.outgoing import DIGEST_BYTES, PIECE_BYTES
from flashckpt.move.sealing import seal
from flashckpt.move.stage import MAX_HEAD_BYTES, HeadStage
from flashckpt.types import Held

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from flashckpt.store.handles import Slot, SlotFile
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ShardId


class IncomingState(enum.Enum):
    OPEN = "open"  # nothing was received
    HEAD = "head"  # a part of the head was received
    DATA = "data"  # the head is right; chunks may follow
    SEALED = "sealed"
    ABANDONED = "abandoned"


class Incoming:
    """One replica being received. Threads may share it."""

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
        """Take a slot of that size at once: what can't be kept is refused before it is sent (NoSpaceError)."""
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
        self._state = IncomingState.OPEN
        self._next_head_offset = 0
        self._filling: Filling | None = None
        self._preamble = b""
        self._held: Held | None = None
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._slot: Slot | SlotFile = store.claim_to_receive(size_bytes)
        try:
            self._stage = HeadStage(size_bytes)
        except BaseException:
            store.abandon(self._slot)
            raise

    @property
    def state(self) -> IncomingState:
        return self._state

    @property
    def next_head_offset(self) -> int:
        """The offset at which the sender has to continue; `head_bytes` once the head is right."""
        return self._next_head_offset

    @property
    def next_chunk(self) -> int:
        """The index of the first chunk that is missing."""
        return 0 if self._filling is None else self._filling.next_missing

    @property
    def chunks(self) -> int:
        """The number of chunks; 0 until the head is known."""
        return 0 if self._filling is None else self._filling.chunks

    def put_head(self, offset: int, data: Buffer) -> None:
        """Take the next piece of what lies before the data area. With the last one everything in it is checked.

        Raise CorruptShardError or IncompatibleError if the head is not what was announced; it starts again at 0.
        """
        with self._lock, memoryview(data).cast("B") as piece:
            self._check_state("a piece of the head", IncomingState.OPEN, IncomingState.HEAD)
            end = offset + len(piece)
            if offset != self._next_head_offset:
                self._refuse(f"the piece of the head at {self._next_head_offset}", f"one at {offset}")
            if not len(piece) or end > self.head_bytes:
                self._refuse(f"1 to {self.head_bytes - offset} bytes of the head", f"{len(piece)}")
            self._stage.write(offset, piece)
            self._hash.update(piece)
            self._next_head_offset = end
            self._state = IncomingState.HEAD
            if end == self.head_bytes:
                self._take_head()

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Receive complete chunks from a socket, verified and counted. Return False if the caller has to read and put
        them."""
        with self._lock:
            self._check_state(f"chunk {first}", IncomingState.DATA)
            filling = self._filling
        return filling is not None and filling.receive(first, size_bytes, fd, scratch)

    def put_chunks(self, first: int, data: Buffer) -> None:
        """Take complete, consecutive chunks of the data area.

        Raise CorruptShardError if the checksum of one is wrong; they may be sent again. Several threads may call it at
        once.
        """
        with self._lock:
            self._check_state(f"chunk {first}", IncomingState.DATA)
            filling = self._filling
        if filling is not None:
            filling.put(first, data)

    def finish(self) -> Held:
        """Seal the replica. Only after this has returned may it be acknowledged. May be called again after that.

        If the shard arrived here in another way meanwhile, return that one. Raise ConflictError if it has other
        content: another process acts as the same rank of the same launch.
        """
        with self._lock:
            if self._held is not None:
                return self._held
            self._check_state("the end", IncomingState.DATA)
            if self.next_chunk != self.chunks:
                self._refuse(f"chunk {self.next_chunk} of {self.chunks}", "the end")
            failpoint("before_replica_seal")
            self._held = self._seal()
            failpoint("after_replica_seal")
            return self._held

    def abandon(self) -> None:
        """Give the slot back, unless it became a shard. May be called at any time and again."""
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
            # All but the preamble, which is written last.
            for offset in range(PREAMBLE_BYTES, self.head_bytes, PIECE_BYTES):
                self._slot.write_at(offset, self._stage.read(offset, min(PIECE_BYTES, self.head_bytes - offset)))
        except BaseException:
            self._next_head_offset = 0
            self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
            self._state = IncomingState.OPEN
            raise
        self._filling = Filling(self._slot, self.shard, self._where, table, self.size_bytes, "mid_put")
        self._preamble = self._stage.read(0, PREAMBLE_BYTES)
        self._stage.close()
        self._state = IncomingState.DATA

    def _seal(self) -> Held:
        held = Held(self.shard, self.digest, self.size_bytes, self.tag)
        found = seal(self._store, self._job, self._slot, held, self._preamble)
        if found is not held:
            self._abandon()
        self._state = IncomingState.SEALED
        return found

    def _abandon(self) -> None:
        if self._state in (IncomingState.SEALED, IncomingState.ABANDONED):
            return
        self._state = IncomingState.ABANDONED
        self._stage.close()
        if self._filling is not None:
            self._filling.close()  # IMPORTANT: a thread that still wrote would write into the slot's next shard
        # A store that was closed has given the slot back already.
        with contextlib.suppress(ClosedError):
            self._store.abandon(self._slot)

    def _check_state(self, what: str, *allowed: IncomingState) -> None:
        if self._state in allowed:
            return
        if self._state in (IncomingState.SEALED, IncomingState.ABANDONED):
            raise ClosedError(
                f"{self._where}: expected nothing after it was {self._state.value}, found {what}",
                hint="open the push again",
                shard=self.shard,
            )
        expected = "the rest of the head" if self._state is not IncomingState.DATA else "chunks"
        self._refuse(expected, what)

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: expected {expected}, found {found}",
            hint="the sender is of another version or broken: the head comes in order, chunks have to be complete",
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
