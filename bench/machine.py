"""What the figures were measured on, and how quiet it was."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_LOOK_SECONDS = 0.5
_QUIET_SHARE = 0.1  # of all processors
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    anonymous_huge_pages: str
    tmpfs_huge_pages: str
    checksum_kernel: str
    native: bool
    commit: str


def describe() -> Machine:
    from flashckpt import native  # the compiled part loads only here, in the parent

    return Machine(
        cpu=_field("/proc/cpuinfo", "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=version("torch"),
        anonymous_huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        tmpfs_huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        checksum_kernel=native.kernel(),
        native=native.IS_NATIVE,
        commit=_commit(),
    )


class Quietness:
    """How much of the machine others used while this object existed."""

    def __init__(self) -> None:
        self._busy, self._all = _processor_seconds()
        self._own = _own_seconds()
        self._elsewhere = 0.0

    def add_own(self, seconds: float) -> None:
        """CPU time of processes that work for us, but are no children of ours: agents detach."""
        self._elsewhere += seconds

    def others_share(self) -> float:
        """CPU time of processes that are not ours, as a share of all there was. Ended workers count as ours."""
        busy, everything = _processor_seconds()
        if everything == self._all:
            return 0.0
        foreign = (busy - self._busy) - (_own_seconds() - self._own) - self._elsewhere
        return max(0.0, foreign / (everything - self._all))


def wait_until_quiet(patience: float) -> bool:
    """Waits until others leave the processors alone; False if they did not within so many seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        busy, everything = _processor_seconds()
        time.sleep(_LOOK_SECONDS)
        busy_now, everything_now = _processor_seconds()
        if everything_now == everything or (busy_now - busy) / (everything_now - everything) < _QUIET_SHARE:
            return True
    return False


def _processor_seconds() -> tuple[float, float]:
    ticks = os.sysconf("SC_CLK_TCK")
    # user nice system idle iowait irq softirq steal; guest time is within user already
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / ticks, sum(fields) / ticks


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _chosen(path: str) -> str:
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "flashckpt", "csrc", "protos")
    return commit + (" with changes" if changed else "")
