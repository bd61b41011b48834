"""The files behind the shards that an agent holds: found, opened, verified, released, set aside.

Failpoints: `mid_adopt` (after each shard that is taken over at a start) · `before_gc` (before a shard is released).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, NotFoundError
from flashckpt.failpoints import failpoint
from flashckpt.move.outgoing import Outgoing, hold
from flashckpt.store.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from flashckpt.store.slots import Sealed, SlotStore
    from flashckpt.store.windows import Window
    from flashckpt.types import Held, ShardId

_log = logging.getLogger(__name__)

_MAX_DAMAGED = 64  # that are remembered


class ServedShard(Outgoing):
    """A shard of this node that is being read. Owns its descriptor."""

    def __init__(self, fd: int, shard: ShardId, job: str, open_window: Callable[[], Window | None]) -> None:
        try:
            super().__init__(fd, shard, job, open_window)
        except BaseException:
            os.close(fd)
            raise
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.forget_window()
            os.close(self._fd)


class ShardFiles:
    """Of one store. Whoever releases, sets aside or asks for `verified` does so one at a time."""

    def __init__(self, store: SlotStore, job: str) -> None:
        self._store = store
        self._job = job
        self._files: dict[ShardId, Sealed] = {}
        self._verified: set[Sealed] = set()  # of _files: every chunk, by this very agent
        self._damaged: dict[ShardId, str] = {}  # set aside by this very agent, with the reason; oldest first
        self.set_aside: set[ShardId] = set()  # found bad by adopt_all()

    # --- coming ---------------------------------------------------------------------------------------------

    def hold(self, shard: ShardId) -> Held | None:
        """Reads what lies sealed under that name; None where there is none, or it is bad."""
        sealed = self._store.find(shard)
        return None if sealed is None else self.adopt(sealed)

    def adopt(self, sealed: Sealed) -> Held | None:
        """Takes it for this agent's; None where it is gone, or bad and thereby set aside."""
        try:
            fd = self._store.open_shard(sealed)
        except NotFoundError:
            return None
        try:
            held = hold(fd, sealed, job=self._job)
        except FlashError as error:
            self._store.quarantine(sealed, error.message)
            self._note_damaged(sealed.shard, error.message)
            return None
        finally:
            os.close(fd)
        self._enter(sealed)
        return held

    def adopt_all(self) -> Iterator[Held]:
        """Whatever lies there."""
        for sealed in self._store.scan():
            held = self.adopt(sealed)
            failpoint("mid_adopt")
            if held is not None:
                yield held
            elif sealed.shard in self._damaged:  # else somebody took it away
                self.set_aside.add(sealed.shard)

    def note_sealed(self, shard: ShardId) -> None:
        """A replica was verified and sealed by this very process."""
        sealed = self._store.find(shard)
        if sealed is not None:
            self._enter(sealed)
            if sealed.writer == Owner.current():  # else a trainer's, which came first
                self._verified.add(sealed)

    def note_verified(self, shard: ShardId) -> None:
        sealed = self._files.get(shard)
        if sealed is not None:
            self._verified.add(sealed)

    # --- staying --------------------------------------------------------------------------------------------

    def open(self, shard: ShardId) -> ServedShard:
        """NotFoundError where it is gone; CorruptShardError where its header is bad."""
        sealed = self._files.get(shard)
        if sealed is None:
            raise NotFoundError(f"{shard}: not held here")
        fd = self._store.open_shard(sealed)
        return ServedShard(fd, shard, self._job, lambda: self._store.window(sealed, fd))

    def verified(self) -> set[ShardId]:
        """Of which every chunk was checked here since it came."""
        files = list(self._files.items())  # at once: others come meanwhile
        return {shard for shard, sealed in files if sealed in self._verified}

    def damaged(self, held: Collection[ShardId]) -> tuple[tuple[ShardId, str], ...]:
        """What was found bad lately, with the reason, and has not come back among those that are `held`."""
        return tuple((shard, reason) for shard, reason in list(self._damaged.items()) if shard not in held)

    # --- going ----------------------------------------------------------------------------------------------

    def release(self, shard: ShardId, reason: str) -> None:
        sealed = self._drop(shard)
        if sealed is None:
            return
        failpoint("before_gc")
        try:
            self._store.release(sealed, of_others=True)
        except (FlashError, OSError) as error:
            _log.warning("%s could not be released: %s", shard, error)
        else:
            _log.debug("%s released: %s", shard, reason)

    def quarantine(self, shard: ShardId, reason: str) -> None:
        sealed = self._drop(shard)
        if sealed is not None:
            self._store.quarantine(sealed, reason)
            self._note_damaged(shard, reason)

    def forget_if_gone(self, shard: ShardId) -> bool:
        """Whether somebody took it away. Looks under the name that it has now: a release may have come in between."""
        if shard not in self._files or self._store.find(shard) is not None:
            return False
        self._drop(shard)
        return True

    def _enter(self, sealed: Sealed) -> None:
        """Keep the file as the shard's, in place of one that was there."""
        if self._files.get(sealed.shard) != sealed:
            self._drop(sealed.shard)
            self._files[sealed.shard] = sealed

    def _drop(self, shard: ShardId) -> Sealed | None:
        sealed = self._files.pop(shard, None)
        if sealed is not None:
            self._verified.discard(sealed)
        return sealed

    def _note_damaged(self, shard: ShardId, reason: str) -> None:
        self._damaged[shard] = reason
        while len(self._damaged) > _MAX_DAMAGED:
            self._damaged.pop(next(iter(self._damaged)))
