"""Small real file systems for tests: they fill up, run out of quota, hang or become read-only as real ones do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

MIB = 1 << 20
_TOOLS = {
    "ext4": ("mkfs.ext4", "mount", "umount", "losetup", "fsfreeze"),
    "tmpfs": ("mount", "umount"),
    "btrfs": ("mkfs.btrfs", "btrfs", "mount", "umount", "losetup"),
}
_MKFS = {"ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}
_BYTES = {"ext4": 32 * MIB, "tmpfs": 16 * MIB, "btrfs": 128 * MIB}
_THAW_SECONDS = 240.0


class Disk:
    """A file system of one kind, mounted. Full disks are made by a file that takes the rest."""

    def __init__(self, kind, point, device):
        self.kind, self.point, self._device = kind, Path(point), device
        self._filler = self.point / "filler"
        self._thaw = None

    @property
    def free_bytes(self):
        found = os.statvfs(self.point)
        return found.f_bavail * found.f_frsize

    def fill(self, left_bytes):
        """Takes all room but so much."""
        os.sync()  # delayed allocation counts only then
        with self._filler.open("ab") as file:
            while (more := self.free_bytes - left_bytes) > 0:
                file.write(bytes(min(more, MIB)))
                file.flush()
                os.fsync(file.fileno())

    def make_room(self):
        self._filler.unlink()
        os.sync()

    def freeze(self):
        """Whoever writes from now on hangs in the kernel and can't be killed. Thaws by itself in the end: nobody could
        clean up else."""
        _run("fsfreeze", "-f", self.point)
        self._thaw = threading.Timer(_THAW_SECONDS, self.thaw)
        self._thaw.daemon = True
        self._thaw.start()

    def thaw(self):
        if self._thaw is not None:
            timer, self._thaw = self._thaw, None
            timer.cancel()
            _run("fsfreeze", "-u", self.point)

    def read_only(self, on):
        _run("mount", "-o", f"remount,{'ro' if on else 'rw'}", self.point)

    @contextlib.contextmanager
    def after_power_failure(self):
        """What a machine finds there that lost its power just now: only what has reached the device. Where it is
        mounted; the disk itself goes on."""
        with tempfile.TemporaryDirectory(dir=self._device.parent) as directory:
            image, point = Path(directory) / "crashed.img", Path(directory) / "crashed"
            _run("cp", "--sparse=always", self._device, image)
            point.mkdir()
            _run("mount", "-o", "loop", image, point)  # replays the journal
            try:
                yield point
            finally:
                _run("umount", point)

    def limit(self, name, size_bytes):
        """btrfs: a quota on a directory of its own, which is made; None lifts it."""
        if not (self.point / name).exists():
            _run("btrfs", "quota", "enable", self.point)
            _run("btrfs", "subvolume", "create", self.point / name)
        _run("btrfs", "qgroup", "limit", "none" if size_bytes is None else str(size_bytes), self.point / name)


@contextlib.contextmanager
def disk(kind, directory, options=""):
    """The disk of that kind, below `directory`; unmounted at the end, come what may."""
    point = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=directory))
    image = point.with_suffix(".img")
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={_BYTES[kind]},mode=0755", "tmpfs", point)
    else:
        with image.open("wb") as file:
            file.truncate(_BYTES[kind])
        _run(*_MKFS[kind], image)
        _run("mount", "-o", f"loop,{options}" if options else "loop", image, point)
    made = Disk(kind, point, image)
    try:
        yield made
    finally:
        made.thaw()
        # Lazily, where somebody still has a file open there: it is gone with the last one.
        if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode != 0:
            _run("umount", "-l", point)


def unavailable(kind):
    """Why such a disk can't be had here; "" if it can. Tries it out, and leaves nothing behind."""
    if os.geteuid() != 0:
        return f"mounting {kind} needs root, found uid {os.geteuid()}"
    missing = [tool for tool in _TOOLS[kind] if shutil.which(tool) is None]
    if missing:
        return f"a disk of kind {kind} needs {', '.join(missing)} (e2fsprogs, btrfs-progs, util-linux)"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with disk(kind, directory):
                return ""
        except subprocess.CalledProcessError as error:
            return f"the kernel or container refuses {kind}: {error.stderr.strip()}"


def _run(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
