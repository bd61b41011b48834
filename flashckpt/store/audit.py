"""Looking at a memory directory as a whole: sums, and what should never be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.store.directory import Directory, State, check_file
from flashckpt.store.names import parse_fence_draft_name, parse_sealed_name, parse_slot_name
from flashckpt.store.owner import Owner, is_dead

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from flashckpt.store.names import SealedName, SlotName
    from flashckpt.store.room import Room


@dataclass(frozen=True, slots=True)
class Count:
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The memory directory at one moment."""

    path: str
    pool: Count
    writing: Count
    sealed: Count
    quarantine: Count
    foreign_names: int  # files whose names are not ours
    granule_bytes: int
    huge_page_bytes: int  # 0 = the mount gives none
    room: Room

    @property
    def quarantined_files(self) -> int:
        return self.quarantine.files

    @property
    def total_bytes(self) -> int:
        counts = (self.pool, self.writing, self.sealed, self.quarantine)
        return sum(count.size_bytes for count in counts)


def slot_bytes(directory: Directory) -> int:
    """The sum of all slot files, in whatever state."""
    return sum(found.st_size for state in State for _, found in _files(directory, state))


def read_status(directory: Directory, room: Room, *, huge_page_bytes: int, granule_bytes: int) -> StoreStatus:
    counts = {}
    foreign_names = 0
    for state in State:
        files = list(_files(directory, state))
        foreign_names += sum(parse_name(state, name) is None for name, _ in files)
        counts[state] = Count(len(files), sum(found.st_size for _, found in files))
    return StoreStatus(
        path=str(directory.path),
        pool=counts[State.POOL],
        writing=counts[State.WRITING],
        sealed=counts[State.SEALED],
        quarantine=counts[State.QUARANTINE],
        foreign_names=foreign_names,
        granule_bytes=granule_bytes,
        huge_page_bytes=huge_page_bytes,
        room=room,
    )


def find_problems(directory: Directory, *, held_by_us: set[str]) -> list[str]:
    """`held_by_us` are the names in writing/ that the asking store is filling."""
    problems = []
    slots = defaultdict(list)
    shards = defaultdict(list)
    current = Owner.current()
    for state in State:
        for name, found in _files(directory, state):
            where = f"{state}/{name}"
            try:
                check_file(directory.path / state / name, found)
            except UnsafeDirectoryError as error:
                problems.append(f"{where}: {error.message}")
            parsed = parse_name(state, name)
            if parsed is None:
                problems.append(f"{where}: not a name of flashckpt")
                continue
            slots[parsed.slot_id].append(where)
            if state is State.SEALED:
                shards[name.partition(".t")[0]].append(where)
            if state is State.WRITING and parsed.writer == current and name not in held_by_us:
                problems.append(f"{where}: leaked, no slot of this store")
            elif state is State.WRITING and parsed.writer != current and is_dead(parsed.writer):
                problems.append(f"{where}: its writer is dead")
    problems += [f"slot {slot_id:016x} is in {' and '.join(at)}" for slot_id, at in slots.items() if len(at) > 1]
    problems += [f"two files of one shard: {' and '.join(at)}" for at in shards.values() if len(at) > 1]
    for name in directory.names(None):
        drafter = parse_fence_draft_name(name)
        if drafter is not None and is_dead(drafter):
            problems.append(f"{name}: leaked draft of a fence, its writer is dead")
    for name in held_by_us - set(directory.names(State.WRITING)):
        problems.append(f"{State.WRITING}/{name}: being written, but its file has gone")
    return problems


def parse_name(state: State, name: str) -> SlotName | SealedName | None:
    return parse_slot_name(name) if state in (State.POOL, State.WRITING) else parse_sealed_name(name)


def _files(directory: Directory, state: State) -> Iterator[tuple[str, os.stat_result]]:
    for name in directory.names(state):
        found = directory.stat(state, name)
        if found is not None:
            yield name, found
