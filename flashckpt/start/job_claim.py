"""This launch's claim on the job: that no other one is alive, which launch it is, and on which line it goes on."""

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
    """Claims the job for this launch before its first save, and anew in every load. Collective unless it says else."""

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
        self._disk_epoch = 0  # the highest that a load saw in persist_dir
        self.is_held = False  # this launch may take the agents over: no other one is alive, or it was told to
        self._remember_line = functools.partial(_remember_line, settings, topology)
        saver.writer.on_claimed = self._remember_line

    def refuse_beside_live(self) -> None:
        """Raise LiveJobError on all ranks where trainers of another launch are alive on one of their nodes."""
        refuse_beside_live(self._group, self._topology, self._slots, self._settings.job)

    def take(self, *, take_over: bool) -> None:
        """Claim the job before the agents are taken over.

        Asked again at each load: another launch may have overtaken this one.
        """
        if not take_over:
            self.refuse_beside_live()
        self.is_held = True

    def take_here(self, *, again: bool = False) -> None:
        """Claim the job as far as this node knows. Local: the caller tells the other ranks what it raises."""
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
        """Return the line that the first save of this launch claims. `given_up`: what a person said to leave behind.

        Local.
        """
        if self._topology.is_leader:
            self._store.forget_persisted()  # whoever starts anew does not miss what lay in persist_dir
        line = begun(self._slots.launch) if given_up is None else given_up.line_for(self._slots.launch, None)
        self._saver.writer.due_line = line.compacted(present)
        self._saver.attempts.follow(None)
        return line

    def put_line(self, line: Line, base: Generation | None, present: Collection[Launch]) -> None:
        """Go on from `base` on `line`, and without what the line abandons."""
        put_line(self._group, self._topology, self._slots, line.compacted(present), base)
        self._saver.attempts.follow(base)
        self._remember_line(line)

    def go_on_with(self, launch: Launch, recovery: Recovery, generation: Generation) -> None:
        """Go on from `generation` as `launch`, which all ranks have agreed on. Local."""
        self.is_held = True
        self._slots.enter(launch)
        self._saver.begin_launch()
        self._saver.attempts.follow(generation)
        if self._topology.is_leader:
            line = recovery.line_for(launch, generation)
            self._slots.put_line(line.compacted(recovery.present), generation)


def _remember_line(settings: Settings, topology: Topology, line: Line) -> None:
    """Write the line to persist_dir, for the day when all memory is gone."""
    config = settings.config
    if line.listed and config.persist_dir is not None and topology.rank == 0:
        remember_line(config.persist_dir, settings.job, line, config.save_timeout)
