"""Encodes meta.json: what a persisted step tells people and programs without torch. No pickle, no I/O."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import CorruptShardError
from flashckpt.types import Generation

SCHEMA = "flashckpt.persist/v1"
MAX_META_BYTES = 64 << 20
_MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FileInfo:
    size_bytes: int
    crc32c: int


# A key of `extra` that a CheckpointManager sets: retention neither counts nor removes this step.
PERMANENT = "flashckpt.permanent"


@dataclass(frozen=True, slots=True)
class Meta:
    job: str
    generation: Generation
    world: int
    saved_at: float  # seconds since 1970 at which the first shard was sealed
    persisted_at: float
    reason: str  # why it was flushed
    files: dict[str, FileInfo]  # every file in the directory except meta.json
    values: dict[int, str] = field(default_factory=dict)  # rank → the file with its values in the typed encoding
    extra: dict[str, Any] = field(default_factory=dict)  # of the lowest rank, as far as JSON can hold it
    extra_keys: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files.values())


def encode_meta(meta: Meta) -> bytes:
    generation = meta.generation
    content = {
        "schema": SCHEMA,
        "job": meta.job,
        "step": generation.step,
        "generation": {
            "epoch": generation.epoch,
            "nonce": f"{generation.nonce:016x}",
            "step": generation.step,
            "seq": generation.seq,
        },
        "world": meta.world,
        "saved_at": meta.saved_at,
        "persisted_at": meta.persisted_at,
        "reason": meta.reason,
        "size_bytes": meta.size_bytes,
        "extra": meta.extra,
        "extra_keys": list(meta.extra_keys),
        "versions": meta.versions,
        "values": {str(rank): name for rank, name in sorted(meta.values.items())},
        "files": {
            name: {"size_bytes": one.size_bytes, "crc32c": f"{one.crc32c:08x}"}
            for name, one in sorted(meta.files.items())
        },
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def decode_meta(data: bytes, where: str) -> Meta:
    """Parse meta.json. CorruptShardError if the bytes are not what flashckpt writes."""
    try:
        found = json.loads(data)
        if found["schema"] != SCHEMA:
            raise CorruptShardError(f"{where}: expected schema {SCHEMA}, found {found['schema']!r}")
        generation = found["generation"]
        meta = Meta(
            job=_text(found["job"]),
            generation=Generation(
                _natural(generation["epoch"]),
                int(_text(generation["nonce"]), 16),
                _natural(generation["step"]),
                _natural(generation["seq"]),
            ),
            world=_natural(found["world"]),
            saved_at=_seconds(found["saved_at"]),
            persisted_at=_seconds(found["persisted_at"]),
            reason=_text(found["reason"]),
            files={
                _name(name): FileInfo(_natural(one["size_bytes"]), int(_text(one["crc32c"]), 16))
                for name, one in found["files"].items()
            },
            values={int(rank): _name(name) for rank, name in found["values"].items()},
            extra=dict(found["extra"]),
            extra_keys=tuple(map(_text, found["extra_keys"])),
            versions={_text(name): _text(value) for name, value in found["versions"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptShardError(f"{where}: expected what flashckpt writes there, found: {error!r}") from error
    if (
        found["step"] != meta.generation.step
        or not 0 < meta.world < 1 << 24
        or not 0 <= meta.generation.nonce < 1 << 64
    ):
        raise CorruptShardError(f"{where}: step, world and generation do not fit together")
    return meta


def json_part(extra: Any) -> dict[str, Any]:
    """Return the part of the user's `extra` that JSON holds without changing it."""
    result: dict[str, Any] = {}
    if not isinstance(extra, dict):
        return result
    for key, value in extra.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if same:
            result[key] = value
    return result


def _name(found: Any) -> str:
    # The name becomes part of a path.
    if not isinstance(found, str) or not found or "/" in found or "\0" in found or found in (".", ".."):
        raise ValueError(f"expected the name of a file, found {found!r}")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"expected text, found {found!r}")
    return found


def _natural(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= _MAX_INTEGER:
        raise ValueError(f"expected a number from 0 on, found {found!r}")
    return found


def _seconds(found: Any) -> float:
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not math.isfinite(found):
        raise ValueError(f"expected seconds since 1970, found {found!r}")
    return float(found)
