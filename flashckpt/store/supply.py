"""Moves files into `writing/` with memory, mapping and an empty preamble, and out of it.

The process and thread that wins the rename into `writing/` has the slot for itself; only then is its mapping in this
process touched.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt import native
from flashckpt.errors import NoSpaceError, NotFoundError, UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.directory import Directory, SlotState
from flashckpt.store.handles import write_pages
from flashckpt.store.mapping import Mapping
from flashckpt.store.names import parse_slot_name, slot_name
from flashckpt.store.owner import Owner, is_dead
from flashckpt.store.room import Room, allocate, format_bytes, raise_if_full
from flashckpt.store.windows import Window, Windows

if TYPE_CHECKING:
    from collections.abc import Callable

_GRANULE_BYTES = 64 << 10
# Nothing of the format lies before its preamble, which fits in here: once this is zeroed, the file is no shard any
# more.
_PREAMBLE_BYTES = 64
# After a lost race the pool is looked at again so often before a new file is created: memory that a neighbour is about
# to free should not be allocated twice.
_LOOKS = 16


@dataclass(frozen=True, slots=True)
class Taken:
    """A file in writing/ under our name."""

    slot_id: int
    last_writer: Owner | None  # None = the file is new


@dataclass(frozen=True, slots=True)
class Free:
    """A slot in the pool."""

    slot_id: int
    writer: Owner
    size_bytes: int
    has_holes: bool

    @property
    def name(self) -> str:
        return slot_name(self.slot_id, self.writer)


class _Outcome(enum.Enum):
    TAKEN = enum.auto()
    GONE = enum.auto()  # another process was quicker
    IN_USE = enum.auto()  # our own mapping of it would have to be closed, and can't be


class Supply:
    """The free slots of one directory, as one process sees them, and its mappings."""

    def __init__(
        self,
        directory: Directory,
        owner: Owner,
        room: Callable[[], Room],
        *,
        huge_page_bytes: int,
        threads: int,
        on_foreign_name: Callable[[SlotState, str], None],
    ) -> None:
        self.granule_bytes = max(_GRANULE_BYTES, huge_page_bytes)
        self._directory = directory
        self._owner = owner
        self._room = room
        self._huge_page_bytes = huge_page_bytes
        self._threads = threads
        self._on_foreign_name = on_foreign_name
        self._mappings: dict[int, Mapping] = {}
        # Slots that we may have left in writing/: noted before each rename into it, and dropped after each rename out
        # of it, so that slots which an exception leaves there are found.
        self.taken: set[int] = set()
        self._windows = Windows()
        self.on_unlinked: Callable[[memoryview], None] | None = None  # see SlotStore.on_unlinked

    def take(self, size_bytes: int, *, unmapped: bool = False) -> Taken:
        """Take the best free slot, of any size, or a new file. `unmapped`: one that this process has not mapped."""

        def preference(candidate: Free) -> tuple[bool, bool, int]:
            own = candidate.writer == self._owner
            exact = candidate.size_bytes == size_bytes
            return not (own and exact), not own, abs(candidate.size_bytes - size_bytes)

        for _ in range(_LOOKS):
            candidates, raced = self._claimable()
            for candidate in sorted(candidates, key=preference):
                keep = candidate.size_bytes == size_bytes and not unmapped
                outcome = self._take_from_pool(candidate, keep_mapping=keep)
                if outcome is _Outcome.TAKEN:
                    taken = Taken(candidate.slot_id, candidate.writer)
                    self._pass_failpoint("after_take", taken)
                    return taken
                raced |= outcome is _Outcome.GONE
            if not raced:
                break
        taken = Taken(secrets.randbits(64), None)
        self.taken.add(taken.slot_id)
        try:
            os.close(self._directory.create_file(SlotState.WRITING, self._name(taken.slot_id)))
        except OSError as error:
            self.taken.discard(taken.slot_id)
            self.raise_if_full(error, size_bytes)
            raise
        self._pass_failpoint("after_create", taken)
        return taken

    def fit(self, slot_id: int, size_bytes: int) -> Mapping:
        """Give a taken slot exactly that size, memory, a mapping and an empty preamble."""
        fd = self._open_taken(slot_id)
        try:
            found = os.fstat(fd)
            mapping = self._fitting(slot_id, found, size_bytes)
            if mapping is None:
                # Another store of this process may have resized the file: the old mapping must not be used again.
                self.drop_mapping(slot_id)
                self._resize(fd, found, size_bytes, slot_id, spare=None)
        except BaseException:
            os.close(fd)
            raise
        return self._ready(fd, slot_id, size_bytes, mapping)

    def is_made(self, slot_id: int, size_bytes: int) -> bool:
        """Return True if a taken slot has that size already, with memory behind all of it."""
        found = self._directory.stat(SlotState.WRITING, self._name(slot_id))
        return found is not None and found.st_size == size_bytes and not self.has_holes(found)

    def fit_file(self, slot_id: int, size_bytes: int, *, spare: Owner | None = None) -> int:
        """Prepare a taken slot like fit(), but return a descriptor without a mapping.

        `spare`: the process whose free slots may also be removed to make room.
        """
        fd = self._open_taken(slot_id)
        try:
            self.drop_mapping(slot_id)
            self._resize(fd, os.fstat(fd), size_bytes, slot_id, spare=spare)
            self._erase(fd)
            failpoint("after_invalidate")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def attach(self, slot_id: int, size_bytes: int) -> Mapping:
        """Map a slot that was granted to this process, and empty its preamble. Its size is never changed."""
        try:
            fd = self._directory.open_file(SlotState.WRITING, self._name(slot_id), write=True)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{self._directory.path / SlotState.WRITING}: expected slot {slot_id:016x} "
                f"as it was granted, found none",
                hint="the agent was restarted or took it back: ask it for another one",
                path=str(self._directory.path),
                slot_id=slot_id,
            ) from error
        try:
            found = os.fstat(fd)
            if found.st_size != size_bytes or self.has_holes(found):
                raise UnsafeDirectoryError(
                    f"{self._directory.path / SlotState.WRITING}: expected slot {slot_id:016x} as it was granted, "
                    f"{format_bytes(size_bytes)} with memory behind all of it, "
                    f"found {found.st_size} bytes in {found.st_blocks} blocks",
                    hint="somebody else changes the memory directory: only flashckpt may",
                    path=str(self._directory.path),
                    slot_id=slot_id,
                )
            mapping = self._fitting(slot_id, found, size_bytes)
            if mapping is None:
                self.drop_mapping(slot_id)
        except BaseException:
            os.close(fd)
            raise
        return self._ready(fd, slot_id, size_bytes, mapping)

    def map_free(self, size_bytes: int, on_mapped: Callable[[memoryview], None] | None = None) -> int:
        """Map our free slots of that size that are not mapped yet; nobody resizes them while we live.

        `on_mapped` is called with each, also with those mapped before, and may keep a view.
        """
        free, _ = self.free_slots(self._owner.__eq__)
        mapped = 0
        for one in free:
            if one.size_bytes != size_bytes or one.has_holes:
                continue
            known = self._mappings.get(one.slot_id)
            if known is not None:
                if on_mapped is not None:
                    with known.view() as view:
                        on_mapped(view)
                continue
            try:
                fd = self._directory.open_file(SlotState.POOL, one.name, write=True)
            except FileNotFoundError:
                continue  # granted or removed meanwhile
            try:
                found = os.fstat(fd)
                if found.st_size != size_bytes or self.has_holes(found):
                    os.close(fd)
                    continue
                mapping = Mapping(fd, size_bytes, huge_pages=self._huge_page_bytes > 0)
            except BaseException:
                os.close(fd)
                raise
            self._mappings[one.slot_id] = mapping
            with mapping.view() as view:
                native.prefault(view, self._threads)
                if on_mapped is not None:
                    on_mapped(view)
            mapped += 1
        return mapped

    def own_view(self, slot_id: int, found: os.stat_result) -> memoryview | None:
        """Return a view of this process's mapping of the file; the mapping stays while the view does."""
        mapping = self._fitting(slot_id, found, found.st_size)
        return None if mapping is None else mapping.view().toreadonly()

    def window(self, slot_id: int, fd: int) -> Window | None:
        """Return a window of the file open at `fd`, to send it; None if it can't be mapped."""
        found = os.fstat(fd)
        if self.has_holes(found):
            return None  # reading one allocates memory that nobody has counted
        mapping = self._fitting(slot_id, found, found.st_size)
        if mapping is None:
            return self._windows.of(slot_id, fd, found)
        self._windows.drop(slot_id)
        return Window(mapping, is_faulted=True)

    def put_back(self, taken: Taken) -> None:
        """Undo take(): a new file is removed, another slot returns to the pool."""
        name = self._name(taken.slot_id)
        if taken.last_writer is None:
            self.drop_mapping(taken.slot_id)
            self._directory.remove(SlotState.WRITING, name)
            self.taken.discard(taken.slot_id)
            return
        # A slot that we have not mapped we can't write any more: others may claim it as the dead writer's.
        ours = taken.slot_id in self._mappings
        writer = self._owner if ours else taken.last_writer
        if not self._directory.move(SlotState.WRITING, name, SlotState.POOL, slot_name(taken.slot_id, writer)):
            self.drop_mapping(taken.slot_id)
        self.taken.discard(taken.slot_id)

    def take_back(self) -> int:
        """Free slots that exceptions left in writing/. Return how many. Call it only while no thread uses this
        object."""
        freed = 0
        for slot_id in list(self.taken):
            name = self._name(slot_id)
            freed += self._directory.move(SlotState.WRITING, name, SlotState.POOL, name)
            self.taken.discard(slot_id)
        return freed

    def erase_preamble(self, slot_id: int) -> None:
        """Erase the preamble of a taken slot, so that its file is no shard any more."""
        fd = self._directory.open_file(SlotState.WRITING, self._name(slot_id), write=True)
        try:
            self._erase(fd)
        finally:
            os.close(fd)

    def remove_free(self, *, own: bool) -> int:
        """Remove free slots: our own, or those that exited processes left. Return how many."""
        candidates, _ = self._claimable()
        chosen = [candidate for candidate in candidates if (candidate.writer == self._owner) == own]
        removed = sum(self._directory.remove(SlotState.POOL, candidate.name) for candidate in chosen)
        self._windows.forget_unlinked()
        return removed

    def forget_unlinked(self) -> None:
        """Close the mappings of shards that others have quarantined and removed: a mapping would keep their memory."""
        for slot_id, mapping in list(self._mappings.items()):
            if not mapping.is_unlinked():
                continue
            if self.on_unlinked is not None:
                with contextlib.suppress(ValueError), mapping.view() as view:  # closed meanwhile, by another thread
                    self.on_unlinked(view)
            if mapping.close() and self._mappings.get(slot_id) is mapping:
                self._mappings.pop(slot_id, None)
        self._windows.forget_unlinked()

    def drop_mapping(self, slot_id: int) -> None:
        mapping = self._mappings.pop(slot_id, None)
        if mapping is not None:
            mapping.forget()

    def drop_all_mappings(self) -> None:
        for slot_id in list(self._mappings):
            self.drop_mapping(slot_id)
        self._windows.close()

    def vanished(self, slot_id: int) -> UnsafeDirectoryError:
        return UnsafeDirectoryError(
            f"{self._directory.path / SlotState.WRITING}: expected our slot {slot_id:016x}, "
            "found that it was removed or renamed",
            hint="somebody else changes the memory directory: only flashckpt may",
            path=str(self._directory.path),
            slot_id=slot_id,
        )

    def raise_if_full(self, error: OSError, need_bytes: int) -> None:
        """Raise NoSpaceError with the figures, if the error is about space."""
        raise_if_full(error, need_bytes, self._room, str(self._directory.path))

    def free_slots(self, wanted: Callable[[Owner], bool]) -> tuple[list[Free], bool]:
        """Return the slots in the pool whose last writer is wanted; and whether one vanished meanwhile."""
        raced = False
        found = []
        for name in self._directory.names(SlotState.POOL):
            parsed = parse_slot_name(name)
            if parsed is None:
                self._on_foreign_name(SlotState.POOL, name)
                continue
            if not wanted(parsed.writer):
                continue
            status = self._directory.stat(SlotState.POOL, name)
            if status is None:
                raced = True
            else:
                found.append(Free(parsed.slot_id, parsed.writer, status.st_size, self.has_holes(status)))
        return found, raced

    def unlink_one(self, writer: Owner) -> bool:
        """Remove the largest free slot of a live process. Return False if there is none.

        Its mapping keeps the pages until the process notices (forget_unlinked), but the file can't be shortened under
        it.
        """
        free, _ = self.free_slots(writer.__eq__)
        free.sort(key=lambda one: -one.size_bytes)
        removed = any(self._directory.remove(SlotState.POOL, one.name) for one in free)
        self._windows.forget_unlinked()
        return removed

    def has_holes(self, found: os.stat_result) -> bool:
        # A hole would cause a SIGBUS once the filesystem is full. ramfs neither counts blocks nor fills up.
        return self._directory.mount.fs_type != "ramfs" and found.st_blocks * 512 < found.st_size

    def _name(self, slot_id: int) -> str:
        return slot_name(slot_id, self._owner)

    def _pass_failpoint(self, name: str, taken: Taken) -> None:
        try:
            failpoint(name)
        except BaseException:
            self.put_back(taken)
            raise

    def _claimable(self) -> tuple[list[Free], bool]:
        """Return free slots of this process and of processes that have exited; and whether one vanished meanwhile."""
        known: dict[Owner, bool] = {self._owner: True}

        def may_be_taken(writer: Owner) -> bool:
            # A live process may still have the slot mapped, and wake up.
            if writer not in known:
                known[writer] = is_dead(writer)
            return known[writer]

        return self.free_slots(may_be_taken)

    def _open_taken(self, slot_id: int) -> int:
        try:
            return self._directory.open_file(SlotState.WRITING, self._name(slot_id), write=True)
        except FileNotFoundError as error:
            raise self.vanished(slot_id) from error

    def _fitting(self, slot_id: int, found: os.stat_result, size_bytes: int) -> Mapping | None:
        mapping = self._mappings.get(slot_id)
        if mapping is None or not mapping.fits(found, size_bytes) or self.has_holes(found):
            return None
        return mapping

    def _ready(self, fd: int, slot_id: int, size_bytes: int, mapping: Mapping | None) -> Mapping:
        """Prepare a mapping of a taken slot. Takes over the descriptor."""
        if mapping is not None:
            os.close(fd)
            _zero(mapping)
            failpoint("after_invalidate")
            return mapping
        try:
            mapping = Mapping(fd, size_bytes, huge_pages=self._huge_page_bytes > 0)
        except BaseException:
            os.close(fd)
            raise
        self._mappings[slot_id] = mapping
        failpoint("after_map")
        # IMPORTANT: before anything else is written, so that no crash leaves an old preamble over new bytes.
        _zero(mapping)
        failpoint("after_invalidate")
        with mapping.view() as view:
            native.prefault(view, self._threads)
        return mapping

    def _erase(self, fd: int) -> None:
        if os.fstat(fd).st_size < _PREAMBLE_BYTES:
            return
        if self._directory.mount.fs_type == "hugetlbfs":
            # It has no write(). A file that has a size has a complete first page.
            write_pages(fd, 0, memoryview(bytes(_PREAMBLE_BYTES)), self._huge_page_bytes)
        else:
            os.pwrite(fd, bytes(_PREAMBLE_BYTES), 0)

    def _take_from_pool(self, candidate: Free, *, keep_mapping: bool) -> _Outcome:
        writing_name = self._name(candidate.slot_id)
        self.taken.add(candidate.slot_id)
        if not self._directory.move(SlotState.POOL, candidate.name, SlotState.WRITING, writing_name):
            self.taken.discard(candidate.slot_id)
            return _Outcome.GONE
        mapping = self._mappings.get(candidate.slot_id)
        if mapping is None or keep_mapping:
            return _Outcome.TAKEN
        if mapping.close():
            del self._mappings[candidate.slot_id]
            return _Outcome.TAKEN
        # A buffer over it is still in use. If the file were shortened, touching that buffer would be a SIGBUS.
        self._directory.move(SlotState.WRITING, writing_name, SlotState.POOL, candidate.name)
        self.taken.discard(candidate.slot_id)
        return _Outcome.IN_USE

    def _resize(self, fd: int, found: os.stat_result, size_bytes: int, slot_id: int, *, spare: Owner | None) -> None:
        if found.st_size > size_bytes:
            os.ftruncate(fd, size_bytes)
        start = 0 if self.has_holes(found) else min(found.st_size, size_bytes)
        path = str(self._directory.path / SlotState.WRITING / self._name(slot_id))
        while start < size_bytes:
            try:
                allocate(fd, start, size_bytes - start, self._room, granule_bytes=self.granule_bytes, path=path)
            except NoSpaceError:
                if not self.give_up_one() and (spare is None or not self.unlink_one(spare)):
                    raise
            else:
                return

    def give_up_one(self) -> bool:
        """Remove a free slot to make room. Return False if there is none."""

        def preference(candidate: Free) -> tuple[bool, int]:
            return candidate.writer == self._owner, -candidate.size_bytes

        candidates, _ = self._claimable()
        for candidate in sorted(candidates, key=preference):
            if candidate.size_bytes and self._take_from_pool(candidate, keep_mapping=False) is _Outcome.TAKEN:
                self._directory.remove(SlotState.WRITING, self._name(candidate.slot_id))
                self.taken.discard(candidate.slot_id)
                self._windows.forget_unlinked()
                return True
        return False


def _zero(mapping: Mapping) -> None:
    with mapping.view() as view:
        view[:_PREAMBLE_BYTES] = bytes(_PREAMBLE_BYTES)
