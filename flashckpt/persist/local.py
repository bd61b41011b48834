"""Stores persist_dir at a path: files are written under another name, fsynced and renamed, and the directory is
fsynced.

`latest` is a relative symlink.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.persist.names import LATEST, METADATA, damaged_name, deleting_name, step_name, temporary_name
from flashckpt.persist.storage import Entry, Stage
from flashckpt.store.rename import rename_exchange, rename_noreplace

if TYPE_CHECKING:
    from types import TracebackType

# Dirty pages are written to the disk in pieces of this size, so that the fsync at the end does not wait for all of
# them.
_WRITE_BEHIND_BYTES = 32 << 20


class LocalStorage:
    """Stores steps in one directory, of this machine or mounted by all nodes."""

    def __init__(self, persist_dir: str) -> None:
        if not os.path.isabs(persist_dir):
            raise ConfigError(f"persist_dir: expected an absolute path or a URL, found {persist_dir!r}")
        self.root = persist_dir

    def stage(self, step: int, attempt: str) -> Stage:
        place = temporary_name(step, attempt)
        os.makedirs(self.root, exist_ok=True)
        os.makedirs(self._path(place), exist_ok=True)
        _sync_directory(self.root)
        return Stage(place, "")

    def open_write(self, name: str) -> _File:
        return _File(self._path(name))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes | None:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size - offset if length is None else length
                return _read_all(file.fileno(), offset, max(0, left))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, name: str = "") -> dict[str, Entry] | None:
        try:
            found = {}
            with os.scandir(self._path(name)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        directory = stat.S_ISDIR(status.st_mode)
                        found[entry.name] = Entry(status.st_size, directory, status.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def commit(self, stage: Stage, step: int, marker: bytes) -> None:
        with self.open_write(f"{stage.place}/{METADATA}") as file:
            file.write(marker)
        _sync_directory(self._path(stage.place))
        failpoint("before_persist_rename")
        final = step_name(step)
        try:
            rename_noreplace(self._path(stage.place), self._path(final), source_fd=-100, target_fd=-100)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # A step is written again after a rollback. The exchange is atomic, because `latest` may point to it.
            rename_exchange(self._path(stage.place), self._path(final))
            _sync_directory(self.root)
            # The step is complete: the next flush removes what may be left of the old one.
            with contextlib.suppress(OSError):
                self.remove(stage.place)
        _sync_directory(self.root)
        failpoint("after_persist_rename")

    def put(self, name: str, content: bytes) -> None:
        os.makedirs(self.root, exist_ok=True)
        aside = f"{name}.tmp-{secrets.token_hex(8)}"
        try:
            with self.open_write(aside) as file:
                file.write(content)
            os.replace(self._path(aside), self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._path(aside))
            raise
        _sync_directory(os.path.dirname(self._path(name)))

    def point_latest(self, name: str) -> None:
        if self.latest() == name:
            return
        aside = self._path(f"{LATEST}.tmp-{secrets.token_hex(8)}")
        os.symlink(name, aside)
        try:
            failpoint("before_latest")
            os.replace(aside, self._path(LATEST))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        _sync_directory(self.root)

    def latest(self) -> str | None:
        try:
            return os.readlink(self._path(LATEST))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise UnsafeDirectoryError(
                f"{self._path(LATEST)}: expected a symbolic link, found something else",
                hint="remove or rename it: flashckpt keeps the name of the newest step there",
            ) from error

    def set_aside(self, name: str) -> str:
        aside = damaged_name(name, secrets.token_hex(4))
        os.rename(self._path(name), self._path(aside))
        _sync_directory(self.root)
        return aside

    def remove(self, name: str) -> None:
        path = self._path(name)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                return
            # The marker goes first: nobody may begin to read a step that is half deleted.
            doomed = path if ".deleting-" in name else self._path(deleting_name(name, secrets.token_hex(8)))
            if doomed != path:
                os.rename(path, doomed)
                _sync_directory(self.root)
        except FileNotFoundError:
            return  # another process was quicker
        failpoint("mid_delete")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root


class _File:
    """Writes one file in order. The file is durable once it is closed."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o644)
        self._written = self._flushed = 0

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        while view:
            count = os.write(self._fd, view)
            self._written += count
            view = view[count:]
        if self._written - self._flushed >= _WRITE_BEHIND_BYTES:
            _start_writing(self._fd, self._flushed, self._written - self._flushed)
            self._flushed = self._written
        return total

    def close(self) -> None:
        if self._fd >= 0:
            try:
                os.fsync(self._fd)
                # Its pages would displace those that training uses.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def __enter__(self) -> _File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _read_all(fd: int, offset: int, length: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(fd, min(length, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # some network filesystems cannot fsync directories; there renames are synchronous
            raise
    finally:
        os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def _start_writing(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing. Not every system can; the fsync at the end is what counts."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)
