"""Reads and writes the small files beside the slots: lines, marks, session, records, secrets. Checks who uses a
store."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING

from flashckpt.errors import ClosedError, ConflictError, NoSpaceError
from flashckpt.store import lines, losses, persisted, records, reserve, secret_files, session, voids
from flashckpt.store.names import check_plain_name
from flashckpt.store.owner import Owner
from flashckpt.store.room import raise_if_full

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashckpt.protocol.line import Line
    from flashckpt.store.directory import Directory
    from flashckpt.store.room import RoomReader
    from flashckpt.types import Generation, Launch, Loss, Record

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# A child in a new pid namespace can have its parent's pid, so that comparing pids is not enough.
os.register_at_fork(after_in_child=_count_fork)


class JobFiles:
    """One process's access to the job's directory itself; SlotStore adds what lies below it."""

    def __init__(self, directory: Directory, room: RoomReader) -> None:
        self.path = directory.path
        self._directory = directory
        self._room = room
        self._owner = Owner.current()
        self._process = (os.getpid(), _forks)
        self._closed = False

    # -- line and marks ----------------------------------------------------------------------------------

    def read_line(self) -> Line | None:
        """Return the line in force."""
        self._check_usable()
        return lines.read_line(self._directory)

    def read_lines(self) -> tuple[Line, ...]:
        """Return the lines of the launches of which something is left here; the line in force last."""
        self._check_usable()
        return lines.read_lines(self._directory)

    def damaged_lines(self) -> tuple[str, ...]:
        """Return the names of files whose lines can't be trusted."""
        self._check_usable()
        return lines.read_damaged(self._directory)

    def write_line(self, new: Line) -> Line:
        """Adopts the line if it is newer (see lines.py); returns the one in force."""
        with self._writing_small():
            return lines.write_line(self._directory, new, self._owner)

    def mark_void(self, generation: Generation) -> None:
        """Tell the other processes here that this one will not complete the generation."""
        self._check_usable()
        voids.mark_void(self._directory, generation, self._owner)

    def voids(self) -> frozenset[Generation]:
        """Return the generations that some rank will not complete."""
        self._check_usable()
        return voids.read_voids(self._directory)

    def read_losses(self) -> tuple[Loss, ...]:
        """Return the generations that could not be loaded at the last check, because shards were missing on all
        nodes."""
        self._check_usable()
        return losses.read_losses(self._directory)

    def write_losses(self, found: Iterable[Loss]) -> None:
        """Replace that list."""
        with self._writing_small():
            losses.write_losses(self._directory, found, self._owner)

    # -- what an agent keeps for its successor ------------------------------------------------------------

    def read_session(self) -> bytes | None:
        """Return the session; None if there is none, or none that can be trusted."""
        self._check_usable()
        return session.read_session(self._directory)

    def write_session(self, payload: bytes) -> None:
        with self._writing_small(len(payload)):
            session.write_session(self._directory, payload, self._owner)

    def read_past_sessions(self) -> tuple[tuple[Launch, bytes], ...]:
        """Return the sessions of earlier launches, newest last."""
        self._check_usable()
        return session.read_past(self._directory)

    def write_past_session(self, launch: Launch, payload: bytes) -> None:
        """Keep the session of an earlier launch, and the newest four in all."""
        with self._writing_small(len(payload)):
            session.write_past(self._directory, launch, payload, self._owner)

    def remove_past_session(self, launch: Launch) -> bool:
        self._check_usable()
        return session.remove_past(self._directory, launch)

    def read_persisted(self) -> tuple[str, Generation] | None:
        """Return (persist_dir, generation) of the newest step known to be there; None if none is known."""
        self._check_usable()
        return persisted.read_persisted(self._directory)

    def write_persisted(self, persist_dir: str, generation: Generation) -> None:
        with self._writing_small():
            persisted.write_persisted(self._directory, persist_dir, generation, self._owner)

    def forget_persisted(self) -> bool:
        """Forget the newest persisted step. Return False if there was none."""
        self._check_usable()
        return persisted.forget_persisted(self._directory)

    def write_record(self, record: Record) -> None:
        """Keep the record, and the newest four in all; those that the line abandons are removed first."""
        with self._writing_small():
            records.write_record(self._directory, record, self._owner)

    def read_records(self) -> tuple[Record, ...]:
        """Return the records, newest launch and generation first. One that can't be trusted is left out and logged."""
        self._check_usable()
        return records.read_records(self._directory)

    def drop_records(self, older_than: Generation) -> int:
        """Remove the records of earlier launches, and of earlier generations of that launch. Return how many."""
        self._check_usable()
        return records.drop_records(self._directory, older_than)

    def write_secret(self, name: str, content: bytes) -> None:
        with self._writing_small(len(content)):
            secret_files.write_secret(self._directory, name, content, self._owner)

    def read_secret(self, name: str) -> bytes | None:
        """Return a secret; None if there is none. Raise UnsafeDirectoryError if it was open to others."""
        self._check_usable()
        return secret_files.read_secret(self._directory, name)

    def remove_secret(self, name: str) -> bool:
        self._check_usable()
        return secret_files.remove_secret(self._directory, name)

    # -- room for them ------------------------------------------------------------------------------------

    def fill_reserve(self) -> str:
        """Create the files that are used when there is no room. Return why that is not possible; "" = they are
        there."""
        self._check_usable()
        try:
            return reserve.fill_reserve(self._directory, self._room())
        except NoSpaceError as error:
            return error.message
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            return str(error)

    def give_up_spare(self) -> bool:
        """Free an inode of the reserve. Return False if there is none."""
        self._check_usable()
        return reserve.give_up_spare(self._directory)

    # -- where processes meet -----------------------------------------------------------------------------

    @property
    def job_dirfd(self) -> int:
        """The descriptor of the job's directory; it belongs to the store."""
        self._check_usable()
        return self._directory.fd

    def socket_path(self, name: str) -> str:
        """Return a path to bind or connect in this process while the store is open.

        It leads through the held descriptor: nobody can replace the directory under it, and it is always short enough
        for a socket's address, which holds 107 bytes.
        """
        return f"/proc/self/fd/{self.job_dirfd}/{check_plain_name(name)}"

    # -- inside -------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"slot store {self.path}: used after close()")
        if not self._is_our_process():
            raise ConflictError(
                f"slot store {self.path}: opened by process {self._process[0]}, used by its fork {os.getpid()}",
                hint="a fork must not write into its parent's slots: open a store of its own in the child",
            )

    def _is_our_process(self) -> bool:
        return self._process == (os.getpid(), _forks)

    @contextlib.contextmanager
    def _writing_small(self, size_bytes: int = mmap.PAGESIZE) -> Iterator[None]:
        self._check_usable()
        self._directory.check_still_ours()
        try:
            yield
        except OSError as error:
            raise_if_full(error, size_bytes, self._room, str(self.path))
            raise
