"""Hands slots of an agent that owns them all to trainers.

The agent allocates and touches first, so that the memory is charged to it, and never maps a granted slot to write. A
slot in `writing/` under a trainer's name belongs to that trainer alone, as if it had claimed it itself.

Failpoints: `before_grant` · `after_grant` (the trainer does not know of it yet) · `after_attach` (it has mapped it).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashckpt.failpoints import failpoint
from flashckpt.store.directory import Directory, SlotState
from flashckpt.store.names import slot_name

if TYPE_CHECKING:
    from flashckpt.store.owner import Owner
    from flashckpt.store.supply import Supply


class Grants:
    """The slots that one agent grants."""

    def __init__(self, directory: Directory, owner: Owner, supply: Supply) -> None:
        self._directory = directory
        self._owner = owner
        self._supply = supply

    def grant(self, size_bytes: int, to: Owner) -> int:
        """Return the id of a slot of exactly that size in writing/ under `to`'s name."""
        failpoint("before_grant")
        slot_id = self._one_it_has_mapped(size_bytes, to)
        if slot_id is None:
            slot_id = self._another(size_bytes, to)
        try:
            failpoint("after_grant")
        except BaseException:
            self.withdraw(slot_id, to)
            raise
        return slot_id

    def withdraw(self, slot_id: int, to: Owner) -> bool:
        """Move a granted slot into the pool, still under `to`'s name: nobody else can claim it while `to` lives."""
        name = slot_name(slot_id, to)
        return self._directory.move(SlotState.WRITING, name, SlotState.POOL, name)

    def _one_it_has_mapped(self, size_bytes: int, to: Owner) -> int | None:
        raced = True
        while raced:
            free, raced = self._supply.free_slots(to.__eq__)
            for one in free:
                if one.size_bytes != size_bytes or one.has_holes:
                    continue
                if self._directory.move(SlotState.POOL, one.name, SlotState.WRITING, one.name):
                    return one.slot_id
                raced = True
        return None

    def _another(self, size_bytes: int, to: Owner) -> int:
        # IMPORTANT: a slot of `to` that has another size is not resized: shortened under its mapping, it would cause a
        # SIGBUS. One is removed for the new one, so that changing sizes do not pile slots up.
        if to != self._owner:
            self._supply.unlink_one(to)
        taken = self._supply.take(size_bytes, unmapped=True)
        try:
            os.close(self._supply.fit_file(taken.slot_id, size_bytes, spare=to))
            ours = slot_name(taken.slot_id, self._owner)
            theirs = slot_name(taken.slot_id, to)
            if ours != theirs and not self._directory.move(SlotState.WRITING, ours, SlotState.WRITING, theirs):
                raise self._supply.vanished(taken.slot_id)
            self._supply.taken.discard(taken.slot_id)
        except BaseException as error:
            self._supply.put_back(taken)
            if isinstance(error, OSError):
                self._supply.raise_if_full(error, size_bytes)
            raise
        return taken.slot_id
