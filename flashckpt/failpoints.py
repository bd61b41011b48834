"""Named places on the data path where a test can kill, fail or delay the process.

`FLASHCKPT_FAILPOINTS='before_seal=kill;after_copy=sleep(0.5);before_rename=error(ENOSPC)*1@3'`: an action,
`*N` at most N times, `@K` from the K-th pass on. `error` names an errno, RuntimeError, MemoryError or ValueError.
Off unless `FLASHCKPT_TESTING=1`. What fired is appended to the file `FLASHCKPT_FAILPOINTS_LOG`, so that a test can
prove that its fault took place.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Exceptions beside OSError that `error` can name.
_OTHER = {one.__name__: one for one in (RuntimeError, MemoryError, ValueError)}

_SPEC = re.compile(r"(\w+)=(kill|stop|sleep|error)(?:\((\w[\w.]*)\))?(?:\*(\d+))?(?:@(\d+))?")


@dataclass
class _Armed:
    action: str
    argument: str
    remaining: int
    first_pass: int
    passes: int = 0


def parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for part in filter(None, text.split(";")):
        match = _SPEC.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"failpoint {part!r}: expected name=kill|stop|sleep(s)|error(ERRNO)[*N][@K]")
        name, action, argument, times, first = match.groups()
        armed[name] = _Armed(action, argument or "", int(times or 1 << 30), int(first or 1))
    return armed


_armed: dict[str, _Armed] = {}


def is_testing(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns True if features for tests only are on."""
    return environ.get("FLASHCKPT_TESTING") == "1"


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arms the failpoints that the environment names. Called once at import, and again by a test's child after its
    fork."""
    _armed.clear()
    if is_testing(environ):
        _armed.update(parse(environ.get("FLASHCKPT_FAILPOINTS", "")))


arm()


def failpoint(name: str) -> None:
    """Takes the action of failpoint `name`, if it is armed."""
    if _armed and name in _armed:
        _fire(name, _armed[name])


def _fire(name: str, armed: _Armed) -> None:
    armed.passes += 1
    if armed.passes < armed.first_pass or armed.remaining == 0:
        return
    armed.remaining -= 1
    log = os.environ.get("FLASHCKPT_FAILPOINTS_LOG")
    if log:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(fd, f"{name} {os.getpid()}\n".encode())
        os.close(fd)
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "stop":
        # IMPORTANT: stop this thread. If the signal is sent to the process, this thread may go on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif armed.action == "sleep":
        time.sleep(float(armed.argument))
    else:
        number = getattr(errno, armed.argument, None)
        if number is None:
            raise _OTHER[armed.argument](f"failpoint {name}")
        raise OSError(number, os.strerror(number), f"failpoint {name}")
