"""Lists the steps in persist_dir, and says which of them are complete and why others are not. No torch."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt import native
from flashckpt.errors import CorruptShardError
from flashckpt.persist.meta import MAX_META_BYTES, Meta, decode_meta
from flashckpt.persist.names import FENCE, HISTORY, IMPORTED, META_JSON, METADATA, step_of
from flashckpt.protocol.line import Ancestor, Line, by_head, from_fence, launch_of, name_of, order
from flashckpt.types import Generation, Launch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashckpt.persist.storage import Entry, Storage

_MAX_SMALL_BYTES = 4096
_MAX_HISTORY_BYTES = 64 << 20
_KEPT_ON_DISK = 1024  # launches that a line lists although they have no step here
_SCHEMA = "flashckpt.history/v1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Persisted:
    """Describes one step in persist_dir."""

    name: str
    step: int
    meta: Meta | None  # None: a DCP checkpoint that another program wrote, or a damaged one
    problem: str  # why it cannot be loaded; "" = it can
    writer: str | None = None  # the job that wrote it; "": flashckpt, but the job is not known; None: another program
    is_imported: bool = False  # by a person, with `flashckpt import`

    @property
    def generation(self) -> Generation:
        """Return the launch, or for a foreign checkpoint one that is older than every real launch."""
        return Generation(0, 0, self.step, 0) if self.meta is None else self.meta.generation

    @property
    def order(self) -> tuple[int, int, int]:
        """Order steps, newest last: first by launch, because a later launch abandoned what older ones saved above its
        load.
        """
        return self.generation.epoch, self.generation.nonce, self.step


def list_steps(storage: Storage) -> list[Persisted]:
    """List the steps, newest last. Steps that are being written or deleted are left out."""
    found = []
    for name, entry in (storage.list() or {}).items():
        step = step_of(name, foreign=True)
        if step is not None and entry.is_directory:
            found.append(look(storage, name, step))
    return sorted(found, key=lambda one: (one.order, one.name))


def look(storage: Storage, name: str, step: int) -> Persisted:
    """Check whether a step is complete: its marker is there, and every file in meta.json has its size."""
    files = storage.list(name) or {}
    # No other program names its files like this.
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
    """Yield the files whose bytes are not those that were written, with the reason. Reads every byte."""
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


def read_lines(storage: Storage) -> tuple[Line, ...]:
    """Return the lines in persist_dir, oldest first. They are needed if all memory is lost.

    Raises CorruptShardError if the file is not what flashckpt writes.
    """
    where = f"{storage.root}/{HISTORY}"
    try:
        data = storage.read(HISTORY, 0, _MAX_HISTORY_BYTES)
        if data is None:
            return _read_fence(storage)
        found = json.loads(data)
        if found["schema"] != _SCHEMA:
            raise CorruptShardError(f"{where}: expected schema {_SCHEMA}, found {found['schema']!r}")
        return lines_from_json(found["lines"])
    except (ValueError, KeyError, TypeError, AttributeError, IsADirectoryError) as error:
        raise CorruptShardError(f"{where}: expected the job's lines, found: {error!r}") from error


def _read_fence(storage: Storage) -> tuple[Line, ...]:
    """Read the file of earlier versions, which knew only the last load."""
    try:
        data = storage.read(FENCE, 0, _MAX_SMALL_BYTES)
        if data is None:
            return ()
        found = json.loads(data)
        return (from_fence(int(found["step"]), int(found["epoch"]), int(found["nonce"], 16)),)
    except (ValueError, KeyError, TypeError, IsADirectoryError) as error:
        raise CorruptShardError(f"{storage.root}/{FENCE}: expected a fence, found: {error!r}") from error


def write_line(storage: Storage, line: Line) -> None:
    """Store the line of a launch that continues from here, if it is the newest. A damaged file is set aside."""
    try:
        before = read_lines(storage)
    except CorruptShardError as error:
        aside = storage.set_aside(HISTORY if HISTORY in (storage.list() or {}) else FENCE)
        _log.warning("%s; it was set aside as %s and is written anew", error.message, aside)
        before = ()
    for one in before:
        line = line.with_older(one)
    present = [launch_of(one.generation) for one in list_steps(storage)]
    kept = [one for one in before if not line.supersedes(one) and one.head != line.head]
    lines = by_head([*kept, line.compacted(present, _KEPT_ON_DISK)])
    content = {"schema": _SCHEMA, "lines": lines_to_json(lines.values())}
    storage.put(HISTORY, json.dumps(content, indent=1).encode() + b"\n")


def lines_to_json(lines: Iterable[Line]) -> list[dict[str, Any]]:
    return [_line_to_json(one) for one in lines]


def lines_from_json(found: Iterable[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Parse the lines, oldest first. Raises ValueError, KeyError or TypeError if they are invalid."""
    return tuple(by_head(map(_line_from_json, found)).values())


def _line_to_json(line: Line) -> dict[str, Any]:
    return {
        "head": _launch_to_json(line.head),
        "root": _launch_to_json(line.root),
        "floor": None if line.floor is None else _ancestor_to_json(line.floor),
        "listed": [_ancestor_to_json(one) for one in line.listed],
    }


def _line_from_json(found: Mapping[str, Any]) -> Line:
    floor = None if found["floor"] is None else _ancestor_from_json(found["floor"])
    listed = tuple(sorted(map(_ancestor_from_json, found["listed"]), key=lambda one: order(one.launch)))
    return Line(_launch_from_json(found["head"]), _launch_from_json(found["root"]), listed, floor)


def _launch_to_json(launch: Launch) -> list[Any]:
    return [launch.epoch, name_of(launch)]


def _launch_from_json(found: Sequence[Any]) -> Launch:
    epoch, name = found
    return Launch(int(epoch), int(name, 16))


def _ancestor_to_json(one: Ancestor) -> list[Any]:
    return [*_launch_to_json(one.launch), one.step]


def _ancestor_from_json(found: Sequence[Any]) -> Ancestor:
    epoch, name, step = found
    return Ancestor(_launch_from_json((epoch, name)), int(step))
