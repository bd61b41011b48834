"""Finds and ends processes that have no parent: agents detach themselves, launchers leave orphans.

A process belongs to a node if its environment or an option names the node's memory directory, or if it is in the
node's network namespace. Pids are only used together with a pidfd or a fresh look, never remembered.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashckpt.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PROC = Path("/proc")
KILL_TIMEOUT = 20.0
_VARIABLE, _OPTION = b"FLASHCKPT_MEMORY_DIR", b"--memory-dir"


@dataclass(frozen=True, slots=True)
class Seen:
    """Describes one process at one moment. What may not be read is empty."""

    pid: int
    parent: int
    environment: frozenset[bytes]  # NAME=value
    arguments: tuple[bytes, ...]
    network: int  # inode of its network namespace, 0 if it may not be read

    def names(self, path: str) -> bool:
        """Return True if its memory directory is `path`, or below it."""
        raw = os.fsencode(path)
        return any(place == raw or place.startswith(raw + b"/") for place in self._memory_dirs())

    def _memory_dirs(self) -> Iterator[bytes]:
        for name, value in (one.split(b"=", 1) for one in (*self.environment, *self.arguments) if b"=" in one):
            if name in (_VARIABLE, _OPTION):
                yield value
        for option, value in itertools.pairwise(self.arguments):
            if option == _OPTION:
                yield value


def look() -> Iterator[Seen]:
    """List all processes that we may signal, without this one, its ancestors and zombies."""
    spared = set(_ancestors())
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) not in spared and (seen := _see(entry)) is not None:
            yield seen


def kill_all(find: Callable[[], Iterable[int]], what: str) -> int:
    """Send SIGKILL to all that `find` returns, again and again until it finds none. Returns how many there were."""
    deadline = time.monotonic() + KILL_TIMEOUT
    killed: set[int] = set()
    while pids := list(find()):
        for pid in pids:
            signal_to(pid, signal.SIGKILL)
        killed.update(pids)
        for pid in pids:
            wait_gone(pid, deadline)
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{what}: expected processes {pids} to end within {KILL_TIMEOUT:.0f} s of SIGKILL, found them alive",
                hint="a process in uninterruptible sleep waits for a disk or the network",
            )
    return len(killed)


def signal_to(pid: int, number: signal.Signals) -> None:
    """Send a signal. Does nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(pid: int, deadline: float) -> None:
    """Wait until it has exited; a zombie has. A child of ours that nobody else waits for is reaped by its Popen."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(pidfd)


def wait_stopped(pids: Iterable[int], timeout: float) -> None:
    """Wait until each has stopped after SIGSTOP, or exited: before that it may still run for a moment."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        while (state := state_of(pid)) not in ("T", "t", "Z", "X", ""):
            if time.monotonic() > deadline:
                raise DeadlineError(f"process {pid}: expected it to stop within {timeout} s, found state {state}")
            time.sleep(0.001)


def state_of(pid: int) -> str:
    """Return the letter of /proc/<pid>/stat; "" if the process is gone."""
    fields = _stat(_PROC / str(pid))
    return fields[0].decode() if fields else ""


def _see(entry: Path) -> Seen | None:
    fields = _stat(entry)
    if not fields or fields[0] in (b"Z", b"X") or not _may_signal(int(entry.name)):
        return None
    return Seen(
        pid=int(entry.name),
        parent=int(fields[1]),
        environment=frozenset(_read(entry / "environ").split(b"\0")),
        arguments=tuple(_read(entry / "cmdline").split(b"\0")),
        network=network_of(int(entry.name)),
    )


def _may_signal(pid: int) -> bool:
    # Not by the owner of its files: those of an agent, which nobody may trace, belong to root.
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def network_of(pid: int | str) -> int:
    try:
        return (_PROC / str(pid) / "ns/net").stat().st_ino
    except OSError:
        return 0


def _ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        fields = _stat(_PROC / str(pid))
        pid = int(fields[1]) if fields else 0


def _stat(entry: Path) -> list[bytes]:
    """Return state, parent and so on; empty if the process is gone."""
    stat = _read(entry / "stat")
    # The name in parentheses may hold spaces and parentheses.
    return stat[stat.rfind(b")") + 1 :].split() if stat else []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
