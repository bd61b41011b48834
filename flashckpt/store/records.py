"""Keeps the newest commit records that this node has heard of, each a file `record-<generation>`.

A few are kept: a line may abandon the newest ones, and an older one then says which generations must not be released.

Failpoints: `before_record` · `mid_record` (written, not yet in force) · `after_record`.
"""

from __future__ import annotations

import logging
import math
import struct
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.lines import read_line
from flashckpt.store.names import Draft, parse_record_name, record_name
from flashckpt.store.reserve import retire
from flashckpt.store.small_files import frame, read_framed, write_aside
from flashckpt.types import MAX_KEEPS, Generation, Record

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

KEPT_RECORDS = 4
_log = logging.getLogger(__name__)
_MAGIC = b"FCRECRD1"
_FIELDS = struct.Struct("<QQQQIId")
_KEPT = struct.Struct("<QQQQ")  # after the fields, one per generation that stays


def write_record(directory: Directory, record: Record, writer: Owner) -> None:
    """Keep a record, and the newest ones in all; those that the line abandons are removed first. A second write changes
    nothing."""
    content = frame(_MAGIC, _encode(record), directory.job)
    failpoint("before_record")
    name = record_name(record.generation)
    write_aside(directory, name, content, Draft.RECORD, writer, pass_failpoint="mid_record")
    failpoint("after_record")
    line = read_line(directory)

    def worth(generation: Generation) -> tuple[bool, Generation]:
        return line is None or not line.kills(generation), generation

    for generation in sorted(_generations(directory), key=worth, reverse=True)[KEPT_RECORDS:]:
        retire(directory, None, record_name(generation))


def read_records(directory: Directory) -> tuple[Record, ...]:
    """Return the records, newest launch and generation first. One that is torn, altered or another job's is left
    out."""
    records = []
    for generation in sorted(_generations(directory), reverse=True):
        name = record_name(generation)
        try:
            payload = read_framed(directory, name, _MAGIC)
        except FileNotFoundError:
            continue  # dropped meanwhile
        except UnsafeDirectoryError as error:
            _log.warning("commit record ignored: %s", error)
            continue
        record = None if payload is None else _decode(payload)
        if record is None or record.generation != generation:
            _log.warning("commit record %s/%s is torn or foreign; ignored", directory.path, name)
            continue
        records.append(record)
    return tuple(records)


def drop_records(directory: Directory, older_than: Generation) -> int:
    """Remove the records of earlier launches, and of earlier generations of that launch. Return how many."""
    old = [generation for generation in _generations(directory) if generation < older_than]
    return sum(directory.remove(None, record_name(generation)) for generation in old)


def _encode(record: Record) -> bytes:
    try:
        fields = _FIELDS.pack(*record.generation, record.world, record.replicas, record.committed_at)
        return fields + b"".join(_KEPT.pack(*one) for one in record.keeps[:MAX_KEEPS])
    except struct.error as error:
        raise ConfigError(f"commit record of {record.generation}: {error}, found {record}") from error


def _decode(payload: bytes) -> Record | None:
    count, rest = divmod(len(payload) - _FIELDS.size, _KEPT.size)
    if rest or not 0 <= count <= MAX_KEEPS:
        return None
    epoch, nonce, step, seq, world, replicas, committed_at = _FIELDS.unpack_from(payload)
    if not math.isfinite(committed_at):
        return None
    keeps = tuple(Generation(*one) for one in _KEPT.iter_unpack(payload[_FIELDS.size :]))
    return Record(Generation(epoch, nonce, step, seq), world, replicas, committed_at, keeps)


def _generations(directory: Directory) -> list[Generation]:
    parsed = (parse_record_name(name) for name in directory.names(None))
    return [generation for generation in parsed if generation is not None]
