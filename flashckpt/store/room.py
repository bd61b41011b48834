"""Tells how much memory there is, and allocates some of it without getting any process killed.

tmpfs pages are charged to the memory cgroup of the process that touches them first. At the cgroup's limit even
`posix_fallocate` ends in an OOM kill instead of ENOSPC, and the victim may be the trainer. So memory is allocated in
small steps with a check of the headroom before each, and a reserve is left for the others.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, NoSpaceError
from flashckpt.failpoints import failpoint
from flashckpt.store.mounts import Mount, read_mounts

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_BYTES = 16 << 20
# Used within four large steps of a limit. The smaller the step, the sooner it is noticed that others grow too.
SMALL_STEP_BYTES = 2 << 20
_RESERVE_BYTES = 32 << 20
_RESERVE_PERCENT = 2
_PROC = Path("/proc")
# v1 reports "no limit" as the largest multiple of a page; no machine has that much.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupRoom:
    """The memory cgroup above this process that has the least left."""

    path: str
    limit_bytes: int
    used_bytes: int  # without file cache that the kernel would drop first

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of an allocation. None = no such limit."""

    fs_type: str
    mount_point: str
    fs_total_bytes: int | None
    fs_free_bytes: int | None
    fs_free_inodes: int | None
    cgroup: CgroupRoom | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    budget_bytes: int | None = None
    budget_used_bytes: int = 0


class RoomReader:
    """Reads the room of one memory directory anew at each call: limits change while a job runs."""

    def __init__(
        self,
        fd: int,
        mount: Mount,
        *,
        budget_bytes: int | None = None,
        used_bytes: Callable[[], int] | None = None,
        proc: Path = _PROC,
    ) -> None:
        self._fd = fd
        self._mount = mount
        self._budget_bytes = budget_bytes
        self._used_bytes = used_bytes
        self._proc = proc

    def __call__(self) -> Room:
        fs = os.fstatvfs(self._fd)
        # A filesystem without a limit reports a total of 0.
        total = fs.f_blocks * fs.f_frsize if fs.f_blocks else None
        # Memory of hugetlbfs comes from a pool set aside at boot, which neither cgroup nor MemAvailable includes.
        pooled = self._mount.fs_type == "hugetlbfs"
        memory_total, memory_available = (None, None) if pooled else read_meminfo(self._proc)
        needs_sum = self._budget_bytes is not None and self._used_bytes is not None
        return Room(
            fs_type=self._mount.fs_type,
            mount_point=self._mount.mount_point,
            fs_total_bytes=total,
            fs_free_bytes=None if total is None else fs.f_bavail * fs.f_frsize,
            # hugetlbfs reports "no limit" as the largest number, which arrives here as -1.
            fs_free_inodes=fs.f_favail if fs.f_files > 0 else None,
            cgroup=None if pooled else read_cgroup(self._proc),
            memory_total_bytes=memory_total,
            memory_available_bytes=memory_available,
            budget_bytes=self._budget_bytes,
            budget_used_bytes=self._used_bytes() if needs_sum and self._used_bytes is not None else 0,
        )


def check_room(need_bytes: int, room: Room, *, new_files: int = 0) -> str | None:
    """Return why `need_bytes` more can't be allocated; None if they can. Pure."""
    missing = []
    if room.budget_bytes is not None and room.budget_used_bytes + need_bytes > room.budget_bytes:
        missing.append("the memory budget")
    if room.fs_free_bytes is not None and need_bytes > room.fs_free_bytes:
        missing.append(room.fs_type)
    if room.fs_free_inodes is not None and new_files > room.fs_free_inodes:
        missing.append(f"{room.fs_type} inodes")
    if room.cgroup is not None and need_bytes + _reserve(room.cgroup.limit_bytes) > room.cgroup.free_bytes:
        missing.append("the memory cgroup")
    if room.memory_available_bytes is not None:
        reserve = _reserve(room.memory_total_bytes or 0)
        if need_bytes + reserve > room.memory_available_bytes:
            missing.append("the machine's memory")
    if not missing:
        return None
    return f"{' and '.join(missing)} can't hold it: {describe(need_bytes, room)}"


def describe(need_bytes: int, room: Room) -> str:
    """Return the figures behind a decision, for people."""
    parts = [f"needs {format_bytes(need_bytes)}"]
    if room.fs_free_bytes is not None and room.fs_total_bytes is not None:
        parts.append(
            f"{room.fs_type} {room.mount_point} has {format_bytes(room.fs_free_bytes)} free "
            f"of {format_bytes(room.fs_total_bytes)}"
        )
    if room.fs_free_inodes is not None and room.fs_free_inodes < 64:
        parts.append(f"{room.fs_free_inodes} free inodes")
    if room.budget_bytes is not None:
        parts.append(f"budget {format_bytes(room.budget_bytes)} with {format_bytes(room.budget_used_bytes)} in slots")
    if room.cgroup is not None:
        parts.append(
            f"cgroup {room.cgroup.path} limit {format_bytes(room.cgroup.limit_bytes)} "
            f"with {format_bytes(room.cgroup.used_bytes)} in use and "
            f"{format_bytes(_reserve(room.cgroup.limit_bytes))} kept in reserve"
        )
    if room.memory_available_bytes is not None and room.memory_total_bytes is not None:
        parts.append(
            f"the machine has {format_bytes(room.memory_available_bytes)} available "
            f"of {format_bytes(room.memory_total_bytes)}"
        )
    return ", ".join(parts)


def no_space(need_bytes: int, room: Room, reason: str, path: str) -> NoSpaceError:
    return NoSpaceError(
        f"{path}: {reason}",
        hint=(
            f"set memory_dir= to a larger tmpfs or enlarge it (mount -o remount,size=… {room.mount_point}), "
            "raise the container's memory limit or the memory budget, or save less: "
            "nothing that was saved before has been given up"
        ),
        path=path,
        need_bytes=need_bytes,
        room=room,
    )


def raise_if_full(error: OSError, need_bytes: int, room_reader: Callable[[], Room], path: str) -> None:
    """Raise NoSpaceError with the figures, if the error is about space."""
    if isinstance(error, FlashError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return
    room = room_reader()
    raise no_space(need_bytes, room, f"{os.strerror(error.errno)}: {describe(need_bytes, room)}", path) from error


def allocate(
    fd: int,
    start: int,
    length: int,
    room_reader: Callable[[], Room],
    *,
    granule_bytes: int = 1 << 16,
    path: str = "slot",
    in_hole: bool = False,
) -> None:
    """Give the file real memory from `start` on, or raise NoSpaceError and leave it as large as it was.

    `in_hole`: there is none behind any of it yet, even if the file reaches further.
    """
    size_before = os.fstat(fd).st_size
    backed_bytes = 0 if in_hole else size_before
    end = start + length
    position = start
    try:
        while position < end:
            failpoint("before_allocate" if position == start else "mid_allocate")
            room = room_reader()
            # All that is still missing, not just the next step: an allocation that can't be finished is not begun.
            need = max(0, end - max(position, backed_bytes))
            reason = check_room(need, room)
            if reason is not None:
                raise no_space(need, room, reason, path)
            step = min(max(_step_bytes(room), granule_bytes), end - position)
            os.posix_fallocate(fd, position, step)
            position += step
        failpoint("after_allocate")
    except BaseException as error:
        # Holes that were filled stay filled; only what made the file longer is freed.
        if os.fstat(fd).st_size > size_before:
            os.ftruncate(fd, size_before)
        if isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.ENOMEM,
            errno.EFBIG,
            errno.EDQUOT,
        ):
            room = room_reader()
            need = end - min(max(backed_bytes, start), end)
            reason = f"{os.strerror(error.errno)}: {describe(need, room)}"
            raise no_space(need, room, reason, path) from error
        raise


def read_meminfo(proc: Path = _PROC) -> tuple[int | None, int | None]:
    """Return MemTotal and MemAvailable in bytes."""
    values: dict[str, int] = {}
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                values[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return values.get("MemTotal"), values.get("MemAvailable")


def read_cgroup(proc: Path = _PROC) -> CgroupRoom | None:
    """Return the memory cgroup with the least left: this process's or one of its visible ancestors."""
    try:
        memberships = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mounts = read_mounts(proc)
    except OSError:
        return None
    v1 = v2 = None
    for line in memberships:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            v1 = path
        elif hierarchy == "0" and not controllers:
            v2 = path
    # If v1 has the memory controller, v2 beside it has not.
    if v1 is not None:
        mount = next((m for m in mounts if m.fs_type == "cgroup" and "memory" in m.options), None)
        return None if mount is None else _tightest(mount, v1, _read_v1)
    mount = next((m for m in mounts if m.fs_type == "cgroup2"), None)
    return None if mount is None or v2 is None else _tightest(mount, v2, _read_v2)


def format_bytes(count: int) -> str:
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}".replace(".0 ", " ")


def _step_bytes(room: Room) -> int:
    headroom = []
    if room.cgroup is not None:
        headroom.append(room.cgroup.free_bytes - _reserve(room.cgroup.limit_bytes))
    if room.memory_available_bytes is not None:
        headroom.append(room.memory_available_bytes - _reserve(room.memory_total_bytes or 0))
    return STEP_BYTES if min(headroom, default=1 << 62) >= 4 * STEP_BYTES else SMALL_STEP_BYTES


def _reserve(limit_bytes: int) -> int:
    return max(_RESERVE_BYTES, limit_bytes * _RESERVE_PERCENT // 100)


def _tightest(mount: Mount, path: str, read: Callable[[Path], CgroupRoom | None]) -> CgroupRoom | None:
    top = Path(mount.mount_point)
    # In a container the mount shows a part of the tree, while the path may be relative to the host's root.
    inside = path
    if mount.root not in ("/", path) and path.startswith(mount.root + "/"):
        inside = path[len(mount.root) :]
    elif mount.root == path:
        inside = "/"
    here = top / inside.lstrip("/")
    if ".." in here.parts or not here.is_dir():
        here = top
    found = []
    for directory in (here, *here.parents):
        room = read(directory)
        if room is not None:
            found.append(room)
        if directory == top:
            break
    return min(found, key=lambda room: room.free_bytes, default=None)


def _read_v1(directory: Path) -> CgroupRoom | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    return _cgroup_room(directory, limit, used, "total_inactive_file")


def _read_v2(directory: Path) -> CgroupRoom | None:
    # Above memory.high no process is killed, but every allocation is slowed down until training stands still.
    limits = [_number(directory / "memory.max"), _number(directory / "memory.high")]
    limit = min((value for value in limits if value is not None), default=None)
    return _cgroup_room(directory, limit, _number(directory / "memory.current"), "inactive_file")


def _cgroup_room(directory: Path, limit: int | None, used: int | None, cache_key: str) -> CgroupRoom | None:
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    return CgroupRoom(str(directory), limit, max(0, used - _stat_value(directory / "memory.stat", cache_key)))


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stat_value(path: Path, key: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
