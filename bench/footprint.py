"""How much memory a contender takes, helpers and files included, whatever else runs on the machine.

Counted are: anonymous memory of the worker and of the processes it started, pages that several share divided among them
(a forked child costs nothing until somebody writes); shared memory without a name; and the files of its own on tmpfs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$")
_UNNAMED = re.compile(r"^(/dev/shm/.* \(deleted\)|/memfd:|/SYSV|/dev/zero)")


def footprint_bytes(pid: int, directory: Path) -> int:
    """Of the worker `pid`, which leads a session, and of whoever has its directory among its arguments."""
    members = [number for number in _processes() if _belongs(number, pid, str(directory))]
    return sum(map(_memory_of, members)) + _files_of(directory)


def _processes() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _belongs(number: int, session: int, directory: str) -> bool:
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
        if int(stat.rpartition(")")[2].split()[3]) == session:
            return True
        return directory in Path(f"/proc/{number}/cmdline").read_text(errors="replace")
    except OSError:  # it has ended
        return False


def _memory_of(number: int) -> int:
    total, counts = 0, False
    try:
        with open(f"/proc/{number}/smaps") as smaps:
            for line in smaps:
                if counts and line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
                elif (header := _HEADER.match(line)) is not None:
                    path = header[1]
                    counts = not path or path.startswith("[") or _UNNAMED.match(path) is not None
    except OSError:
        return total
    return total


def _files_of(directory: Path) -> int:
    """What lies in it, and what a library put beside it under a name made of the run's and the directory's."""
    beside = directory.parent.parent.glob(f"{directory.parent.name}_{directory.name}_*")
    paths = [*directory.rglob("*"), *beside]
    total = 0
    for path in paths:
        try:
            found = path.lstat()
        except OSError:
            continue
        total += found.st_blocks * 512
    return total
