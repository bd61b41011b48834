"""Opens the memory directory, which is not trusted to be ours until it is proved.

`<memory_dir>/<job>/` lies in a place where other users may create, link and rename. So the directories are opened one
by one without following links, checked through the descriptor and then held: everything below is opened relative to a
held descriptor, and what happens to the path later can make a call fail, but can't make it read or write somewhere
else.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from flashckpt.errors import (
    ClosedError,
    ConfigError,
    FlashError,
    NoSpaceError,
    NotFoundError,
    UnsafeDirectoryError,
)
from flashckpt.store.default_place import own_place
from flashckpt.store.mounts import Mount, find_mount
from flashckpt.store.names import job_directory_name
from flashckpt.store.owner import read_boot_id
from flashckpt.store.rename import rename_exchange, rename_noreplace

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO under a slot's name must be refused, not waited for.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SlotState(enum.StrEnum):
    """The state of a slot, which is the folder of its file. Values are directory names."""

    POOL = "pool"  # free
    WRITING = "writing"  # being filled
    SEALED = "sealed"  # a shard
    QUARANTINE = "quarantine"  # a damaged shard, kept for inspection


class Private(enum.StrEnum):
    """Folders beside the slots, created when first needed. Values are directory names."""

    TLS = "tls"  # keys and certificates
    FETCHED = "fetched"  # parts of shards, for as long as a load needs them
    RESERVE = "reserve"  # small files created in advance


Place: TypeAlias = SlotState | Private | None  # None = the job's directory itself


@dataclass(frozen=True, slots=True)
class _Held:
    path: Path
    fd: int


class Directory:
    """The held descriptors of one job's memory directory, and the only way to its files."""

    _closed = True  # until __init__ has ended

    def __init__(self, base: _Held, job: _Held, states: dict[SlotState, _Held], mount: Mount, job_name: str) -> None:
        self.path = job.path
        self.job = job_name
        self.mount = mount
        self._base = base
        self._job = job
        self._states = states
        self._private: dict[Private, _Held] = {}
        self._opened_later: list[_Held] = []
        self._closed = False

    @property
    def fd(self) -> int:
        """The descriptor of the job's directory. It belongs to this object."""
        self._check_open()
        return self._job.fd

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for held in (*self._opened_later, *self._states.values(), self._job, self._base):
                os.close(held.fd)

    def __del__(self) -> None:
        self.close()  # if an exception kept the owner from closing it

    def check_still_ours(self) -> None:
        """Raise if the directory was meanwhile deleted, replaced, unmounted or opened to others.

        Writing would still be safe, but nobody would ever find what was written.
        """
        self._check_open()
        for held in (self._base, self._job, *self._states.values()):
            found = os.fstat(held.fd)
            if found.st_nlink == 0:
                raise _gone(held.path, "it was deleted while in use")
            _check_access(held.path, found)
            try:
                named = os.stat(held.path, follow_symlinks=False)
            except OSError as error:
                raise _gone(held.path, self._what_happened(held, error)) from error
            if (named.st_dev, named.st_ino) != (found.st_dev, found.st_ino):
                raise _gone(held.path, self._what_happened(held, None))

    def identity(self) -> str:
        found = os.fstat(self.fd)
        return f"{read_boot_id()}-{found.st_dev}-{found.st_ino}"

    def names(self, place: Place) -> list[str]:
        """Return the names of all entries. Raise NotFoundError if a private folder was not created yet."""
        # Each listing has a descriptor of its own: listings through one descriptor share its position, so that two at
        # once, in two threads or after a fork, would each see a part.
        fd = os.open(".", _DIRECTORY_FLAGS, dir_fd=self._fd(place))
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def stat(self, place: Place, name: str) -> os.stat_result | None:
        """Return the status of a file; None if there is no such file."""
        try:
            return os.stat(name, dir_fd=self._fd(place), follow_symlinks=False)
        except FileNotFoundError:
            return None

    def create_file(self, place: Place, name: str) -> int:
        """Return a new file's descriptor, for reading and writing. Raise OSError (ENOSPC) if inodes are used up."""
        return self._do(
            place,
            name,
            lambda fd: os.open(name, _FILE_FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd),
        )

    def open_file(self, place: Place, name: str, *, write: bool = False, create: bool = False) -> int:
        """Open a file. Raise FileNotFoundError if it is gone, UnsafeDirectoryError if it is not a plain file of
        ours."""
        path = self._path(place, name)
        access = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        try:
            fd = self._do(place, name, lambda fd: os.open(name, _FILE_FLAGS | access, 0o600, dir_fd=fd))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
                raise _refusal(path, "a plain file of our own", error.strerror, "remove it") from error
            raise
        try:
            check_file(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def move(self, place: Place, name: str, to: Place, new_name: str) -> bool:
        """Rename a file. Return False if another process was quicker. Never replaces: FileExistsError."""
        target_fd = self._fd(to)
        try:
            self._do(place, name, lambda fd: rename_noreplace(name, new_name, source_fd=fd, target_fd=target_fd))
        except FileNotFoundError:
            return False
        return True

    def replace(self, place: Place, name: str, new_name: str) -> None:
        """Rename within one folder. The target may exist."""
        self._do(place, name, lambda fd: os.rename(name, new_name, src_dir_fd=fd, dst_dir_fd=fd))

    def exchange(self, place: Place, name: str, other: str) -> None:
        """Swap two files of one folder in one step. Raise OSError if the filesystem can't."""
        self._do(place, name, lambda fd: rename_exchange(f"/proc/self/fd/{fd}/{name}", f"/proc/self/fd/{fd}/{other}"))

    def remove(self, place: Place, name: str) -> bool:
        """Remove a file. Return False if another process was quicker."""
        try:
            self._do(place, name, lambda fd: os.unlink(name, dir_fd=fd))
        except FileNotFoundError:
            return False
        return True

    def make_private(self, place: Private) -> None:
        """Make sure that the folder exists."""
        self._hold_private(place, create=True)

    def _hold_private(self, place: Private, *, create: bool) -> _Held:
        held = self._private.get(place)
        if held is not None and os.fstat(held.fd).st_nlink > 0:
            return held
        path = self._job.path / place
        opened: list[int] = []
        try:
            new = _Held(path, _open_one(self._job.fd, path, create, opened))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        # All stay open until close(): another thread may be about to use one of them.
        self._opened_later.append(new)
        self._private[place] = new
        return new

    def _folder(self, place: Place) -> _Held:
        self._check_open()
        if place is None:
            return self._job
        return self._states[place] if isinstance(place, SlotState) else self._hold_private(place, create=False)

    def _path(self, place: Place, name: str) -> Path:
        return self._folder(place).path / name

    def _fd(self, place: Place) -> int:
        return self._folder(place).fd

    def _do(self, place: Place, name: str, call: Callable[[int], _T]) -> _T:
        try:
            return call(self._fd(place))
        except OSError as error:
            if isinstance(error, FlashError):
                raise
            if error.errno == errno.EROFS:
                raise _read_only(self._path(place, name)) from error
            raise

    def _what_happened(self, held: _Held, error: OSError | None) -> str:
        if find_mount(held.fd) is None:
            return "its filesystem was unmounted while in use"
        if error is None:
            return "another directory lies there now"
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "it was moved away while in use"
        return f"its path can't be followed any more: {error.strerror}"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"memory directory {self.path}: used after close()")


def open_directory(path: str | os.PathLike[str], job: str, create: bool = True) -> Directory:
    """Open the memory directory of one job. Create it first, unless `create` is off.

    The parent of `path` has to exist; it is not checked.
    """
    base_path = _checked_path(path)
    job_path = base_path / job_directory_name(job)
    opened: list[int] = []
    try:
        try:
            parent = os.open(base_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"memory_dir {base_path}: expected its parent {base_path.parent} to be a directory, "
                f"found: {error.strerror}",
                hint="set memory_dir to a directory on a tmpfs, for example " + suggested_path(),
                path=str(base_path),
            ) from error
        opened.append(parent)
        base = _Held(base_path, _open_one(parent, base_path, create, opened))
        job_held = _Held(job_path, _open_one(base.fd, job_path, create, opened))
        states = {
            state: _Held(job_path / state, _open_one(job_held.fd, job_path / state, create, opened))
            for state in SlotState
        }
        mount = _memory_mount(job_held)
        if create and os.fstatvfs(job_held.fd).f_flag & os.ST_RDONLY:
            raise _read_only(job_path)
        directory = Directory(base, job_held, states, mount, job)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    os.close(parent)
    return directory


def check_file(path: Path, found: os.stat_result) -> None:
    """Raise unless it is a regular file, ours alone, under one name: a second name could be in another user's
    directory."""
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, "a regular file", _kind(found), "remove it")
    _check_access(path, found)
    if found.st_nlink > 1:
        raise _refusal(path, "a file under one name", f"{found.st_nlink} links", "remove it")


def suggested_path(refused: Path | None = None) -> str:
    """Return another directory than the refused one."""
    own = Path(own_place())
    return str(own) + ("-own" if refused is not None and own in (refused, *refused.parents) else "")


def _checked_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "\0" in text or not os.path.isabs(text) or ".." in Path(text).parts or len(Path(text).parts) < 2:
        raise ConfigError(
            f"memory_dir: expected an absolute path without '..', found {text!r}",
            hint="set memory_dir to a directory on a tmpfs, for example " + suggested_path(),
            path=text,
        )
    return Path(text)


def _open_one(parent_fd: int, path: Path, create: bool, opened: list[int]) -> int:
    """Open one component, and check it. An existing one is never repaired: its owner had a reason."""
    try:
        fd = _open_or_make(parent_fd, path, create)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"memory directory {path}: expected a directory, found none",
            hint="nothing was saved here yet, or memory_dir or job differ from what the trainers use",
            path=str(path),
        ) from error
    except OSError as error:
        if isinstance(error, FlashError):
            raise
        raise _not_opened(parent_fd, path, error) from error
    opened.append(fd)
    _check_access(path, os.fstat(fd))
    _memory_mount(_Held(path, fd))
    return fd


def _open_or_make(parent_fd: int, path: Path, create: bool) -> int:
    try:
        return os.open(path.name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        if not create:
            raise
    # Checked first, so that a wrong setting leaves no empty directory on a disk.
    _memory_mount(_Held(path, parent_fd))
    try:
        os.mkdir(path.name, 0o700, dir_fd=parent_fd)
    except FileExistsError:
        pass  # another rank was quicker
    except OSError as error:
        raise _not_made(path, error) from error
    return os.open(path.name, _DIRECTORY_FLAGS, dir_fd=parent_fd)


def _check_access(path: Path, found: os.stat_result) -> None:
    euid = os.geteuid()
    is_directory = stat.S_ISDIR(found.st_mode)
    if found.st_uid != euid:
        raise _refusal(
            path,
            f"owner uid {euid}",
            f"owned by uid {found.st_uid}",
            f"set memory_dir to a directory of your own, e.g. {suggested_path(path)}, or remove it",
        )
    needed = 0o700 if is_directory else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS or mode & needed != needed:
        raise _refusal(
            path,
            f"mode {needed:04o}, closed to group and others",
            f"mode {mode:04o}",
            f"set memory_dir to a directory of your own, e.g. {suggested_path(path)}, "
            f"or check what others left in it and then chmod {needed:04o}",
        )


def _memory_mount(held: _Held) -> Mount:
    mount = find_mount(held.fd)
    fs_type = "a filesystem that is not mounted" if mount is None else mount.fs_type
    if mount is None or fs_type not in MEMORY_FILESYSTEMS:
        raise _refusal(
            held.path,
            f"a filesystem in memory ({', '.join(MEMORY_FILESYSTEMS)})",
            fs_type,
            f"set memory_dir to a directory on a tmpfs, for example {suggested_path()}",
        )
    return mount


def _not_made(path: Path, error: OSError) -> FlashError:
    if error.errno == errno.EROFS:
        return _read_only(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            f"memory directory {path}: expected to create it, found: {error.strerror}",
            hint="its filesystem is out of space or inodes (df -i): clean it up, or set another memory_dir",
            path=str(path),
        )
    return ConfigError(
        f"memory directory {path}: expected to create it, found: {error.strerror}",
        hint=f"set memory_dir to a directory on a tmpfs, for example {suggested_path()}",
        path=str(path),
    )


def _not_opened(parent_fd: int, path: Path, error: OSError) -> FlashError:
    try:
        found = os.stat(path.name, dir_fd=parent_fd, follow_symlinks=False)
    except OSError:
        return _refusal(path, "a directory of our own", error.strerror, "remove it, or set another memory_dir")
    if not stat.S_ISDIR(found.st_mode):
        return _refusal(
            path,
            "a directory",
            f"{_kind(found)} of uid {found.st_uid}",
            f"remove it, or set memory_dir to a directory of your own, e.g. {suggested_path(path)}",
        )
    try:
        _check_access(path, found)
    except UnsafeDirectoryError as refusal:
        return refusal
    return _refusal(path, "a directory of our own", error.strerror, "remove it, or set another memory_dir")


def _read_only(path: Path) -> UnsafeDirectoryError:
    return _refusal(
        path, "a writable mount", "a read-only one", "remount it writable, or set memory_dir to another tmpfs"
    )


def _gone(path: Path, what: str) -> UnsafeDirectoryError:
    return UnsafeDirectoryError(
        f"memory directory {path}: expected the directory that was opened, found that {what}",
        hint="find out who removes it (a cleaner of /dev/shm, RemoveIPC= of systemd-logind, an operator), "
        "then restart the trainers of this node",
        path=str(path),
        found=what,
    )


def _refusal(path: Path, expected: str, found: str | None, hint: str) -> UnsafeDirectoryError:
    return UnsafeDirectoryError(
        f"{path}: expected {expected}, found {found}",
        hint=hint,
        path=str(path),
        expected=expected,
        found=found,
    )


def _kind(found: os.stat_result) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFREG: "a regular file",
    }
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")
