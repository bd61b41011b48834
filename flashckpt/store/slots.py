"""Manages slots on tmpfs: files that are allocated, faulted and mapped once, and then change their owner by renaming.

    new ─────────────┐
    pool/ ──claim──▶ writing/ ──seal──▶ sealed/ ──release──▶ writing/ ──▶ pool/
                        └──abandon──▶ pool/        └──quarantine──▶ quarantine/ ──▶ unlinked

Several processes use one directory without locks. A file's directory and name are its complete state, a rename
changes it in one step, and of two that try the same rename the second gets ENOENT and looks again. The name contains
the last writer: another process may have the slot only when that writer is known to have exited.
Threads of one process may use one store: the same renames decide between them.

If an agent owns the slots, it grants and releases them, and a trainer attaches instead of claiming: the same
renames, into and out of the trainer's name. Methods that say so may be called by the agent only.

Failpoints, in the order of a slot's life:
`after_create` (new file, empty) or `after_take` (out of the pool) · `before_allocate` · `mid_allocate`
(between two steps) · `after_allocate` · `after_map` · `after_invalidate` (the old preamble is gone) ·
`after_claim` · `before_abandon` · `after_abandon` · `before_rename_sealed` · `after_rename_sealed` ·
`before_release` · `mid_release` (out of sealed/, the preamble still intact) · `after_zero_released` ·
`after_release` · `before_quarantine` · `after_quarantine` · `mid_reclaim`. Those of the
files beside the slots are named in grants.py, lines.py, session.py and records.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, ConflictError, FlashError
from flashckpt.failpoints import failpoint
from flashckpt.store import audit, fetched, voids
from flashckpt.store.audit import StoreStatus
from flashckpt.store.directory import Directory, Place, Private, SlotState, open_directory
from flashckpt.store.fetched import FetchedFile
from flashckpt.store.grants import Grants
from flashckpt.store.handles import Reclaimed, Sealed, Slot, SlotFile, shard_gone
from flashckpt.store.job_files import JobFiles
from flashckpt.store.mounts import huge_page_bytes
from flashckpt.store.names import (
    parse_draft_name,
    parse_fetched_name,
    parse_sealed_name,
    parse_slot_name,
    sealed_prefix,
    slot_name,
)
from flashckpt.store.owner import Owner, is_dead, read_boot_id8
from flashckpt.store.room import RoomReader, check_room, format_bytes, no_space
from flashckpt.store.supply import Supply, Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from flashckpt.store.windows import Window
    from flashckpt.types import ShardId

__all__ = ["Reclaimed", "Sealed", "Slot", "SlotFile", "SlotStore", "StoreStatus"]

_log = logging.getLogger(__name__)
_QUARANTINED_FILES = 2
_MAX_REMEMBERED_NAMES = 1000


class SlotStore(JobFiles):
    """One process's access to the memory directory of one job."""

    def __init__(self, directory: Directory, *, budget_bytes: int | None, threads: int) -> None:
        """Use SlotStore.open()."""
        room = RoomReader(
            directory.fd,
            directory.mount,
            budget_bytes=budget_bytes,
            used_bytes=lambda: audit.slot_bytes(directory),
        )
        super().__init__(directory, room)
        self.huge_page_bytes = huge_page_bytes(directory.mount, directory.fd)
        self._supply = Supply(
            directory,
            self._owner,
            self._room,
            huge_page_bytes=self.huge_page_bytes,
            threads=threads,
            on_foreign_name=self._note_foreign,
        )
        self._grants = Grants(directory, self._owner, self._supply)
        self.granule_bytes = self._supply.granule_bytes
        self._writing: dict[int, Slot | SlotFile] = {}
        self._foreign_names: set[tuple[SlotState, str]] = set()

    @staticmethod
    def open(
        memory_dir: str | Path,
        job: str,
        *,
        budget_bytes: int | None = None,
        create: bool = True,
        threads: int = 2,
        undo: contextlib.ExitStack | None = None,
    ) -> SlotStore:
        """Open the store.

        `budget_bytes` limits the sum of all slot files of the job on this node; this store stays below it. `threads`
        threads fault new pages in. `undo` closes the directory until there is a store.
        """
        if budget_bytes is not None and budget_bytes <= 0:
            raise ConfigError(f"budget_bytes: expected more than 0, found {budget_bytes}")
        if threads < 1:
            raise ConfigError(f"threads: expected at least 1, found {threads}")
        directory = open_directory(memory_dir, job, create)
        if undo is not None:
            undo.callback(directory.close)
        try:
            return SlotStore(directory, budget_bytes=budget_bytes, threads=threads)
        except BaseException:
            directory.close()
            raise

    def __enter__(self) -> SlotStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, remove_pool: bool = False) -> None:
        """Close the store. May be called twice.

        Own free slots stay, for the next process, unless `remove_pool`. In a forked child only the child's descriptors
        and mappings are closed; the files are the parent's.
        """
        if self._closed:
            return
        try:
            if self._is_our_process():
                self.take_back()
                if remove_pool:
                    self._supply.remove_free(own=True)
        except FlashError as error:
            _log.warning("slot store %s: free slots were left behind: %s", self.path, error)
        finally:
            self._closed = True
            for slot in self._writing.values():
                if isinstance(slot, SlotFile):
                    slot.close()
            self._writing.clear()
            self._supply.drop_all_mappings()
            self._directory.close()

    # -- the life of a slot -------------------------------------------------------------------------------

    def claim(self, size_bytes: int) -> Slot:
        """Return a slot of exactly that size, in memory and mapped, that nobody else has.

        An own free slot of that size costs a rename. Otherwise one is resized: an own one, or the closest whose last
        writer has exited; otherwise a file is created. Free slots are removed before NoSpaceError is raised.
        """
        self._begin_claim(size_bytes)
        return self._map(self._supply.take(size_bytes), size_bytes)

    def claim_file(self, size_bytes: int) -> SlotFile:
        """Claim a slot for writing through a descriptor: nothing is mapped, so this process stays small.

        Any size is possible, since a replica is as long as its shard; on hugetlbfs only multiples of a page.
        """
        self._begin_claim(size_bytes, multiple_bytes=self.granule_bytes if self._is_paged else 1)
        return self._open(self._supply.take(size_bytes, unmapped=True), size_bytes)

    def claim_to_receive(self, size_bytes: int) -> Slot | SlotFile:
        """Claim a slot for a shard of another node.

        Memory that was used before is mapped, so that bytes come from the socket directly into their place, and stays
        mapped for the next shard. New memory is written through a descriptor: if it were mapped, each page would be
        cleared first, which costs more than the additional copy.
        """
        if size_bytes % self.granule_bytes or self._is_paged:
            return self.claim_file(size_bytes)
        self._begin_claim(size_bytes)
        taken = self._supply.take(size_bytes)
        is_made = self._supply.is_made(taken.slot_id, size_bytes)
        return self._map(taken, size_bytes) if is_made else self._open(taken, size_bytes)

    @property
    def _is_paged(self) -> bool:
        return self._directory.mount.fs_type == "hugetlbfs"

    def _map(self, taken: Taken, size_bytes: int) -> Slot:
        try:
            mapping = self._supply.fit(taken.slot_id, size_bytes)
            failpoint("after_claim")
        except BaseException as error:
            self._supply.put_back(taken)
            if isinstance(error, OSError):
                self._supply.raise_if_full(error, size_bytes)
            raise
        slot = Slot(taken.slot_id, size_bytes, mapping.view())
        self._writing[taken.slot_id] = slot
        return slot

    def _open(self, taken: Taken, size_bytes: int) -> SlotFile:
        fd = -1
        try:
            fd = self._supply.fit_file(taken.slot_id, size_bytes)
            failpoint("after_claim")
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            self._supply.put_back(taken)
            if isinstance(error, OSError):
                self._supply.raise_if_full(error, size_bytes)
            raise
        slot = SlotFile(taken.slot_id, size_bytes, fd, page_bytes=self.huge_page_bytes if self._is_paged else 0)
        self._writing[taken.slot_id] = slot
        return slot

    def prepare(self, size_bytes: int, count: int, on_mapped: Callable[[memoryview], None] | None = None) -> None:
        """Do the slow part of `count` claims in advance: afterwards as many own slots of that size are ready.

        `on_mapped` is called with each, and may keep a view of it.
        """
        slots: list[Slot] = []
        try:
            for _ in range(count):
                slots.append(self.claim(size_bytes))
                if on_mapped is not None:
                    on_mapped(slots[-1].view)
        finally:
            for slot in slots:
                self.abandon(slot)

    def map_free(self, size_bytes: int, on_mapped: Callable[[memoryview], None] | None = None) -> int:
        """Map and fault the free slots of that size that are ready for this process. Return how many. Called by
        trainers.

        The slots stay where they are. Once an agent grants one, attach() finds it mapped. `on_mapped` is called with
        each that is ready, and may keep a view of it.
        """
        self._check_usable()
        return self._supply.map_free(size_bytes, on_mapped)

    def seal(self, slot: Slot | SlotFile, shard: ShardId, tag: int = 0) -> Sealed:
        """Make the slot a shard. Raise ConflictError, and leave the slot as it was, if the shard exists.

        `tag` is chosen by the caller, and becomes a part of the name.
        """
        self._check_usable()
        self._check_writing(slot)
        self._directory.check_still_ours()
        sealed = Sealed(shard, tag, slot.slot_id, self._owner, self._directory)
        writing_name = slot_name(slot.slot_id, self._owner)
        self._check_only(sealed)
        with self._leaving(slot):
            failpoint("before_rename_sealed")
            if not self._directory.move(SlotState.WRITING, writing_name, SlotState.SEALED, sealed.name):
                raise self._supply.vanished(slot.slot_id)
            try:
                # Again, since another process may have sealed the same shard in between. The second one sees the first,
                # so that two never stay; if both see each other, both withdraw.
                self._check_only(sealed)
            except ConflictError:
                self._directory.move(SlotState.SEALED, sealed.name, SlotState.WRITING, writing_name)
                raise
        self._supply.taken.discard(slot.slot_id)
        failpoint("after_rename_sealed")
        return sealed

    def abandon(self, slot: Slot | SlotFile) -> None:
        """Move a slot back into the pool, whatever was written."""
        self._check_usable()
        self._check_writing(slot)
        with self._leaving(slot):
            failpoint("before_abandon")
            self._supply.put_back(Taken(slot.slot_id, self._owner))
        failpoint("after_abandon")

    def release(self, sealed: Sealed, *, of_others: bool = False) -> bool:
        """Free a shard's slot: an own one, or one whose writer has exited.

        Return False if the writer is another live process, or the shard is gone already. With `of_others` (agents only)
        a live trainer's slot is freed as well: into the pool under its name, where only grant() to that trainer finds
        it.
        """
        self._check_usable()
        if not of_others and sealed.writer != self._owner and not is_dead(sealed.writer):
            return False
        failpoint("before_release")
        # Through writing/, under our name: nobody can take it out of the pool while it still has a valid preamble, and
        # if we die here it is found like any other slot of a dead writer.
        writing_name = slot_name(sealed.slot_id, self._owner)
        self._supply.taken.add(sealed.slot_id)
        if not self._directory.move(SlotState.SEALED, sealed.name, SlotState.WRITING, writing_name):
            self._supply.taken.discard(sealed.slot_id)
            return False
        try:
            failpoint("mid_release")
            self._supply.erase_preamble(sealed.slot_id)
            failpoint("after_zero_released")
        finally:
            # It keeps its writer's name: the writer may have it mapped or, if it is dead, every process may claim it.
            # We only wrote through a descriptor that is closed again. This also holds after an error: claim(), grant()
            # and attach() erase once more.
            pool_name = slot_name(sealed.slot_id, sealed.writer)
            self._directory.move(SlotState.WRITING, writing_name, SlotState.POOL, pool_name)
            self._supply.taken.discard(sealed.slot_id)
        failpoint("after_release")
        return True

    def quarantine(self, sealed: Sealed, reason: str) -> None:
        """Set a damaged shard aside, of whichever process. It is only renamed: its writer may have it mapped."""
        self._check_usable()
        failpoint("before_quarantine")
        if not self._directory.move(SlotState.SEALED, sealed.name, SlotState.QUARANTINE, sealed.name):
            return
        _log.warning("%s in %s quarantined: %s", sealed.shard, self.path, reason)
        failpoint("after_quarantine")
        kept = []
        for name in self._directory.names(SlotState.QUARANTINE):
            found = self._directory.stat(SlotState.QUARANTINE, name)
            if parse_sealed_name(name) is not None and found is not None:
                # The rename set ctime.
                kept.append((found.st_ctime_ns, name))
        for _, name in sorted(kept)[:-_QUARANTINED_FILES]:
            self._directory.remove(SlotState.QUARANTINE, name)

    def take_back(self) -> int:
        """Free the slots that an exception left claimed, attached or in the middle of a rename. Return how many.

        Call it only while no thread of this process claims, writes or releases slots.
        """
        self._check_usable()
        freed = 0
        for slot in list(self._writing.values()):
            self.abandon(slot)
            freed += 1
        return freed + self._supply.take_back()

    def reclaim(self) -> Reclaimed:
        """Free the slots that dead writers were filling, and remove what another boot left."""
        self._check_usable()
        self._supply.forget_unlinked()
        files = size_bytes = dropped_files = dropped_bytes = 0
        boot_id8 = read_boot_id8()
        dead: dict[Owner, bool] = {}
        for name in self._directory.names(SlotState.WRITING):
            parsed = parse_slot_name(name)
            if parsed is None or not self._is_dead(parsed.writer, dead):
                continue
            found = self._directory.stat(SlotState.WRITING, name)
            if found is not None and self._directory.move(SlotState.WRITING, name, SlotState.POOL, name):
                files += 1
                size_bytes += found.st_size
            failpoint("mid_reclaim")
        for place, name, writer in self._droppable():
            if writer.boot_id8 == boot_id8 and (isinstance(place, SlotState) or not self._is_dead(writer, dead)):
                continue
            found = self._directory.stat(place, name)
            if found is not None and self._directory.remove(place, name):
                dropped_files += 1
                dropped_bytes += found.st_size
        dropped_files += voids.drop_stale(self._directory, lambda writer: self._is_dead(writer, dead))
        return Reclaimed(files, size_bytes, dropped_files, dropped_bytes)

    def trim(self) -> int:
        """Give memory back: remove free slots that exited processes left and nobody claimed. Return how many."""
        self._check_usable()
        return self._supply.remove_free(own=False)

    # -- slots of an agent --------------------------------------------------------------------------------

    def grant(self, size_bytes: int, to: Owner) -> int:
        """Return the id of a slot of exactly that size, in memory, that `to` may attach(). Called by the agent only.

        A slot that `to` wrote last costs a rename, and `to` has it mapped. Otherwise one whose last writer has exited,
        or one of the agent's own, is resized; otherwise a file is created. The agent has none of them mapped to write.
        Free slots, also those of `to` with other sizes, are removed before NoSpaceError is raised.
        """
        self._begin_claim(size_bytes)
        return self._grants.grant(size_bytes, to)

    def withdraw(self, slot_id: int, to: Owner) -> bool:
        """Take back a grant that `to` has not been told of. Return False if there is none. Called by the agent only."""
        self._check_usable()
        return self._grants.withdraw(slot_id, to)

    def prepare_for(self, size_bytes: int, count: int, to: Owner) -> None:
        """Reserve `count` free slots of `size_bytes` for `to`. Called by the agent only."""
        granted: list[int] = []
        try:
            granted.extend(self.grant(size_bytes, to) for _ in range(count))
        finally:
            for slot_id in granted:
                self.withdraw(slot_id, to)

    def attach(self, slot_id: int, size_bytes: int) -> Slot:
        """Map the slot that the agent granted to this process. From then on it is as if it were claimed. Called by
        trainers.

        If this process wrote the slot before, the mapping is still there and nothing is faulted in.
        """
        self._check_usable()
        self._directory.check_still_ours()
        if slot_id in self._writing:
            raise ConflictError(
                f"slot {slot_id:016x} in {self.path}: expected one to attach, found it being written already",
                hint="the agent granted it twice, or an answer of it was used twice",
                slot_id=slot_id,
            )
        self._supply.forget_unlinked()
        self._supply.taken.add(slot_id)
        try:
            mapping = self._supply.attach(slot_id, size_bytes)
            failpoint("after_attach")
        except BaseException as error:
            self._supply.put_back(Taken(slot_id, self._owner))
            if isinstance(error, OSError):
                self._supply.raise_if_full(error, size_bytes)
            raise
        slot = Slot(slot_id, size_bytes, mapping.view())
        self._writing[slot_id] = slot
        return slot

    def on_unlinked(self, call: Callable[[memoryview], None]) -> None:
        """Set a callback that is given the memory of a slot before it is unmapped because its file was removed.

        The callback must release its views. Otherwise the memory stays allocated.
        """
        self._supply.on_unlinked = call

    def forget_unlinked(self) -> None:
        """Release the memory of files that other processes removed: slots that were given up, shards that were set
        aside."""
        self._check_usable()
        self._supply.forget_unlinked()

    # -- shards -------------------------------------------------------------------------------------------

    def scan(self) -> tuple[Sealed, ...]:
        """Return all shards, from their names alone. The reader has to verify the bytes."""
        self._check_usable()
        found = []
        for name in self._directory.names(SlotState.SEALED):
            parsed = parse_sealed_name(name)
            if parsed is None:
                self._note_foreign(SlotState.SEALED, name)
                continue
            found.append(Sealed(parsed.shard, parsed.tag, parsed.slot_id, parsed.writer, self._directory))
        return tuple(found)

    def find(self, shard: ShardId) -> Sealed | None:
        """Return the shard; None if it does not lie here."""
        return next((sealed for sealed in self.scan() if sealed.shard == shard), None)

    def open_shard(self, sealed: Sealed) -> int:
        """Return a descriptor for reading, which the caller closes. The file may be recycled while it is read."""
        self._check_usable()
        try:
            return self._directory.open_file(SlotState.SEALED, sealed.name)
        except FileNotFoundError as error:
            raise shard_gone(sealed) from error

    def mapped_shard(self, sealed: Sealed, fd: int) -> memoryview | None:
        """Return this process's own mapping of the shard open at `fd`, read-only, for the caller to release; None if
        there is none.

        If the process wrote the shard itself, nobody else writes into the slot or shortens it as long as it lives:
        reading there is as safe as reading the file, and needs no copy through the kernel.
        """
        self._check_usable()
        return self._supply.own_view(sealed.slot_id, os.fstat(fd)) if sealed.writer == self._owner else None

    def window(self, sealed: Sealed, fd: int) -> Window | None:
        """Return a window of the shard open at `fd`, to send it. Called by the agent only.

        It stays mapped for the next generation in its slot. None if it can't be mapped.
        """
        self._check_usable()
        return self._supply.window(sealed.slot_id, fd)

    # -- parts of shards that an agent fetched -------------------------------------------------------------

    def create_fetched(self, size_bytes: int) -> FetchedFile:
        """Create a file as long as a shard, without memory; `FetchedFile.remove` ends it. Called by the agent only.

        Free slots are removed before NoSpaceError is raised.
        """
        self._check_usable()
        self._directory.check_still_ours()
        return FetchedFile(
            self._directory, self._owner, size_bytes, self._room, self.granule_bytes, self._supply.give_up_one
        )

    def open_fetched(self, name: str) -> int:
        """Return a descriptor for reading, which the caller closes. Raise NotFoundError if the load that needed the
        file has ended."""
        self._check_usable()
        return fetched.open_fetched(self._directory, name)

    def empty_fetched(self) -> int:
        """Remove the fetched files of an earlier agent, and return their number. Called by the agent only, at its
        start."""
        self._check_usable()
        return fetched.empty_fetched(self._directory)

    def highest_epoch(self) -> int:
        """Return the highest epoch of a line, a record or a shard here; 0 if there is none."""
        known = [line.head.epoch for line in self.read_lines()]
        known += [record.generation.epoch for record in self.read_records()]
        return max([0, *known, *(sealed.shard.generation.epoch for sealed in self.scan())])

    # -- looking at it ------------------------------------------------------------------------------------

    @property
    def directory_id(self) -> str:
        """A name that is the same for all processes that share this directory, and for no others."""
        self._check_usable()
        return self._directory.identity()

    def check_budget(self, total_bytes: int) -> None:
        """Raise NoSpaceError if the directory can never hold slots of that size in all.

        Slots that are there already count: they will be recycled.
        """
        self._check_usable()
        room = replace(self._room(), budget_used_bytes=audit.slot_bytes(self._directory))
        need = max(0, total_bytes - room.budget_used_bytes)
        reason = check_room(need, room)
        if reason is not None:
            reason = (
                f"slots of {format_bytes(total_bytes)} in all, of which "
                f"{format_bytes(total_bytes - need)} are there: {reason}"
            )
            raise no_space(need, room, reason, str(self.path))

    def status(self) -> StoreStatus:
        self._check_usable()
        return audit.read_status(
            self._directory,
            self._room(),
            huge_page_bytes=self.huge_page_bytes,
            granule_bytes=self.granule_bytes,
        )

    def check(self) -> list[str]:
        """Return what should never be, as text; empty if all is well. Call it while nothing else changes the
        directory."""
        self._check_usable()
        held = {slot_name(slot_id, self._owner) for slot_id in self._writing}
        return audit.find_problems(self._directory, held_by_us=held)

    # -- inside -------------------------------------------------------------------------------------------

    def _begin_claim(self, size_bytes: int, *, multiple_bytes: int | None = None) -> None:
        self._check_usable()
        multiple = self.granule_bytes if multiple_bytes is None else multiple_bytes
        if size_bytes <= 0 or size_bytes % multiple:
            raise ConfigError(
                f"slot of {size_bytes} bytes: expected a positive multiple of {multiple}",
                hint="round up to granule_bytes",
            )
        self._directory.check_still_ours()
        self._supply.forget_unlinked()

    def _check_writing(self, slot: Slot | SlotFile) -> None:
        if self._writing.get(slot.slot_id) is not slot:
            raise ConflictError(
                f"slot {slot.slot_id:016x} in {self.path}: expected one that is being written, "
                "found one that was sealed or abandoned before, or another store's",
                slot_id=slot.slot_id,
            )

    @contextlib.contextmanager
    def _leaving(self, slot: Slot | SlotFile) -> Iterator[None]:
        """Forget the slot as this process's, unless the block raises.

        Before its rename and not after: another thread may have claimed it again by then.
        """
        del self._writing[slot.slot_id]
        try:
            yield
        except BaseException:
            self._writing[slot.slot_id] = slot
            raise
        slot.let_go()

    def _check_only(self, sealed: Sealed) -> None:
        prefix = sealed_prefix(sealed.shard)
        others = [
            name
            for name in self._directory.names(SlotState.SEALED)
            if name.startswith(prefix) and name != sealed.name and parse_sealed_name(name) is not None
        ]
        if others:
            raise ConflictError(
                f"{sealed.shard} in {self.path}: expected none yet, found {others[0]}",
                hint="two processes act as the same rank of the same launch, or a save was repeated "
                "with the same attempt number",
                shard=sealed.shard,
            )

    def _is_dead(self, owner: Owner, known: dict[Owner, bool]) -> bool:
        if owner not in known:
            known[owner] = owner != self._owner and is_dead(owner)
        return known[owner]

    def _droppable(self) -> list[tuple[Place, str, Owner]]:
        """Return files that are useless after a reboot, and drafts of small files."""
        found: list[tuple[Place, str, Owner]] = []
        for name in self._directory.names(SlotState.POOL):
            slot = parse_slot_name(name)
            if slot is not None:
                found.append((SlotState.POOL, name, slot.writer))
        for name in self._directory.names(SlotState.QUARANTINE):
            sealed = parse_sealed_name(name)
            if sealed is not None:
                found.append((SlotState.QUARANTINE, name, sealed.writer))
        for place, name in audit.small_file_names(self._directory):
            draft = parse_draft_name(name)
            if draft is not None:
                found.append((place, name, draft.writer))
            elif place is Private.FETCHED and (fetcher := parse_fetched_name(name)) is not None:
                found.append((place, name, fetcher))
        return found

    def _note_foreign(self, state: SlotState, name: str) -> None:
        if (state, name) not in self._foreign_names and len(self._foreign_names) < _MAX_REMEMBERED_NAMES:
            self._foreign_names.add((state, name))
            _log.warning("%s/%s: %r is not a name of flashckpt; ignored", self.path, state, name)
