"""JobClaim: claims the job for this launch. Checks that no other launch is alive, begins a launch, and puts it on a
line."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flashckpt.load.disk.restore import remember_line, take_disk_inventory
from flashckpt.protocol.line import begun
from flashckpt.start.claim import refuse_beside_live, refuse_beside_live_here
from flashckpt.start.take_over import highest_epoch, put_line, take_over

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.config import Settings
    from flashckpt.load.context import LoadContext
    from flashckpt.load.disk.restore import DiskInventory
    from flashckpt.load.histories import Pick
    from flashckpt.load.recover import Recovery
    from flashckpt.protocol.line import Line
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.own_slots import Slots
    from flashckpt.save.saver import Saver
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Launch


class JobClaim:
    """Claims the job for this launch before its first save, and again in every load. Methods are collective unless they
    say local."""

    def __init__(
        self,
        settings: Settings,
        group: PrivateGroup,
        topology: Topology,
        slots: Slots,
        store: SlotStore,
        saver: Saver,
    ) -> None:
        self._settings = settings
        self._group = group
        self._topology = topology
        self._slots = slots
        self._store = store
        self._saver = saver
        self._disk_epoch = 0  # the highest epoch that a load saw in persist_dir
        # True: this launch may take the agents over, because no other one is alive or `take_over` was given.
        self.is_held = False
        self._remember_line = functools.partial(_remember_line, settings, topology)
        saver.writer.on_claimed = self._remember_line

    def refuse_beside_live(self) -> None:
        """Raise LiveJobError on all ranks if trainers of another launch are alive on one of their nodes."""
        refuse_beside_live(self._group, self._topology, self._slots, self._settings.job)

    def take(self, *, take_over: bool) -> None:
        """Claim the job. Must come before the agents are taken over.

        Every load claims it again, because another launch may have overtaken this one.
        """
        if not take_over:
            self.refuse_beside_live()
        self.is_held = True

    def take_here(self, *, again: bool = False) -> None:
        """Claim the job as far as this node knows. Local: the caller tells the other ranks what this raises."""
        if again or not self.is_held:
            refuse_beside_live_here(self._topology, self._slots, self._settings.job)
            self.is_held = True

    def renew_launch(self) -> None:
        """Begin a new launch and take the agents over."""
        take_over(self._group, self._topology, self._slots, highest_epoch(self._store, self._disk_epoch))
        self._saver.begin_launch()

    def look_at_disk(self, context: LoadContext) -> DiskInventory:
        """Return what lies in persist_dir, and note its epochs for the next launch."""
        config = self._settings.config
        found = take_disk_inventory(
            context, config.persist_dir, config.start_timeout, overwrite=config.persist_overwrite
        )
        self._disk_epoch = max(self._disk_epoch, found.highest_epoch)
        return found

    def begin_anew(self, given_up: Pick | None, present: Collection[Launch]) -> Line:
        """Return the line that the first save of this launch claims. Local.

        `given_up` is what the caller decided to leave behind, or None.
        """
        if self._topology.is_leader:
            self._store.forget_persisted()  # after a fresh start, steps in persist_dir do not count as lost
        line = begun(self._slots.launch) if given_up is None else given_up.line_for(self._slots.launch, None)
        self._saver.writer.due_line = line.compacted(present)
        self._saver.attempts.follow(None)
        return line

    def put_line(self, line: Line, base: Generation | None, present: Collection[Launch]) -> None:
        """Continue from `base` on `line`. What the line abandons is no longer used."""
        put_line(self._group, self._topology, self._slots, line.compacted(present), base)
        self._saver.attempts.follow(base)
        self._remember_line(line)

    def go_on_with(self, launch: Launch, recovery: Recovery, generation: Generation) -> None:
        """Continue from `generation` as `launch`, which all ranks have agreed on. Local."""
        self.is_held = True
        self._slots.enter(launch)
        self._saver.begin_launch()
        self._saver.attempts.follow(generation)
        if self._topology.is_leader:
            line = recovery.line_for(launch, generation)
            self._slots.put_line(line.compacted(recovery.present), generation)


def _remember_line(settings: Settings, topology: Topology, line: Line) -> None:
    """Write the line to persist_dir, where it survives the loss of all memory."""
    config = settings.config
    if line.listed and config.persist_dir is not None and topology.rank == 0:
        remember_line(config.persist_dir, settings.job, line, config.save_timeout)
