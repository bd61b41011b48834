"""Checks persist_dir: whether it is durable, writable, and has room."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.doctor.finding import Finding, fail, ok, warn
from flashckpt.errors import FlashError
from flashckpt.persist.storage import is_url, open_storage
from flashckpt.store.mounts import find_mount
from flashckpt.store.room import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT = 15.0
_SLOW_SECONDS = 2.0
_VOLATILE = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True, slots=True)
class DiskFacts:
    persist_dir: str
    problem: str = ""  # why a small file could not be written and read back
    exists: bool = True
    fs_type: str = ""  # "": not known
    mount_point: str = ""
    free_bytes: int | None = None
    write_seconds: float = 0.0  # time to write a small file, with fsync and rename
    same_as_memory: bool = False


def look_at_disk(persist_dir: str, memory_dir: str, timeout: float = _TIMEOUT) -> DiskFacts:
    """Write a small file and remove it, in a thread: a dead server must not hang the doctor."""
    answers: queue.SimpleQueue[DiskFacts] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(_look(persist_dir, memory_dir))
        except Exception as error:  # any exception of a filesystem's package
            reason = error.message if isinstance(error, FlashError) else str(error) or type(error).__name__
            answers.put(DiskFacts(persist_dir, problem=reason))

    threading.Thread(target=run, name="flashckpt-doctor", daemon=True).start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return DiskFacts(persist_dir, problem=f"hangs: could not be written within {timeout:g} s")


def _look(persist_dir: str, memory_dir: str) -> DiskFacts:
    if not is_url(persist_dir) and not os.path.lexists(persist_dir):
        return _look_above(persist_dir)
    storage = open_storage(persist_dir)
    name, content = f".flashckpt-doctor-{secrets.token_hex(8)}", secrets.token_bytes(64)
    began = time.monotonic()
    storage.put(name, content)
    took = time.monotonic() - began
    try:
        if storage.read(name) != content:
            return DiskFacts(persist_dir, problem="what was written there is not what is read")
    finally:
        storage.remove(name)
    if is_url(persist_dir):
        return DiskFacts(persist_dir, write_seconds=took)
    fd = os.open(persist_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount, room = find_mount(fd), os.fstatvfs(fd)
        same = False
        with contextlib.suppress(OSError):
            same = os.stat(memory_dir).st_dev == os.fstat(fd).st_dev
    finally:
        os.close(fd)
    return DiskFacts(
        persist_dir,
        fs_type=mount.fs_type if mount is not None else "",
        mount_point=mount.mount_point if mount is not None else "",
        free_bytes=room.f_bavail * room.f_frsize if room.f_blocks else None,
        write_seconds=took,
        same_as_memory=same,
    )


def _look_above(persist_dir: str) -> DiskFacts:
    """Return the facts of a directory that does not exist yet; the first flush makes it."""
    parent = os.path.dirname(persist_dir)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        return DiskFacts(persist_dir, problem=f"is not there, and this user may not make it in {parent}", exists=False)
    room = os.statvfs(parent)
    return DiskFacts(persist_dir, exists=False, free_bytes=room.f_bavail * room.f_frsize if room.f_blocks else None)


def judge_disk(facts: DiskFacts | None, size_bytes: int | None, steps: int) -> Iterator[Finding]:
    """Judge the facts. `size_bytes` is that of one checkpoint, all nodes together; `steps` is how many are kept at
    once.
    """
    if facts is None:
        advice = "set persist_dir: without it nothing survives the loss of all nodes that hold a copy"
        yield warn("persist.directory", "no persist_dir: checkpoints are in memory only", advice)
        return
    if facts.problem:
        advice = "make it, give this user the right to write there, or look at its server"
        yield fail("persist.directory", f"{facts.persist_dir}: {facts.problem}", advice)
        return
    where = facts.persist_dir + (f" on {facts.fs_type} at {facts.mount_point}" if facts.fs_type else "")
    if facts.same_as_memory or facts.fs_type in _VOLATILE:
        why = (
            "the memory directory's own filesystem"
            if facts.same_as_memory
            else "it is lost with the machine or container"
        )
        yield fail("persist.directory", f"{where}: {why}", "name a directory on a disk that all nodes share")
    elif not facts.exists:
        yield ok("persist.directory", f"{where}: not there yet; this user may make it")
    else:
        yield ok("persist.directory", f"{where}: may be written to")
    if facts.write_seconds > _SLOW_SECONDS:
        found = f"a file of 64 bytes took {facts.write_seconds:.1f} s to be durable"
        yield warn("persist.speed", found, "flushes run in the background; raise persist_timeout if they do not end")
    yield from _room(facts.free_bytes, size_bytes, steps)


def _room(free: int | None, size_bytes: int | None, steps: int) -> Iterator[Finding]:
    if free is None:
        return
    if size_bytes is None:
        yield ok("persist.room", f"{format_bytes(free)} free")
        return
    # One more than are kept: retention removes the oldest only after the newest is written.
    need = size_bytes * (steps + 1)
    found = f"{format_bytes(free)} free; {steps} + 1 checkpoints need {format_bytes(need)}"
    if free < size_bytes:
        yield fail("persist.room", found, "not even one fits: make room, or name another directory")
    elif free < need:
        yield warn("persist.room", found, "make room, or keep fewer (keep_latest_k)")
    else:
        yield ok("persist.room", found)
