"""Keeps the parts of shards that an agent fetched for a load: files in `fetched/` that live as long as the load does.

Each is as long as its shard, with memory only behind what was asked for. It is never taken for a shard: no scan looks
there, and an agent that starts empties the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, NotFoundError
from flashckpt.store.directory import Directory, Private
from flashckpt.store.handles import SlotFile
from flashckpt.store.names import fetched_name, parse_fetched_name
from flashckpt.store.room import allocate, check_room, no_space, raise_if_full

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashckpt.store.owner import Owner
    from flashckpt.store.room import Room


class FetchedFile(SlotFile):
    """A file that is being filled. Several threads may write, each where no other does."""

    __slots__ = ("_directory", "_give_up_one", "_granule_bytes", "_room", "name")

    def __init__(
        self,
        directory: Directory,
        owner: Owner,
        size_bytes: int,
        room: Callable[[], Room],
        granule_bytes: int,
        give_up_one: Callable[[], bool],
    ) -> None:
        """Create a file without memory. Raise NoSpaceError if there is no room even for that.

        `give_up_one` frees a slot that nobody uses; it returns False if there is none.
        """
        page_bytes = granule_bytes if directory.mount.fs_type == "hugetlbfs" else 0
        if size_bytes <= 0 or (page_bytes and size_bytes % page_bytes):
            raise ConfigError(f"fetched file of {size_bytes} bytes: expected a positive multiple of {page_bytes or 1}")
        file_id = secrets.randbits(64)
        self.name = fetched_name(file_id, owner)
        self._directory, self._room, self._granule_bytes = directory, room, granule_bytes
        self._give_up_one = give_up_one
        directory.make_private(Private.FETCHED)
        try:
            fd = directory.create_file(Private.FETCHED, self.name)
        except OSError as error:
            raise_if_full(error, 0, room, self._path)
            raise
        super().__init__(file_id, size_bytes, fd, page_bytes=page_bytes)
        try:
            os.ftruncate(fd, size_bytes)
        except BaseException:
            self.remove()
            raise

    def give_memory(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Allocate memory behind these (start, length): for all of them, or raise NoSpaceError before allocating any.

        IMPORTANT: nothing may be written anywhere else: the page would be allocated without a check of the room.
        """
        need = sum(length for _, length in ranges)
        while (reason := check_room(need, room := self._room())) is not None:
            if not self._give_up_one():
                raise no_space(need, room, reason, self._path)
        for start, length in ranges:
            unit = self._page_bytes or 1
            first, end = start // unit * unit, -(-(start + length) // unit) * unit
            if end > first:
                allocate(
                    self._fd,
                    first,
                    end - first,
                    self._room,
                    granule_bytes=self._granule_bytes,
                    path=self._path,
                    in_hole=True,
                )

    def remove(self) -> None:
        """Remove the file; processes that have opened it keep it. May be called twice."""
        self.close()
        self._directory.remove(Private.FETCHED, self.name)

    @property
    def _path(self) -> str:
        return str(self._directory.path / Private.FETCHED / self.name)


def open_fetched(directory: Directory, name: str) -> int:
    if parse_fetched_name(name) is None:
        raise ConfigError(f"fetched file: expected a name that the agent gave, found {name!r}", name=name)
    try:
        return directory.open_file(Private.FETCHED, name)
    except (FileNotFoundError, NotFoundError) as error:
        raise NotFoundError(
            f"{directory.path / Private.FETCHED / name}: expected what the agent fetched, found none",
            hint="it is removed when the load that asked for it ends, or the agent does",
        ) from error


def empty_fetched(directory: Directory) -> int:
    """Remove all fetched files, and return their number. Called by the agent only, before anything is fetched."""
    with contextlib.suppress(NotFoundError):
        names = directory.names(Private.FETCHED)
        return sum(directory.remove(Private.FETCHED, name) for name in names if parse_fetched_name(name) is not None)
    return 0
