"""A directory on tmpfs that is gone afterwards, also after an error, Ctrl-C or SIGTERM.

A run that was killed outright leaves its directory; the next one removes it. The name says whose it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.agents import end_agents
from bench.errors import BenchError
from bench.huge import unmount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

TMPFS = Path("/dev/shm")
_ELSEWHERE = (Path("/tmp/ckpt_sock"),)  # DLRover's sockets
_NAME = re.compile(r"flashckpt-bench\.(\d+)\.(\d+)")


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    _remove_left_behind()
    path = TMPFS / f"flashckpt-bench.{os.getpid()}.{_start_time(os.getpid())}"
    path.mkdir(mode=0o700)
    # SIGTERM and SIGHUP would otherwise end us without leaving this block.
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield path
    finally:
        # A second Ctrl-C must not cut the cleaning short.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_agents(path)
        _remove_all_of(path.name)
        for number, handler in ((signal.SIGINT, interrupt), *before.items()):
            signal.signal(number, handler)


def check_room(need_bytes: int) -> None:
    """Raises BenchError where the machine can't hold it: a swapping or killed run measures nothing."""
    free_tmpfs = shutil.disk_usage(TMPFS).free
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    if need_bytes > min(free_tmpfs, available):
        raise BenchError(
            f"memory: expected {need_bytes / 1e9:.1f} GB for states and checkpoints, found {available / 1e9:.1f} GB "
            f"available and {free_tmpfs / 1e9:.1f} GB free in {TMPFS}; take a smaller --size"
        )


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _remove_left_behind() -> None:
    for path in TMPFS.glob("flashckpt-bench.*"):
        match = _NAME.match(path.name)
        if match is not None and _start_time(int(match[1])) != int(match[2]):
            _remove_all_of(match[0])


def _remove_all_of(name: str) -> None:
    """The directory of that run, and what libraries that put things elsewhere named after it."""
    for place in (TMPFS, *_ELSEWHERE):
        for path in (place / name, *place.glob(f"{name}_*")):
            if path.is_dir():
                for mounted in filter(os.path.ismount, path.glob("*/")):
                    with contextlib.suppress(BenchError):
                        unmount(mounted)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _start_time(pid: int) -> int | None:
    """Tells a process from a later one with the same id; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
