"""Chooses the memory directory if none is set: one per user. In a shared one, its first user would lock out all
others."""

from __future__ import annotations

import os
import stat

from flashckpt.store.names import job_directory_name

_SHM = "/dev/shm"
_OF_A_GROUP = "-ranks-"  # in the names of jobs of process groups of one job


def default_memory_dir(job: str | None, shm: str = _SHM) -> str:
    """Return this user's directory for `job`, or (None) for any job.

    Earlier versions had one directory for all users. It is used if it is ours and holds the job, unless the user's own
    directory holds the job as well.
    """
    mine, shared = own_place(shm), f"{shm}/flashckpt"
    return shared if _holds(shared, job) and not _holds(mine, job) else mine


def own_place(shm: str = _SHM) -> str:
    return f"{shm}/flashckpt-{os.geteuid()}"


def other_place(directory: str, shm: str = _SHM) -> str | None:
    """Return the other one of the two default directories, if it has jobs of ours."""
    mine, shared = own_place(shm), f"{shm}/flashckpt"
    other = {mine: shared, shared: mine}.get(directory)
    return other if other is not None and _holds(other, None) else None


def _holds(directory: str, job: str | None) -> bool:
    if not _is_ours(directory):
        return False
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    if job is not None:
        name = job_directory_name(job)
        names = [one for one in names if one == name or one.startswith(name + _OF_A_GROUP)]
    return any(_is_ours(os.path.join(directory, one)) for one in names)


def _is_ours(path: str) -> bool:
    """Return True for a directory of this user, closed to others, that is no link."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
