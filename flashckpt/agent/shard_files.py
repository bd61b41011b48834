"""Finds, opens, verifies, releases and sets aside the files of the shards that an agent holds.

Failpoints: `mid_adopt` (after each shard that is adopted at a start) · `before_gc` (before a shard is released).
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

_MAX_DAMAGED = 64  # number of them that are remembered


class ServedShard(Outgoing):
    """A shard of this node that is being read. It owns its descriptor."""

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
    """The shard files of one store. Only one thread at a time may release, set aside or ask for `verified`."""

    def __init__(self, store: SlotStore, job: str) -> None:
        self._store = store
        self._job = job
        self._files: dict[ShardId, Sealed] = {}
        self._verified: set[Sealed] = set()  # of _files: this agent has checked every chunk
        self._damaged: dict[ShardId, str] = {}  # set aside by this agent, with the reason; oldest first
        self.set_aside: set[ShardId] = set()  # found damaged by adopt_all()

    # --- finding --------------------------------------------------------------------------------------------

    def hold(self, shard: ShardId) -> Held | None:
        """Return the shard that lies sealed under that name; None if there is none, or it is damaged."""
        sealed = self._store.find(shard)
        return None if sealed is None else self.adopt(sealed)

    def adopt(self, sealed: Sealed) -> Held | None:
        """Add a sealed shard; None if it is gone, or was damaged and is now set aside."""
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
        """Add all sealed shards in the directory."""
        for sealed in self._store.scan():
            held = self.adopt(sealed)
            failpoint("mid_adopt")
            if held is not None:
                yield held
            elif sealed.shard in self._damaged:  # otherwise another process took it away
                self.set_aside.add(sealed.shard)

    def note_sealed(self, shard: ShardId) -> None:
        """Note that this process has verified and sealed a replica."""
        sealed = self._store.find(shard)
        if sealed is not None:
            self._enter(sealed)
            if sealed.writer == Owner.current():  # otherwise a trainer sealed it first
                self._verified.add(sealed)

    def note_verified(self, shard: ShardId) -> None:
        sealed = self._files.get(shard)
        if sealed is not None:
            self._verified.add(sealed)

    # --- reading --------------------------------------------------------------------------------------------

    def open(self, shard: ShardId) -> ServedShard:
        """Open a shard. Raise NotFoundError if it is gone; CorruptShardError if its header is bad."""
        sealed = self._files.get(shard)
        if sealed is None:
            raise NotFoundError(f"{shard}: not held here")
        fd = self._store.open_shard(sealed)
        return ServedShard(fd, shard, self._job, lambda: self._store.window(sealed, fd))

    def verified(self) -> set[ShardId]:
        """Return the shards of which every chunk was checked here since they arrived."""
        files = list(self._files.items())  # a copy: other threads add files meanwhile
        return {shard for shard, sealed in files if sealed in self._verified}

    def damaged(self, held: Collection[ShardId]) -> tuple[tuple[ShardId, str], ...]:
        """Return the shards found damaged lately, with the reason, that are not among the `held` again."""
        return tuple((shard, reason) for shard, reason in list(self._damaged.items()) if shard not in held)

    # --- removing -------------------------------------------------------------------------------------------

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
        """Return True if another process took the shard away.

        Looks under the shard's current name: a release may have renamed it meanwhile.
        """
        if shard not in self._files or self._store.find(shard) is not None:
            return False
        self._drop(shard)
        return True

    def _enter(self, sealed: Sealed) -> None:
        """Keep the file as the shard's, in place of an earlier one."""
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
