"""Tells which process wrote a slot last, and whether that process can still touch it.

Another writer may have a slot only once its last writer is known to have exited: a paused process may wake up and
continue to write through its mapping. Doubt therefore always means "alive".
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

from flashckpt.errors import ConfigError, FlashError, StorageError

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
_PROC = Path("/proc")
_NO_PROC = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)  # nothing is mounted there, or we may not read it
# The inode of the time namespace that every process starts in; the kernel fixes the number.
_INITIAL_TIME_NAMESPACE = 0xEFFFFFFA
# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), in its first, 64-byte form; the exit status comes last in it.
_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, distinguished from every other of this machine, before and after a reboot."""

    pid: int  # in its own pid namespace
    start_ticks: int  # clock ticks from boot to its start: another process with the same pid has others
    boot_id8: str  # the first 8 hex digits of the boot id
    pid_namespace: int  # inode number; see _namespace()

    @property
    def identity(self) -> str:
        """One word for the process that no other process, of any machine, has."""
        return f"{self.boot_id8}-{self.pid_namespace}-{self.pid}-{self.start_ticks}"

    @staticmethod
    def current() -> Owner:
        """Return this process. Nothing is cached: after a fork it is the child.

        Raise StorageError if a limit, as of open files, prevents the read; ConfigError if there is no /proc.
        """
        try:
            start_ticks = _read_start_ticks("self")
        except OSError as error:
            raise _unread("this process's start time in /proc/self/stat", error) from error
        if start_ticks is None:
            raise _unread("this process's start time in /proc/self/stat", "none")
        return Owner(os.getpid(), start_ticks, read_boot_id8(), _namespace())


def is_dead(owner: Owner) -> bool:
    """Return True only if the process is known to have exited, and all its mappings with it."""
    if owner.boot_id8 != read_boot_id8():
        return True
    if owner.pid_namespace != _namespace():
        return False  # its pid has no meaning here
    try:
        pidfd = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return True
    except OSError:
        # The number belongs to a thread now, or descriptors or permission are lacking.
        return _is_dead_without_pidfd(owner)
    try:
        if _has_exited(pidfd):
            return True
        start_ticks = _start_ticks(_pid_in_proc(pidfd))
        # Once more: the process may have exited while its files in /proc were read.
        return _has_exited(pidfd) or (start_ticks is not None and start_ticks != owner.start_ticks)
    finally:
        os.close(pidfd)


def is_ending(owner: Owner) -> bool:
    """Return True if the process is known to be ending: it exits, or a SIGKILL is pending."""
    if owner.boot_id8 != read_boot_id8() or owner.pid_namespace != _namespace():
        return False  # its pid has no meaning here
    if _start_ticks(str(owner.pid)) != owner.start_ticks:
        return False
    try:
        stat = (_PROC / str(owner.pid) / "stat").read_bytes()
        status = (_PROC / str(owner.pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = int(stat[stat.rfind(b")") + 1 :].split()[6])
    pending = [line.partition(":")[2] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(flags & _PF_EXITING) or any(int(mask, 16) & _SIGKILL_BIT for mask in pending)


class LivenessCheck:
    """Checks repeatedly whether one process is dead, through a descriptor of it: that makes it one system call."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._pidfd = _pidfd_of(owner)

    def is_dead(self) -> bool:
        return is_dead(self._owner) if self._pidfd is None else _has_exited(self._pidfd)

    def exit_code(self) -> int | None:
        """Return how a dead process ended: its exit code, or minus the signal's number. None: not known."""
        if self._pidfd is None:
            return None
        status = _status_of_zombie(self._pidfd)
        if status is None:
            status = _status_of_reaped(self._pidfd)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _pidfd_of(owner: Owner) -> int | None:
    """Return a descriptor of the process; None if it can't be opened, or there is any doubt whose it is."""
    if owner.boot_id8 != read_boot_id8() or owner.pid_namespace != _namespace():
        return None
    try:
        pidfd = os.pidfd_open(owner.pid)
    except OSError:
        return None
    # The number can't become another process's any more: what is read from now on is true of the descriptor.
    if _start_ticks(_pid_in_proc(pidfd)) == owner.start_ticks and not _has_exited(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def _status_of_zombie(pidfd: int) -> int | None:
    """Return the wait status from /proc, which has it until the parent has asked for it."""
    try:
        stat = (_PROC / _pid_in_proc(pidfd) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()
    return int(fields[49]) if len(fields) > 49 and fields[0] == b"Z" else None


def _status_of_reaped(pidfd: int) -> int | None:
    """Return the wait status from the descriptor itself: Linux 6.15 and newer."""
    answer = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("<Q", answer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    known: int = struct.unpack_from("<Q", answer, 0)[0]
    status: int = struct.unpack_from("<i", answer, _PIDFD_INFO_BYTES - 4)[0]
    return status if known & _PIDFD_INFO_EXIT else None


def read_boot_id8() -> str:
    return read_boot_id()[:8]


def read_boot_id() -> str:
    """Return 32 hex digits. Read at each call: a restored container sees another machine's. Raises as Owner.current()
    does."""
    try:
        text = BOOT_ID_PATH.read_text(encoding="ascii").strip().replace("-", "")
        int(text, 16)
    except (OSError, ValueError) as error:
        raise _unread(f"a boot id in {BOOT_ID_PATH}", error) from error
    return text.lower()


def _unread(what: str, found: Exception | str) -> FlashError:
    """Return the error for a file of /proc that could not be read or has no such value."""
    message = f"expected {what}, found {found}"
    if isinstance(found, OSError) and found.errno not in _NO_PROC:
        return StorageError(message)  # may pass, like a lack of descriptors
    return ConfigError(message, hint="mount proc at /proc: flashckpt tells live writers from dead ones with it")


def _is_dead_without_pidfd(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    if os.readlink(_PROC / "self") != str(os.getpid()):
        return False  # /proc is of another pid namespace: this pid is another process's there
    start_ticks = _start_ticks(str(owner.pid))
    return start_ticks is not None and start_ticks != owner.start_ticks


def _namespace() -> int:
    """Return a number of the space in which pids and start times can be compared.

    Usually the inode of the pid namespace. A time namespace shifts start times, so that a live process in another one
    looks like a reused pid: it is part of the number, so that the comparison means "can't know" as well.
    """
    pid_namespace = (_PROC / "self/ns/pid").stat().st_ino
    try:
        time_namespace = (_PROC / "self/ns/time").stat().st_ino
    except FileNotFoundError:
        return pid_namespace
    return pid_namespace ^ time_namespace ^ _INITIAL_TIME_NAMESPACE


def _has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def find_from_outside(owner: Owner) -> int | None:
    """Return the pid, as this process counts, of one in a pid namespace below this one; None if it can't be seen.

    A host sees the processes of its containers; a container sees neither its host's nor another container's.
    """
    if owner.boot_id8 != read_boot_id8():
        return None
    for entry in os.listdir(_PROC):
        if entry.isdecimal() and _is_inner_pid(entry, owner.pid) and _start_ticks(entry) == owner.start_ticks:
            return int(entry)
    return None


def _is_inner_pid(pid: str, inner: int) -> bool:
    """Return True if the process is in a pid namespace of its own, where it has that other pid."""
    try:
        lines = (_PROC / pid / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    pids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return len(pids) > 1 and pids[-1] == str(inner)


def _pid_in_proc(pidfd: int) -> str:
    # /proc may be mounted from another pid namespace; the descriptor's fdinfo counts as /proc does.
    for line in (_PROC / f"self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "Pid":
            return value.strip()
    return "-1"


def _start_ticks(pid: str) -> int | None:
    try:
        return _read_start_ticks(pid)
    except OSError:
        return None


def _read_start_ticks(pid: str) -> int | None:
    stat = (_PROC / pid / "stat").read_bytes()
    # The name in parentheses may contain spaces and parentheses; field 22 is counted from the last parenthesis.
    fields = stat[stat.rfind(b")") + 1 :].split()
    return int(fields[19]) if len(fields) > 19 else None
