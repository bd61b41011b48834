"""Starts the agent's helper processes at the niceness that the agent itself was started with.

The agent is nice, and what a nice thread starts is at least as nice; only root may undo that. Niceness belongs to a
thread: this thread is started before the agent becomes nice, and starts the processes.
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
    """A thread that starts processes. Make it before the process becomes nice."""

    def __init__(self) -> None:
        self._worker = Worker("flashckpt-start-helper")
        self._worker.submit(lambda: None).wait(None)  # the thread runs, and has the niceness of this moment

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, with pipes for its input and its answers."""
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


# Lowers the priority of a helper process below the training's.
#
# Niceness alone has no effect where the kernel schedules by session (autogroups, the default of most distributions): a
# process in a session of its own then gets as much as the complete training, however nice it is. Its session has to be
# nice as well.


def be_nice_as_session(pid: int | str, niceness: int) -> None:
    """Make the session of that process ("self": of this one) nice. Only for a session that is ours alone.

    Nothing changes if the kernel has no such groups, or if control groups decide.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
        file.write(str(niceness))


def be_nice(pid: int, niceness: int) -> None:
    """Make a process with a single thread at least that nice."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(niceness, os.getpriority(os.PRIO_PROCESS, pid)))


def hurry(pid: int) -> bool:
    """Undo the niceness of all threads of a process and of its session. Return False if the kernel does not allow
    it."""
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
