"""Decides which job owns persist_dir, and which of its steps are this job's. Everything else is left alone. No torch.

The directory's identity (`flashckpt.json`) names its job from the first flush on. In a directory of an earlier version
without an identity, the step that `latest` names decides. A step belongs to the job that its meta.json names.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, ForeignStepError, PersistError
from flashckpt.persist.catalog import list_steps
from flashckpt.persist.names import IDENTITY, METADATA, is_of_attempt, step_name, step_of
from flashckpt.persist.storage import is_url
from flashckpt.store.mounts import read_mounts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashckpt.persist.catalog import Persisted
    from flashckpt.persist.storage import Storage
    from flashckpt.protocol.flush_spec import FlushSpec

_log = logging.getLogger(__name__)

_SCHEMA = "flashckpt.persist-dir/v1"
_MAX_IDENTITY_BYTES = 4096
_FSTAB = Path("/etc/fstab")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_OTHER_WAYS = (
    "name another persist_dir; or, if this is the same run, the same job name (job=…); or set persist_overwrite=True, "
    "which lets this job replace steps of that number and move `latest`"
)


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """Names the job that the directory belongs to."""

    job: str
    created: float  # seconds since 1970, for people


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Describes persist_dir as one job sees it."""

    job: str
    root: str
    identity: DirectoryIdentity | None
    owner: str | None  # the job that the directory belongs to; None: nobody's yet
    ours: tuple[Persisted, ...]  # steps of this job, newest last
    foreign: tuple[Persisted, ...]  # of other jobs and programs, newest last

    @property
    def is_others(self) -> bool:
        """Return True if the directory belongs to another job."""
        return self.owner is not None and self.owner != self.job

    def why_foreign(self) -> str:
        """Say whose directory it is. Call only if `is_others`."""
        theirs = [one for one in self.foreign if one.writer == self.owner]
        newest = f" (newest: {theirs[-1].name})" if theirs else ""
        return f"{self.root} belongs to job {self.owner!r}{newest}, this is job {self.job!r}"


def look_around(storage: Storage, job: str) -> Tenancy:
    """Sort what lies in persist_dir into this job's and others'."""
    try:
        identity = read_identity(storage)
    except CorruptShardError as error:
        _log.warning("%s; each step's meta.json is used instead, and the next flush writes it anew", error.message)
        identity = None
    steps = list_steps(storage)
    owner = identity.job if identity is not None else _owner_by_steps(storage, steps, job)
    ours = tuple(one for one in steps if is_ours(one, job, owner))
    return Tenancy(job, storage.root, identity, owner, ours, tuple(one for one in steps if one not in ours))


def is_ours(one: Persisted, job: str, owner: str | None) -> bool:
    """Return True for a step of this job. A damaged step of flashckpt's belongs to the directory's owner; an imported
    step belongs to the owner of the directory that a person put it in.
    """
    return one.is_imported or one.writer == job or (one.writer == "" and owner == job)


def _owner_by_steps(storage: Storage, steps: Iterable[Persisted], job: str) -> str | None:
    writers = {one.name: one.writer for one in steps if one.writer}
    latest = _latest(storage)
    if latest is not None and latest in writers:
        return writers[latest]
    return job if job in writers.values() else next(reversed(writers.values()), None)


def read_identity(storage: Storage) -> DirectoryIdentity | None:
    """Read the identity. CorruptShardError if the file is not what flashckpt writes."""
    data = storage.read(IDENTITY, 0, _MAX_IDENTITY_BYTES)
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found["schema"] != _SCHEMA or not isinstance(found["job"], str) or not found["job"]:
            raise ValueError(f"expected schema {_SCHEMA} and a job, found {str(found)[:200]}")
        return DirectoryIdentity(found["job"], float(found["created"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(f"{storage.root}/{IDENTITY}: expected an identity, found: {error!r}") from error


def claim(storage: Storage, tenancy: Tenancy) -> None:
    """Write the identity, if there is none yet. Call after `check_flush`."""
    if tenancy.identity is None or tenancy.is_others:
        content = {"schema": _SCHEMA, "job": tenancy.job, "created": time.time()}
        storage.put(IDENTITY, json.dumps(content).encode() + b"\n")


# --- what must not be written to --------------------------------------------------------------------------------------


def enter(storage: Storage, spec: FlushSpec) -> None:
    """Check, before a flush writes anything, that it touches only this job's files and does not write below a mount
    point.
    """
    check_place(spec.settings.directory)
    tenancy = look_around(storage, spec.job)
    if not spec.coordinates:
        check_mounted(tenancy, spec.known)
        return
    check_flush(storage, tenancy, spec.generation.step, spec.known, overwrite=spec.settings.overwrite)
    claim(storage, tenancy)


def check_place(persist_dir: str) -> None:
    """Raise PersistError if persist_dir is no directory, or if its file system is not mounted. Creates nothing."""
    if is_url(persist_dir):
        return
    try:
        mode = os.stat(persist_dir).st_mode
    except FileNotFoundError:
        link = _dangling_link(persist_dir)
        if link is not None:
            raise PersistError(
                f"persist_dir {persist_dir}: expected a directory, found that {link} is a link to {os.readlink(link)}, "
                "which is not there",
                hint="mount what belongs there on this node, or mend the link",
            ) from None
    else:
        if not stat.S_ISDIR(mode):
            raise PersistError(
                f"persist_dir {persist_dir}: expected a directory, found something else",
                hint="remove or rename what lies there, or name another persist_dir",
            )
    lacking = _lacking_mount(persist_dir)
    if lacking is not None:
        raise PersistError(
            f"persist_dir {persist_dir}: expected a file system at {lacking}, as /etc/fstab says, found that none is "
            "mounted there",
            hint=f"mount {lacking} on this node",
        )


def why_emptied(tenancy: Tenancy, known: int | None) -> str:
    """Return why nothing of this job is there although this node remembers that it persisted step `known`; "" = nothing
    is missing.
    """
    if known is None or tenancy.ours or (tenancy.identity is not None and tenancy.identity.job != tenancy.job):
        return ""
    return f"{tenancy.root}: this job persisted step {known} there, and none of its steps is there now"


EMPTIED_HINT = (
    "mount what belongs there on this node; if it was emptied on purpose, say so with load(allow_fresh=True) or "
    "start_fresh()"
)


def check_mounted(tenancy: Tenancy, known: int | None) -> None:
    """Raise PersistError if a flush would write below a mount point. A directory with an identity is the right one."""
    emptied = why_emptied(tenancy, known)
    if emptied and tenancy.identity is None:
        raise PersistError(emptied, hint=EMPTIED_HINT)


def check_flush(storage: Storage, tenancy: Tenancy, step: int, known: int | None, *, overwrite: bool) -> None:
    """Raise if a flush of `step` would touch what is not this job's, or would write below a mount point. Writes
    nothing.

    Raises UnsafeDirectoryError if `latest` is not a link.
    """
    check_mounted(tenancy, known)
    latest = storage.latest()
    if overwrite:
        return
    if tenancy.is_others:
        raise ForeignStepError(tenancy.why_foreign(), hint=_OTHER_WAYS, job=tenancy.owner)
    name = step_name(step)
    target = next((one for one in tenancy.foreign if one.name == name), None)
    if target is not None and not _is_unfinished(storage, name):
        raise ForeignStepError(
            f"{storage.root}/{name}: expected nothing, or this job's, found a step of {whose(target)}",
            hint=_OTHER_WAYS,
            job=target.writer,
        )
    if latest is None or latest == name or any(one.name == latest for one in tenancy.ours):
        return
    pointed = next((one for one in tenancy.foreign if one.name == latest), None)
    if pointed is not None or (step_of(latest) is None and storage.list(latest) is not None):
        found = "something else" if pointed is None else f"a step of {whose(pointed)}"
        raise ForeignStepError(
            f"{storage.root}/latest: expected it to name a step of this job, found {latest}, {found}",
            hint=_OTHER_WAYS,
        )


def whose(one: Persisted) -> str:
    """Name the owner of a step for a message."""
    if one.writer is None:
        return "another program"
    return f"job {one.writer!r}" if one.writer else "an unknown job (its meta.json is damaged)"


def _is_unfinished(storage: Storage, name: str) -> bool:
    """Return True for what failed attempts left in an object store, which has no temporary directories."""
    files = storage.list(name) or {}
    return is_url(storage.root) and METADATA not in files and all(map(is_of_attempt, files))


def _latest(storage: Storage) -> str | None:
    try:
        return storage.latest()
    except OSError:
        return None  # a flush reports what is wrong with it


# --- mounts -----------------------------------------------------------------------------------------------------------


def _dangling_link(path: str) -> str | None:
    """Return the part of `path` that is a link to nothing: what it leads to is not mounted, or was removed."""
    for part in (path, *map(str, Path(path).parents)):
        if os.path.lexists(part):
            return part if os.path.islink(part) and not os.path.exists(part) else None
    return None


def _lacking_mount(persist_dir: str) -> str | None:
    try:
        fstab = _FSTAB.read_text(encoding="utf-8", errors="surrogateescape")
        mounted = {mount.mount_point for mount in read_mounts()}
    except OSError:
        return None
    return mount_that_lacks(os.path.realpath(persist_dir), fstab, mounted)


def mount_that_lacks(path: str, fstab: str, mounted: Collection[str]) -> str | None:
    """Return the mount point that fstab names for `path` if nothing is mounted there. Pure."""
    for line in fstab.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith("#") or "noauto" in fields[3].split(","):
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1]).rstrip("/")
        if point and (path == point or path.startswith(f"{point}/")) and point not in mounted:
            return point
    return None
