"""Every process below this one: found, killed and reaped, so that nothing of a run is ever left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from pathlib import Path

from flashckpt.errors import DeadlineError

_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT = 20.0


def adopt_orphans() -> None:
    """From now on a grandchild whose parent dies becomes our child, instead of being lost to init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first. Zombies count until they are reaped."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent_of(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    below = list(children.get(pid, ()))
    while below:
        found.append(one := below.pop(0))
        below += children.get(one, ())
    return found


def kill_descendants() -> int:
    """SIGKILL to every process below this one; returns how many there were once all of them are gone."""
    deadline = time.monotonic() + _KILL_TIMEOUT
    killed: set[int] = set()
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        for pid in pids:
            _reap(pid, deadline)
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"expected processes {pids} to end within {_KILL_TIMEOUT:.0f} s of SIGKILL, found them alive",
                hint="a process in uninterruptible sleep waits for a disk or the network",
            )
    return len(killed)


def _reap(pid: int, deadline: float) -> None:
    """Waits for a child of ours. One that is not yet ours will be in the next listing."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _parent_of(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces; the parent's pid is the second field behind it.
    return int(stat[stat.rfind(b")") + 1 :].split()[1])
