"""The non-tensor part of a state dict, packed into one blob and back."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import ConfigError, StructureError, UnsupportedValueError
from flashckpt.format.values import Blob, decode_values, encode_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.state.flatten import Flat, Path

# Beside the user's keys; no flattened key begins with this character.
_EXTRA, _PATHS, _PER_RANK = "\x1fextra", "\x1fpaths", "\x1fper_rank"


@dataclass(frozen=True, slots=True)
class Values:
    """What one rank saved beside tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    per_rank: frozenset[str] = frozenset()
    extra: Any = None

    def path(self, fqn: str) -> Path:
        return self.paths.get(fqn) or tuple(fqn.split("."))


def pack(flat: Flat, extra: Mapping[str, Any] | None, allow_torch_save: bool) -> bytes:
    """Raises UnsupportedValueError, naming key and type, for what the typed encoding can't hold."""
    for fqn in flat.values:
        if fqn.startswith("\x1f"):
            raise StructureError(f"key {fqn!r}: keys must not begin with the character 0x1f", key=fqn)
    packed = dict(flat.values)
    paths = {fqn: flat.paths[fqn] for fqn in flat.values if fqn in flat.paths}
    if paths:
        packed[_PATHS] = paths
    own = [fqn for fqn in flat.values if fqn in flat.per_rank]
    if own:
        packed[_PER_RANK] = own
    if extra is not None:
        packed[_EXTRA] = dict(extra)
    try:
        return encode_values(packed)
    except UnsupportedValueError:
        if not allow_torch_save:
            raise
    return encode_values({key: _encodable(value) for key, value in packed.items()})


def _encodable(value: Any) -> Any:
    try:
        encode_values({"": value})
    except UnsupportedValueError:
        check_torch_save_is_safe()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return Blob(buffer.getvalue())
    return value


def unpack(blob: bytes | bytearray) -> Values:
    """The inverse of `pack`; hostile bytes end in CorruptShardError."""
    packed = {key: _decoded(value) for key, value in decode_values(memoryview(blob)).items()}
    extra = packed.pop(_EXTRA, None)
    paths = packed.pop(_PATHS, {})
    per_rank = frozenset(packed.pop(_PER_RANK, ()))
    return Values(packed, paths, per_rank, extra)


def _decoded(value: Any) -> Any:
    if not isinstance(value, Blob):
        return value
    check_torch_save_is_safe()
    return torch.load(io.BytesIO(bytes(value)), weights_only=True)


def check_torch_save_is_safe() -> None:
    """Before 2.10 the `weights_only` unpickler could be made to run code (CVE-2025-32434, CVE-2026-24747)."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        raise ConfigError(
            f"allow_torch_save: expected torch 2.10 or newer, found {torch.__version__}",
            hint="upgrade torch, or save plain values",
        )
