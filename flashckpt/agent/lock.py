"""Allows one agent per memory directory: a lock that ends with its process, and a note of who holds it.

The lock itself is an flock on `agent.lock`: the kernel drops it when the holder exits, however it does, and keeps it
while the holder is merely stopped. The file's text is for those who look: the pid with its start time, so that a dead
process's note is told from a live one's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt import __version__
from flashckpt.errors import ConflictError, InternalError, NoSpaceError
from flashckpt.store.owner import Owner, is_dead

if TYPE_CHECKING:
    from types import TracebackType

    from flashckpt.store.directory import Directory

LOCK_NAME = "agent.lock"
_MAX_NOTE_BYTES = 8192
_MAX_SECONDS = 1e11  # since 1970; beyond that a date can't be printed
_RETRY_SECONDS = 0.01
# A process that only looks may have to hold the lock for a moment; see holder().
_PATIENCE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock, according to its note."""

    owner: Owner
    version: str  # of flashckpt
    job: str
    started_at: float  # seconds since 1970, for people

    @property
    def pid(self) -> int:
        """The pid in the holder's own pid namespace."""
        return self.owner.pid

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at))
        return f"pid {self.pid}, started {began}, version {self.version}"


class AgentLock:
    """The lock of one job's memory directory. The caller owns the directory and keeps it open while this is used."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._fd: int | None = None

    def __enter__(self) -> AgentLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock until release() or this process's end. Raise ConflictError, naming the holder, if another has
        it."""
        if self._fd is not None:
            raise ConflictError(f"{self._path}: this process holds the agent's lock already")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._fd is None:
            fd = self._directory.open_file(None, LOCK_NAME, write=True, create=True)
            try:
                if self._try_lock(fd):
                    self._note_or_refuse(fd)
                    self._fd = fd
                    return
                held_by = _parse(_read(fd))
                if time.monotonic() > deadline or (held_by is not None and _lives_here(held_by.owner)):
                    raise self._refusal(held_by)
            finally:
                if self._fd is None:
                    os.close(fd)
            time.sleep(_RETRY_SECONDS)

    def release(self) -> None:
        """Release the lock. May be called twice. The file stays, without a note: removing it would race with the next
        holder."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"\n", 0)  # not cut to length 0: its page must be there for the next note
        os.close(self._fd)
        self._fd = None

    def is_in_force(self) -> bool:
        """Return False if the file was removed or replaced: another agent could then start beside this one."""
        if self._fd is None:
            raise InternalError(f"{self._path}: expected to hold the agent's lock, found that it was never taken")
        return self._names(self._fd)

    def holder(self) -> Holder | None:
        """Return the process that holds the lock now; None if none does. Does not take the lock."""
        try:
            fd = self._directory.open_file(None, LOCK_NAME)
        except FileNotFoundError:
            return None
        try:
            found = _parse(_read(fd))
            if found is None or is_dead(found.owner):
                return None
            if found.owner.pid_namespace == Owner.current().pid_namespace:
                return found
            # A process of another pid namespace can't be looked up: only the lock tells. A shared lock does not disturb
            # others who look, and acquire() waits long enough for it.
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return found
            return None
        finally:
            os.close(fd)

    @property
    def _path(self) -> str:
        return str(self._directory.path / LOCK_NAME)

    def _try_lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The file may have been removed between open and flock: that lock would exclude nobody.
        return self._names(fd)

    def _names(self, fd: int) -> bool:
        """Return True if the lock's name leads to this very file."""
        named, found = self._directory.stat(None, LOCK_NAME), os.fstat(fd)
        return named is not None and (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)

    def _note_or_refuse(self, fd: int) -> None:
        try:
            self._write_note(fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpaceError(
                f"{self._path}: expected room for a note of {_MAX_NOTE_BYTES >> 10} KiB, found {error.strerror}",
                hint="make room in the tmpfs, or enlarge it: mount -o remount,size=…",
            ) from error

    def _write_note(self, fd: int) -> None:
        owner = Owner.current()
        fields = {
            "pid": owner.pid,
            "start_ticks": owner.start_ticks,
            "boot_id": owner.boot_id8,
            "pid_namespace": owner.pid_namespace,
            "version": __version__,
            "job": self._directory.job,
            "started_at": time.time(),
        }
        note = json.dumps(fields).encode() + b"\n"
        if self._directory.mount.fs_type != "hugetlbfs":
            # Over the old note, in its page: the tmpfs may have no other one left. A reader rejects half a note.
            os.pwrite(fd, note, 0)
            os.ftruncate(fd, len(note))
            return
        os.ftruncate(fd, 0)
        # hugetlbfs has no write(), and the size of its files is a multiple of its page.
        page_bytes = os.fstatvfs(fd).f_bsize
        os.posix_fallocate(fd, 0, page_bytes)  # ENOSPC here, not a SIGBUS below
        with mmap.mmap(fd, page_bytes) as page:
            page[: len(note)] = note

    def _refusal(self, held_by: Holder | None) -> ConflictError:
        who = "a process that left no note of itself" if held_by is None else f"the agent with {held_by}"
        return ConflictError(
            f"{self._path}: expected no agent of job {self._directory.job!r}, found {who}",
            hint="use that one, or end it with `flashckpt agent stop`; one job has one agent on a node",
            pid=None if held_by is None else held_by.pid,
        )


def _lives_here(owner: Owner) -> bool:
    return owner.pid_namespace == Owner.current().pid_namespace and not is_dead(owner)


def _read(fd: int) -> bytes:
    return os.pread(fd, _MAX_NOTE_BYTES, 0)


def _parse(note: bytes) -> Holder | None:
    """Parse a note. None if it is not one that an agent has written completely."""
    line, newline, _ = note.partition(b"\n")
    try:
        fields = json.loads(line if newline else b"")
        owner = Owner(
            pid=int(fields["pid"]),
            start_ticks=int(fields["start_ticks"]),
            boot_id8=str(fields["boot_id"]),
            pid_namespace=int(fields["pid_namespace"]),
        )
        found = Holder(owner, str(fields["version"]), str(fields["job"]), float(fields["started_at"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    # A pid beyond the kernel's range would name something else than a process.
    in_range = 0 < owner.pid < 1 << 31 and 0 <= found.started_at < _MAX_SECONDS
    return found if in_range else None
