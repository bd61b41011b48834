"""Starts the agent's helper processes at the niceness that the agent itself was started with.

The agent is nice, and what a nice thread starts is at least as nice; only root may take that back. Niceness belongs to
a thread: this one is started before the agent becomes nice, and starts the processes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from flashckpt.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence


class Starter:
    """One thread. Make it before the process becomes nice."""

    def __init__(self) -> None:
        self._worker = Worker("flashckpt-start-helper")
        self._worker.submit(lambda: None).wait(None)  # the thread runs, and has the niceness of now

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, with pipes for what it is told and for what it answers."""
        started = self._worker.submit(lambda: _start(command))
        started.wait(None)
        return started.result()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,  # the agent's log
        cwd="/",
        start_new_session=True,
    )


# How a helper process steps back behind the training.
#
# Niceness alone does nothing where the kernel schedules by session (autogroups, the default of most distributions): a
# process in a session of its own then competes with the whole training as one to one, however nice it is. Its session
# has to be nice as well.


def be_nice_as_session(pid: int | str, niceness: int) -> None:
    """The session of that process ("self": of this one). Only for a session that is ours alone. Where the kernel knows
    no such groups, or control groups decide, nothing changes."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
        file.write(str(niceness))


def be_nice(pid: int, niceness: int) -> None:
    """Make a process that has one thread at least that nice."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(niceness, os.getpriority(os.PRIO_PROCESS, pid)))


def hurry(pid: int) -> bool:
    """Undo niceness, of all threads of a process and of its session. False: the kernel does not let this user."""
    be_nice_as_session(pid, 0)
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            if os.getpriority(os.PRIO_PROCESS, int(thread)) > 0:
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    except (ProcessLookupError, FileNotFoundError):
        return True  # it has ended
    except OSError:
        return False
    return True
