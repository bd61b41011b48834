"""The last step of receiving a whole shard: its preamble, and the rename that makes it one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashckpt.errors import ConflictError, CorruptShardError, IncompatibleError, NotFoundError
from flashckpt.format.caps import PREAMBLE_BYTES
from flashckpt.move.outgoing import hold

if TYPE_CHECKING:
    from flashckpt.store.handles import Slot, SlotFile
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Held, ShardId

# Two receivers of one shard that see each other withdraw both; then one has to try again.
_SEAL_ATTEMPTS = 3


def seal(store: SlotStore, job: str, slot: Slot | SlotFile, held: Held, preamble: bytes) -> Held:
    """`held` itself where the slot became that shard. Else the slot stays the caller's: another one where the shard
    came here in another way meanwhile; ConflictError where that has other content: somebody acts as the same rank of
    the same launch."""
    slot.write_at(0, preamble)
    for attempt in range(1, _SEAL_ATTEMPTS + 1):
        try:
            store.seal(slot, held.shard, held.tag)
        except ConflictError:
            other = _find_other(store, job, held.shard)
            if other is None and attempt < _SEAL_ATTEMPTS:
                continue
            slot.write_at(0, bytes(PREAMBLE_BYTES))
            if other is None or other.digest != held.digest:
                raise
            return other
        else:
            break
    return held


def find_held(store: SlotStore, job: str, shard: ShardId) -> Held | None:
    """The shard if it lies sealed here. CorruptShardError, IncompatibleError: it does, but is not what it should be."""
    sealed = store.find(shard)
    if sealed is None:
        return None
    try:
        fd = store.open_shard(sealed)
    except NotFoundError:
        return None
    try:
        return hold(fd, sealed, job=job)
    finally:
        os.close(fd)


def _find_other(store: SlotStore, job: str, shard: ShardId) -> Held | None:
    try:
        return find_held(store, job, shard)
    except (CorruptShardError, IncompatibleError) as error:
        # Ours is good: the other one only keeps it out.
        for sealed in store.scan():
            if sealed.shard == shard:
                store.quarantine(sealed, error.message)
        return None
