"""Makes the directories of one cluster. Their names contain the process that made them, so that leftovers are
recognised.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from flashckpt.store.mounts import read_mounts
from flashckpt.store.owner import Owner, is_dead
from flashckpt.testing import processes

_PREFIX = "flashckpt-cluster-"
_NAME = re.compile(re.escape(_PREFIX) + r"(\d+)-(\d+)-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}")
MEMORY_ROOT = Path("/dev/shm")


def make(parent: Path) -> Path:
    """Make a directory of our own there, with mode 0700."""
    owner = Owner.current()
    name = f"{_PREFIX}{owner.pid}-{owner.start_ticks}-{owner.boot_id8}-{owner.pid_namespace}-{secrets.token_hex(4)}"
    path = parent / name
    path.mkdir(mode=0o700)
    return path


def scratch_root() -> Path:
    """Return where logs go: not into the memory that is being tested."""
    return Path(tempfile.gettempdir())


def remove(path: Path) -> None:
    """Unmount what is mounted in it, and delete it."""
    unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # A process was still writing into it: try once more, and raise if that fails.
        shutil.rmtree(path)


def unmount_below(path: Path) -> None:
    inside = [mount.mount_point for mount in read_mounts() if Path(mount.mount_point).is_relative_to(path)]
    for mount_point in sorted(inside, key=len, reverse=True):
        # Lazily: a process that still has a file open there keeps it, and we do not wait for that.
        subprocess.run(["umount", "--lazy", mount_point], check=False, capture_output=True)


def find_stale(parent: Path) -> list[Path]:
    """Return the directories of clusters of this user whose makers have exited."""
    found = []
    for path in parent.glob(f"{_PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        maker = Owner(int(match[1]), int(match[2]), match[3], int(match[4]))
        try:
            ours = path.stat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue  # another cluster that starts now was quicker
        if ours and is_dead(maker):
            found.append(path)
    return found


def sweep(memory_root: Path = MEMORY_ROOT) -> list[Path]:
    """End and remove what crashed runs left behind. Returns the directories."""
    removed = []
    for path in (stale for parent in (memory_root, scratch_root()) for stale in find_stale(parent)):
        processes.kill_all(lambda path=path: _using(path), f"leftovers of {path}")  # type: ignore[misc]
        unmount_below(path)
        shutil.rmtree(path, ignore_errors=True)  # two clean-ups may run at once
        removed.append(path)
    return removed


def _using(path: Path) -> list[int]:
    return [seen.pid for seen in processes.look() if seen.names(str(path))]
