"""What lies in persist_dir: its steps, which of them are whole, and why others are not. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt import native
from flashckpt.errors import CorruptShardError
from flashckpt.persist.meta import MAX_META_BYTES, Meta, decode_meta
from flashckpt.persist.names import FENCE, IMPORTED, META_JSON, METADATA, step_of
from flashckpt.types import Fence, Generation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.persist.storage import Entry, Storage

_MAX_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Persisted:
    """One step in persist_dir."""

    name: str
    step: int
    meta: Meta | None  # None: a DCP checkpoint that somebody else wrote, or a damaged one
    problem: str  # why it can't be loaded; "" = it can
    writer: str | None = None  # the job that wrote it; "": flashckpt, but it is not known which job; None: others
    is_imported: bool = False  # by a person, with `flashckpt import`

    @property
    def generation(self) -> Generation:
        """A foreign checkpoint has no launch: older than everything that has one."""
        return Generation(0, 0, self.step, 0) if self.meta is None else self.meta.generation

    @property
    def order(self) -> tuple[int, int, int]:
        """Newest last. A later launch began with a load: what older ones saved above it was left behind."""
        return self.generation.epoch, self.generation.nonce, self.step


def list_steps(storage: Storage) -> list[Persisted]:
    """Newest last. What is being written or deleted is not listed."""
    found = []
    for name, entry in (storage.list() or {}).items():
        step = step_of(name, foreign=True)
        if step is not None and entry.is_directory:
            found.append(look(storage, name, step))
    return sorted(found, key=lambda one: (one.order, one.name))


def look(storage: Storage, name: str, step: int) -> Persisted:
    """Whether a step is whole: its marker is there, and every file that meta.json lists has its size."""
    files = storage.list(name) or {}
    # Nobody else names files so.
    writer = "" if any(file.endswith(".flash") for file in files) else None
    meta, problem = None, ""
    if META_JSON in files:
        try:
            data = storage.read(f"{name}/{META_JSON}", 0, MAX_META_BYTES) or b""
            meta = decode_meta(data, f"{storage.root}/{name}/{META_JSON}")
            writer, problem = meta.job, _why_not_whole(meta, step, files)
        except CorruptShardError as error:
            problem = error.message
    elif writer is not None:
        problem = f"it has no {META_JSON}"
    if METADATA not in files:
        problem = f"it has no {METADATA}: it was never completed, or is being deleted"
    return Persisted(name, step, meta, problem, writer, IMPORTED in files)


def _why_not_whole(meta: Meta, step: int, files: Mapping[str, Entry]) -> str:
    if meta.generation.step != step:
        return f"meta.json says step {meta.generation.step}"
    for file, info in meta.files.items():
        size = files[file].size_bytes if file in files else None
        if size != info.size_bytes:
            return f"{file}: expected {info.size_bytes} bytes, found {'none' if size is None else size}"
    return ""


def damaged(storage: Storage, one: Persisted) -> list[str]:
    """Files whose bytes are not those that were written, with the reason. Reads everything."""
    problems = []
    for file, info in one.meta.files.items() if one.meta is not None else ():
        crc = offset = 0
        while data := storage.read(f"{one.name}/{file}", offset, min(16 << 20, info.size_bytes - offset)):
            crc = native.crc32c(data, crc)
            offset += len(data)
        if offset != info.size_bytes or crc != info.crc32c:
            problems.append(
                f"{file}: expected {info.size_bytes} bytes with crc32c {info.crc32c:#010x}, found {offset}, {crc:#010x}"
            )
    return problems


def read_fence(storage: Storage) -> Fence | None:
    """What was left behind by the last load; kept here for the day when all memory is gone."""
    data = storage.read(FENCE, 0, _MAX_SMALL_BYTES)
    if data is None:
        return None
    try:
        found = json.loads(data)
        return Fence(int(found["step"]), int(found["epoch"]), int(found["nonce"], 16))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(f"{storage.root}/{FENCE}: expected a fence, found: {error!r}") from error


def write_fence(storage: Storage, fence: Fence) -> None:
    """Only a newer one counts, and only where something lies that it could bury."""
    present = read_fence(storage)
    if storage.list() and (present is None or present.order < fence.order):
        content = {"step": fence.step, "epoch": fence.epoch, "nonce": f"{fence.nonce:016x}"}
        storage.put(FENCE, json.dumps(content).encode())
