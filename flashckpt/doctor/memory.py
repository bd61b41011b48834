"""Checks the memory directory: its kind, who may write there, and how much fits."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashckpt.doctor.finding import Finding, fail, ok, warn
from flashckpt.store.mounts import find_mount, huge_page_bytes
from flashckpt.store.room import Room, RoomReader, check_room, describe, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY_TYPES = ("tmpfs", "ramfs", "hugetlbfs")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Holds facts about the directory. `problem` says why it cannot be examined; then nothing else is known."""

    path: str
    problem: str = ""
    exists: bool = True  # False: the facts are of its nearest existing parent
    uid: int = 0
    mode: int = 0o700
    may_create: bool = True  # in the parent, if the directory does not exist
    fs_type: str = "tmpfs"
    mount_point: str = ""
    options: tuple[str, ...] = ()
    huge_page_bytes: int = 0
    room: Room | None = None
    held_bytes: int = 0  # of the job's slots
    swap_total_bytes: int = 0
    euid: int = 0
    removes_ipc: bool = False  # systemd-logind clears /dev/shm when this user's last session ends


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """Says what has to fit: the state of all ranks of this node together, and how many copies of it are kept."""

    size_bytes: int | None = None
    replicas: int = 1
    keep_memory: int = 1
    persists: bool = False

    @property
    def copies(self) -> int:
        """Return how many copies of the state are here at most: slots of the node's own ranks, and as many replicas of
        others.
        """
        own = self.keep_memory + 1 + self.persists  # what is being flushed stays while newer ones are written
        return own * (1 + self.replicas)


def look_at_memory(
    path: str, *, held_bytes: int = 0, proc: Path = Path("/proc"), logind: Path = Path("/etc/systemd")
) -> MemoryFacts:
    """Collect the facts. Creates nothing. `held_bytes` is the size of the job's existing slots."""
    place = Path(path)
    try:
        exists = os.path.lexists(place)
        while not os.path.lexists(place):
            place = place.parent
        fd = os.open(place, _DIRECTORY_FLAGS)
    except OSError as error:
        return MemoryFacts(path, problem=f"{place}: {error.strerror}")
    try:
        mount, found = find_mount(fd), os.fstat(fd)
        if mount is None:
            return MemoryFacts(path, problem=f"{place}: not on any mount that this process sees")
        return MemoryFacts(
            path=path,
            exists=exists,
            uid=found.st_uid,
            mode=stat.S_IMODE(found.st_mode),
            may_create=os.access(place, os.W_OK | os.X_OK),
            fs_type=mount.fs_type,
            mount_point=mount.mount_point,
            options=mount.options,
            huge_page_bytes=huge_page_bytes(mount, fd),
            room=RoomReader(fd, mount, proc=proc)(),
            held_bytes=held_bytes,
            swap_total_bytes=_swap_total(proc),
            euid=os.geteuid(),
            removes_ipc=_removes_ipc(logind),
        )
    except OSError as error:
        return MemoryFacts(path, problem=f"{place}: {error.strerror}")
    finally:
        os.close(fd)


def judge_memory(facts: MemoryFacts, wish: MemoryWish) -> Iterator[Finding]:
    if facts.problem:
        yield fail("memory.directory", facts.problem, "set FLASHCKPT_MEMORY_DIR to a directory on a tmpfs")
        return
    yield _kind(facts)
    yield _access(facts)
    if facts.fs_type == "tmpfs":
        yield _huge_pages(facts)
        yield _swap(facts)
    if facts.room is not None:
        yield _room(facts.room, facts.held_bytes, wish)
        yield _cgroup(facts.room)
    yield _cleaner(facts)


def _kind(facts: MemoryFacts) -> Finding:
    where = f"{facts.path} is on {facts.fs_type} at {facts.mount_point}"
    if facts.fs_type in _MEMORY_TYPES:
        return ok("memory.directory", where)
    return fail("memory.directory", where, f"expected one of {', '.join(_MEMORY_TYPES)}: set FLASHCKPT_MEMORY_DIR")


def _access(facts: MemoryFacts) -> Finding:
    if not facts.exists:
        if facts.may_create:
            return ok("memory.access", f"{facts.path} is not there yet; this user may make it")
        return fail("memory.access", f"{facts.path} is not there and this user may not make it", "mkdir -m 0700, chown")
    if facts.uid != facts.euid:
        return fail(
            "memory.access",
            f"{facts.path} belongs to uid {facts.uid}, this is uid {facts.euid}",
            "use a directory of your own, or chown it once you know what it is",
        )
    if facts.mode & 0o077:
        return fail("memory.access", f"{facts.path} has mode {facts.mode:04o}", f"chmod 0700 {facts.path}")
    return ok("memory.access", f"uid {facts.uid}, mode {facts.mode:04o}")


def _huge_pages(facts: MemoryFacts) -> Finding:
    if facts.huge_page_bytes:
        return ok("memory.huge_pages", f"pages of {format_bytes(facts.huge_page_bytes)}")
    return warn(
        "memory.huge_pages",
        f"{facts.mount_point} is mounted without them: the first save of each slot is many times slower",
        f"mount a tmpfs with huge=always, or mount -o remount,huge=always {facts.mount_point}",
    )


def _swap(facts: MemoryFacts) -> Finding:
    if "noswap" in facts.options or not facts.swap_total_bytes:
        why = "noswap" if "noswap" in facts.options else "this machine has no swap"
        return ok("memory.swap", f"checkpoints stay in memory: {why}")
    return warn(
        "memory.swap",
        f"{format_bytes(facts.swap_total_bytes)} of swap: checkpoints may be swapped out, and loads wait for the disk",
        "mount the tmpfs with noswap (Linux 6.4), or set vm.swappiness low",
    )


def _room(room: Room, held: int, wish: MemoryWish) -> Finding:
    if wish.size_bytes is None:
        fits = describe(0, room).removeprefix("needs 0 B, ")
        return warn("memory.room", fits, f"pass --size to see whether {wish.copies} times your state fits")
    need = max(0, wish.size_bytes * wish.copies - held)
    reason = check_room(need, room, new_files=wish.copies)
    how = f"keep_memory {wish.keep_memory}, replicas {wish.replicas}"
    budget = f"{wish.copies} times {format_bytes(wish.size_bytes)} ({how})"
    budget += f", {format_bytes(held)} of it are allocated" if held else ""
    if reason is None:
        return ok("memory.room", f"{budget}: {describe(need, room)}")
    advice = f"mount -o remount,size=… {room.mount_point}, a larger container, fewer replicas, or a smaller keep_memory"
    return fail("memory.room", f"{budget}: {reason}", advice)


def _cgroup(room: Room) -> Finding:
    if room.cgroup is None:
        return ok("memory.cgroup", "no memory limit above this process")
    one = room.cgroup
    found = f"{one.path}: {format_bytes(one.used_bytes)} of {format_bytes(one.limit_bytes)} used"
    if room.fs_total_bytes is not None and room.fs_total_bytes > one.limit_bytes:
        return warn(
            "memory.cgroup",
            f"{found}; the filesystem may hold {format_bytes(room.fs_total_bytes)}, more than the limit",
            "slots count into the limit of the container that the agent runs in: raise it by what memory.room needs",
        )
    return ok("memory.cgroup", found)


def _cleaner(facts: MemoryFacts) -> Finding:
    if facts.removes_ipc and facts.path.startswith("/dev/shm") and facts.euid >= 1000:
        return warn(
            "memory.cleaner",
            "systemd-logind removes this user's files in /dev/shm when the last session ends (RemoveIPC)",
            "set RemoveIPC=no in logind.conf, run trainers as a service, or use a mount of your own",
        )
    return ok("memory.cleaner", "nothing is known that would remove it")


def _swap_total(proc: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def _removes_ipc(logind: Path) -> bool:
    """Return True unless logind is configured otherwise: its default is yes. Without logind, nothing removes files."""
    files = [logind / "logind.conf", *sorted((logind / "logind.conf.d").glob("*.conf"))]
    if not Path("/run/systemd/seats").exists():
        return False
    chosen = "yes"
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in file.read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition("=")
                if key.strip() == "RemoveIPC":
                    chosen = value.strip().lower()
    return chosen in ("yes", "true", "1", "on")
