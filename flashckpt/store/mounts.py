"""Finds the mount on which a descriptor lies: filesystem type, mount point, huge pages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_ESCAPE = re.compile(r"\\([0-7]{3})")
# If one huge page is larger than this (512 MiB on arm64 with 64 KiB pages), rounding slots up to it wastes more memory
# than the faults cost.
_MAX_HUGE_PAGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/<pid>/mountinfo."""

    mount_id: int
    device: int  # as st_dev
    root: str  # the part of the filesystem that is mounted here
    mount_point: str
    fs_type: str
    options: tuple[str, ...]  # of the filesystem itself, for example huge=always


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Parse the kernel's list of mounts. Lines in another form are left out."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        try:
            # Optional fields are between the sixth one and a lone dash.
            separator = fields.index("-", 6)
            major, minor = fields[2].split(":")
            mounts.append(
                Mount(
                    mount_id=int(fields[0]),
                    device=os.makedev(int(major), int(minor)),
                    root=_unescape(fields[3]),
                    mount_point=_unescape(fields[4]),
                    fs_type=fields[separator + 1],
                    options=tuple(fields[separator + 3].split(",")),
                )
            )
        except (ValueError, IndexError):
            continue
    return tuple(mounts)


def read_mounts(proc: Path = _PROC) -> tuple[Mount, ...]:
    return parse_mountinfo(os.fsdecode((proc / "self/mountinfo").read_bytes()))


def find_mount(fd: int) -> Mount | None:
    """Return the mount of an open file; None if it is not (or no longer) attached."""
    mounts = read_mounts()
    mount_id = _mount_id(fd)
    for mount in mounts:
        if mount.mount_id == mount_id:
            return mount
    if mount_id is not None:
        return None
    device = os.fstat(fd).st_dev
    return next((mount for mount in reversed(mounts) if mount.device == device), None)


def huge_page_bytes(mount: Mount, fd: int, thp: Path = _THP) -> int:
    """Return the size of the huge pages that files on this mount can have; 0 if they have none."""
    if mount.fs_type == "hugetlbfs":
        return os.fstatvfs(fd).f_bsize
    if mount.fs_type != "tmpfs":
        return 0
    try:
        switch = _chosen((thp / "shmem_enabled").read_text(encoding="ascii"))
        size = int((thp / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    wanted = any(f"huge={policy}" in mount.options for policy in ("always", "within_size", "advise"))
    if switch == "deny" or not (wanted or switch == "force") or size > _MAX_HUGE_PAGE_BYTES:
        return 0
    return size


def _mount_id(fd: int) -> int | None:
    try:
        for line in (_PROC / f"self/fdinfo/{fd}").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def _chosen(text: str) -> str:
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
