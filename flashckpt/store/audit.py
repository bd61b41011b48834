"""Inspects a complete memory directory: sums, and what should never be there."""

from __future__ import annotations

import stat
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import NotFoundError, UnsafeDirectoryError
from flashckpt.store.directory import Directory, Place, Private, SlotState, check_file
from flashckpt.store.names import (
    AGENT_FILES_PREFIX,
    LOSSES_NAME,
    SESSION_NAME,
    is_plain_name,
    parse_damaged_line_name,
    parse_draft_name,
    parse_fetched_name,
    parse_line_name,
    parse_past_name,
    parse_record_name,
    parse_sealed_name,
    parse_slot_name,
    parse_void_name,
)
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
    fetched: Count  # parts of shards, while a load needs them; their memory, not their length
    job_files: Count  # beside the slots: lines, session, records, secrets, the agent's files
    records: int  # commit records, counted in job_files too
    foreign_names: int  # files whose names are not ours
    granule_bytes: int
    huge_page_bytes: int  # 0 = the mount has none
    room: Room

    @property
    def quarantined_files(self) -> int:
        return self.quarantine.files

    @property
    def total_bytes(self) -> int:
        counts = (self.pool, self.writing, self.sealed, self.quarantine, self.fetched)
        return sum(count.size_bytes for count in counts)


def slot_bytes(directory: Directory) -> int:
    """Return the sum of all slot files, in every state, and of what was fetched."""
    slots = sum(found.st_size for state in SlotState for _, found in _files(directory, state))
    return slots + _fetched(directory).size_bytes


def read_status(directory: Directory, room: Room, *, huge_page_bytes: int, granule_bytes: int) -> StoreStatus:
    counts = {}
    foreign_names = 0
    for state in SlotState:
        files = list(_files(directory, state))
        foreign_names += sum(parse_name(state, name) is None for name, _ in files)
        counts[state] = Count(len(files), sum(found.st_size for _, found in files))
    small = list(small_file_names(directory))
    foreign_names += sum(not is_known(place, name) for place, name in small)
    small = [(place, name) for place, name in small if place is not Private.FETCHED]
    sizes = [found.st_size for place, name in small if (found := directory.stat(place, name)) is not None]
    return StoreStatus(
        path=str(directory.path),
        pool=counts[SlotState.POOL],
        writing=counts[SlotState.WRITING],
        sealed=counts[SlotState.SEALED],
        quarantine=counts[SlotState.QUARANTINE],
        fetched=_fetched(directory),
        job_files=Count(len(sizes), sum(sizes)),
        records=sum(parse_record_name(name) is not None for _, name in small),
        foreign_names=foreign_names,
        granule_bytes=granule_bytes,
        huge_page_bytes=huge_page_bytes,
        room=room,
    )


def find_problems(directory: Directory, *, held_by_us: set[str]) -> list[str]:
    """Return what is wrong in the directory, as text. `held_by_us`: the names in writing/ that the asking store is
    filling."""
    problems = []
    slots: dict[int, list[tuple[SlotState, str]]] = defaultdict(list)
    shards: dict[str, list[tuple[SlotState, str]]] = defaultdict(list)
    current = Owner.current()
    for state in SlotState:
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
            slots[parsed.slot_id].append((state, name))
            if state is SlotState.SEALED:
                shards[name.partition(".t")[0]].append((state, name))
            if state is SlotState.WRITING and parsed.writer == current and name not in held_by_us:
                problems.append(f"{where}: leaked, no slot of this store")
            elif state is SlotState.WRITING and parsed.writer != current and is_dead(parsed.writer):
                problems.append(f"{where}: its writer is dead")
    problems += [f"slot {slot:016x} is in {at}" for slot, seen in slots.items() if (at := _twice(directory, seen))]
    problems += [f"two files of one shard: {at}" for seen in shards.values() if (at := _twice(directory, seen))]
    problems += _small_file_problems(directory)
    for name in held_by_us - set(directory.names(SlotState.WRITING)):
        problems.append(f"{SlotState.WRITING}/{name}: being written, but its file has gone")
    return problems


def small_file_names(directory: Directory) -> Iterator[tuple[Place, str]]:
    """Yield every file beside the slots: in the job's directory itself and in its private folders."""
    folders = {*SlotState, *Private}
    for name in directory.names(None):
        if name not in folders:
            yield None, name
    for place in Private:
        try:
            names = directory.names(place)
        except NotFoundError:
            continue  # not made yet
        yield from ((place, name) for name in names)


def is_known(place: Place, name: str) -> bool:
    """Return True if a small file has a name that flashckpt gives."""
    if parse_draft_name(name) is not None:
        return True
    if place is Private.FETCHED:
        return parse_fetched_name(name) is not None
    if place is not None:
        return is_plain_name(name)
    parsers = (
        parse_line_name,
        parse_damaged_line_name,
        parse_record_name,
        parse_void_name,
        parse_past_name,
    )
    return (
        name in (SESSION_NAME, LOSSES_NAME)
        or (name.startswith(AGENT_FILES_PREFIX) and is_plain_name(name))
        or any(parse(name) is not None for parse in parsers)
    )


def _small_file_problems(directory: Directory) -> list[str]:
    problems = []
    for place, name in small_file_names(directory):
        where = name if place is None else f"{place}/{name}"
        if not is_known(place, name):
            problems.append(f"{where}: not a name of flashckpt")
            continue
        found = directory.stat(place, name)
        if found is None:
            continue
        # A socket has the mode that its umask left; the directory keeps others out.
        if not (stat.S_ISSOCK(found.st_mode) and name.startswith(AGENT_FILES_PREFIX)):
            try:
                check_file(directory.path / where, found)
            except UnsafeDirectoryError as error:
                problems.append(f"{where}: {error.message}")
        fetcher = parse_fetched_name(name)
        if fetcher is not None and is_dead(fetcher):
            problems.append(f"{where}: leaked, the agent that fetched it is dead")
        draft = parse_draft_name(name)
        if draft is not None and is_dead(draft.writer):
            problems.append(f"{where}: leaked draft of a {draft.kind}, its writer is dead")
    return problems


def _fetched(directory: Directory) -> Count:
    try:
        names = directory.names(Private.FETCHED)
    except NotFoundError:
        return Count(0, 0)
    found = [one for name in names if (one := directory.stat(Private.FETCHED, name)) is not None]
    # Not their length: most of it is holes.
    return Count(len(found), sum(one.st_blocks * 512 for one in found))


def parse_name(state: SlotState, name: str) -> SlotName | SealedName | None:
    return parse_slot_name(name) if state in (SlotState.POOL, SlotState.WRITING) else parse_sealed_name(name)


def _twice(directory: Directory, seen: list[tuple[SlotState, str]]) -> str:
    """Return the places of a file that is in several. Looks again: another process may have renamed it from one to the
    next."""
    if len(seen) > 1:
        seen = [(state, name) for state, name in seen if directory.stat(state, name) is not None]
    return " and ".join(f"{state}/{name}" for state, name in seen) if len(seen) > 1 else ""


def _files(directory: Directory, state: SlotState) -> Iterator[tuple[str, os.stat_result]]:
    for name in directory.names(state):
        found = directory.stat(state, name)
        if found is not None:
            yield name, found
