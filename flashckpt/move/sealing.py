"""Seals a received shard: writes its preamble and renames it."""

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

# Two receivers of one shard that see each other both withdraw; then one has to try again.
_SEAL_ATTEMPTS = 3


def seal(store: SlotStore, job: str, slot: Slot | SlotFile, held: Held, preamble: bytes) -> Held:
    """Make the slot the shard `held`, and return that.

    If the shard arrived here in another way meanwhile, return that one; the slot stays the caller's. Raise
    ConflictError if it has other content: another process acts as the same rank of the same launch.
    """
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
    """Return the shard if it lies sealed here. Raise CorruptShardError or IncompatibleError if its file is not that
    shard."""
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
        # Ours is good: an unreadable one only takes its name.
        for sealed in store.scan():
            if sealed.shard == shard:
                store.quarantine(sealed, error.message)
        return None
