"""Defines what a store returns: slots to write into, shards by name."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.errors import ClosedError, ConfigError, NotFoundError
from flashckpt.store.directory import Directory, SlotState
from flashckpt.store.names import sealed_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from flashckpt.store.owner import Owner
    from flashckpt.types import ShardId


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory to write one shard into, until it is sealed or abandoned."""

    slot_id: int
    size_bytes: int
    view: memoryview  # of the complete mapping, writable; released by seal() and abandon()

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of the data, within the slot. Threads may write different parts at a time."""
        with memoryview(data).cast("B") as piece:
            if offset < 0 or offset + len(piece) > self.size_bytes:
                raise ConfigError(
                    f"slot {self.slot_id:016x}: expected bytes within 0 to {self.size_bytes}, "
                    f"found {offset} to {offset + len(piece)}",
                    slot_id=self.slot_id,
                )
            self.view[offset : offset + len(piece)] = piece

    def let_go(self) -> None:
        # Arrays over the view keep it; the mapping then stays, and is not resized under them.
        with contextlib.suppress(BufferError):
            self.view.release()


class SlotFile:
    """A slot to write one shard into without mapping it, until it is sealed or abandoned.

    What is written is charged to the filesystem's memory, not to this process. Threads may write different parts at a
    time; none may while it is closed.
    """

    __slots__ = ("_fd", "_page_bytes", "size_bytes", "slot_id")

    def __init__(self, slot_id: int, size_bytes: int, fd: int, *, page_bytes: int) -> None:
        """Take over the descriptor. `page_bytes`: of a filesystem without write(), else 0."""
        self.slot_id = slot_id
        self.size_bytes = size_bytes
        self._fd = fd
        self._page_bytes = page_bytes

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of the data, within the slot."""
        with memoryview(data).cast("B") as view:
            if offset < 0 or offset + len(view) > self.size_bytes:
                raise ConfigError(
                    f"slot {self.slot_id:016x}: expected bytes within 0 to {self.size_bytes}, "
                    f"found {offset} to {offset + len(view)}",
                    slot_id=self.slot_id,
                )
            if self._fd < 0:
                raise ClosedError(
                    f"slot {self.slot_id:016x}: expected one that is being written, found it closed",
                    hint="claim another slot",
                    slot_id=self.slot_id,
                )
            if self._page_bytes:
                write_pages(self._fd, offset, view, self._page_bytes)
                return
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)

    @property
    def view(self) -> None:
        """None: the slot is not mapped."""
        return None

    def close(self) -> None:
        """Close the slot for writing. It still has to be sealed or abandoned. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def let_go(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A shard in the memory directory, known by its name alone."""

    shard: ShardId
    tag: int
    slot_id: int
    writer: Owner
    _directory: Directory = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return sealed_name(self.shard, self.tag, self.slot_id, self.writer)

    @property
    def size_bytes(self) -> int:
        """The size of the file, read at each call. Raises NotFoundError if the file is gone."""
        found = self._directory.stat(SlotState.SEALED, self.name)
        if found is None:
            raise shard_gone(self)
        return found.st_size


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What reclaim() found."""

    files: int = 0  # slots that dead writers were filling: moved into the pool
    bytes: int = 0
    dropped_files: int = 0  # slots of another boot, drafts and marks of dead writers: removed
    dropped_bytes: int = 0


def write_pages(fd: int, offset: int, view: memoryview, page_bytes: int) -> None:
    """Write like pwrite, through a window of complete pages. The file has to reach to the end of the last one."""
    start = offset // page_bytes * page_bytes
    end = -(-(offset + len(view)) // page_bytes) * page_bytes
    if len(view):
        with mmap.mmap(fd, end - start, offset=start) as window:
            window[offset - start : offset - start + len(view)] = view


def shard_gone(sealed: Sealed) -> NotFoundError:
    return NotFoundError(
        f"{sealed.shard}: expected the file {sealed.name}, found none",
        hint="it was released or quarantined meanwhile; scan again",
        shard=sealed.shard,
    )
