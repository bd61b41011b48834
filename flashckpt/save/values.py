"""Packs the non-tensor part of a state dict into one blob, and unpacks it."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.devices import as_bits
from flashckpt.errors import ConfigError, StructureError, UnsupportedValueError
from flashckpt.format.caps import MAX_INTEGER
from flashckpt.format.refuse import corrupt
from flashckpt.format.values import Blob, Encoded, decode_values, encode_once, encode_values
from flashckpt.state.flatten import path_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.state.flatten import Flat, Path

# Keys of flashckpt's own values, packed beside the user's. No flattened key begins with this character.
_EXTRA, _PATHS, _PER_RANK, _TENSORS = "\x1fextra", "\x1fpaths", "\x1fper_rank", "\x1ftensors"
# Types that are not searched for tensors.
_ALWAYS_ENCODED = frozenset({Encoded, bool, int, float, str, bytes, type(None)})
_ASSUMED, _SAMPLE = "\x1fassumed", "\x1fsample"


@dataclass(frozen=True, slots=True)
class Values:
    """The non-tensor values that one rank saved."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    per_rank: frozenset[str] = frozenset()
    extra: Any = None
    assumed_bytes: int = 0
    """End of the assumed tensors, which come first in the data area. Absent: not known."""
    sample: tuple[int, ...] = ()
    """Checksums of some of these tensors on this rank, see save/same.py."""

    def path(self, fqn: str) -> Path:
        return path_of(fqn, self.paths)


class KnownPaths:
    """Keeps the encoded paths of the last save: they are most of the packed bytes, and rarely change."""

    def __init__(self) -> None:
        self._last: tuple[dict[str, Path], Encoded] | None = None

    def encode(self, paths: dict[str, Path]) -> Any:
        if self._last is None or self._last[0] != paths:
            encoded = encode_once(paths)
            if encoded is None:
                return paths
            self._last = paths, encoded
        return self._last[1]


def pack(
    flat: Flat,
    extra: Mapping[str, Any] | None,
    allow_torch_save: bool,
    known: KnownPaths | None = None,
    *,
    assumed_bytes: int = 0,
    sample: tuple[int, ...] = (),
) -> bytes:
    """Packs the values. Raises UnsupportedValueError, with key and type, for what the typed encoding can't hold."""
    for fqn in flat.values:
        if fqn.startswith("\x1f"):
            raise StructureError(f"key {fqn!r}: keys must not begin with the character 0x1f", key=fqn)
    packed = dict(flat.values)
    paths = {fqn: flat.paths[fqn] for fqn in flat.values if fqn in flat.paths}
    if paths:
        packed[_PATHS] = paths if known is None else known.encode(paths)
    own = [fqn for fqn in flat.values if fqn in flat.per_rank]
    if own:
        packed[_PER_RANK] = own
    if extra is not None:
        packed[_EXTRA] = dict(extra)
    if assumed_bytes:
        packed[_ASSUMED] = assumed_bytes
    if sample:
        packed[_SAMPLE] = sample
    try:
        return encode_values(packed)
    except UnsupportedValueError as error:
        # The rare cases, tried after the common one has failed: small tensors inside a value, and torch.save.
        return encode_values(_made_encodable(packed, allow_torch_save, error))


def _made_encodable(packed: dict[str, Any], allow_torch_save: bool, error: UnsupportedValueError) -> dict[str, Any]:
    result, with_tensors = {}, []
    for key, value in packed.items():
        result[key] = value
        if type(value) in _ALWAYS_ENCODED or (not _holds_tensor(value) and _encodes(value)):
            continue
        result[key] = _tensors_out(value)
        if _encodes(result[key]):
            with_tensors.append(key)
        elif allow_torch_save:
            _check_torch_save_is_safe()
            buffer = io.BytesIO()
            torch.save(value, buffer)
            result[key] = Blob(buffer.getvalue())
            _decoded(key, result[key])  # what can't be loaded must not be saved
        else:
            raise error
    return {**result, _TENSORS: with_tensors} if with_tensors else result


def _encodes(value: Any) -> bool:
    try:
        encode_values({"": value})
    except UnsupportedValueError:
        return False
    return True


def _tensors_out(value: Any) -> Any:
    """Replaces plain tensors inside a value by dtype, shape and bytes. DCP leaves tensors in tuples."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        data = value.detach().cpu().contiguous()
        return {_TENSORS: (data.dtype, tuple(data.shape), as_bits(data).numpy().tobytes())}
    if type(value) in (list, tuple):
        return type(value)(map(_tensors_out, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _tensors_out(item)) for key, item in value.items())
    return value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    items = value.values() if type(value) in (dict, OrderedDict) else value if type(value) in (list, tuple) else ()
    return any(map(_holds_tensor, items))


def _tensors_in(value: Any) -> Any:
    if type(value) is dict and list(value) == [_TENSORS]:
        dtype, shape, data = value[_TENSORS]
        return (
            torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        )
    if type(value) in (list, tuple):
        return type(value)(map(_tensors_in, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _tensors_in(item)) for key, item in value.items())
    return value


def unpack(blob: bytes | bytearray) -> Values:
    """Unpacks what `pack` made. Raises CorruptShardError for hostile bytes."""
    packed = {key: _decoded(key, value) for key, value in decode_values(memoryview(blob)).items()}
    for key in packed.pop(_TENSORS, ()):
        packed[key] = _tensors_in(packed[key])
    extra = packed.pop(_EXTRA, None)
    paths = packed.pop(_PATHS, {})
    per_rank = frozenset(packed.pop(_PER_RANK, ()))
    assumed_bytes, sample = packed.pop(_ASSUMED, 0), packed.pop(_SAMPLE, ())
    if type(assumed_bytes) is not int or not 0 <= assumed_bytes <= MAX_INTEGER:
        corrupt("values: assumed", "a number of bytes", assumed_bytes)
    if type(sample) is not tuple or not all(type(one) is int for one in sample):
        corrupt("values: sample", "a tuple of checksums", type(sample).__name__)
    return Values(packed, paths, per_rank, extra, assumed_bytes, sample)


def _decoded(key: str, value: Any) -> Any:
    if not isinstance(value, Blob):
        return value
    _check_torch_save_is_safe()
    try:
        return torch.load(io.BytesIO(bytes(value)), weights_only=True)
    except Exception as error:
        raise UnsupportedValueError(
            f"key {key!r}: expected a torch.save blob that loads with weights_only=True, found: {error}",
            hint="save plain values, or declare the class with torch.serialization.add_safe_globals",
            key=key,
        ) from error


def _check_torch_save_is_safe() -> None:
    """Refuses torch before 2.10, whose `weights_only` unpickler could run code (CVE-2025-32434, CVE-2026-24747)."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        raise ConfigError(
            f"allow_torch_save: expected torch 2.10 or newer, found {torch.__version__}",
            hint="upgrade torch, or save plain values",
        )
