"""Loads the tensors of a Hugging Face model directory (safetensors), and nothing else of it.

Bytes are parsed here instead of by a package: each rank reads only the rows it needs, from a path or a URL alike, and
everything that a header says is checked before it is used.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import CorruptShardError, IncompatibleError, NotFoundError
from flashckpt.format.caps import MAX_DIMS, MAX_ENTRIES, MAX_INTEGER, MAX_NAME_BYTES
from flashckpt.load.read import copy_to_target
from flashckpt.save.values import Values
from flashckpt.state.cover import Piece
from flashckpt.types import Box, Generation, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashckpt.load.plan import Transfer
    from flashckpt.load.read import Target
    from flashckpt.persist.storage import Storage
    from flashckpt.state.cover import Index

PART = "model"  # prefix of the names of a manager's model; those of Hugging Face have none
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG = "config.json"
_MAX_HEADER_BYTES = 100 << 20  # as the format itself says
_MAX_JSON_BYTES = 256 << 20
_PIECE_BYTES = 64 << 20  # read at once, in whole rows
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class _Location:
    """The place of one tensor's bytes, and its dtype and shape."""

    file: str
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def is_safetensors(files: Mapping[str, Any]) -> bool:
    """Returns True if a directory with these files is a Hugging Face model."""
    return INDEX in files or SINGLE in files


class SafetensorsSource:
    """An OpenCheckpoint of a Hugging Face model. The format has no checksums."""

    def __init__(self, storage: Storage, name: str, step: int) -> None:
        """Raises CorruptShardError or NotFoundError if it is incomplete, and IncompatibleError if it is quantized."""
        self._storage = storage
        self._name = name
        self.where = f"{storage.root}/{name}"
        self.meta = None
        self.generation = Generation(0, 0, step, 0)
        self.world = 1
        self._refuse_quantized()
        self._locations = self._find()
        self.stored: Index = {}
        for key, one in self._locations.items():
            dtype = str(one.dtype).removeprefix("torch.")
            entry = TensorEntry(key, (key,), dtype, one.shape, Box((0,) * len(one.shape), one.shape), 0, 0, False)
            self.stored[key, None] = [Piece((0,), entry)]

    # --- as a catalogue -------------------------------------------------------------------------------------

    def saved_keys(self, rank: int, stored: Index) -> set[str]:
        return {fqn for fqn, _ in stored}

    def values(self, rank: int) -> Values:
        return Values()

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]:
        return False, None

    # --- tensors --------------------------------------------------------------------------------------------

    def read(
        self,
        transfers: Sequence[Transfer],
        targets: Sequence[Target],
        run: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        """Reads into the live tensors. Reads only the wanted rows of each tensor, some at a time."""
        for transfer in transfers:
            one, overlap = self._locations[transfer.entry.fqn], transfer.overlap
            if not overlap.volume:
                continue
            if not one.shape:
                row = run(functools.partial(self._rows, one, 0, 1))
                copy_to_target(row.reshape(()), overlap, targets[transfer.want.target])
                continue
            row_bytes = max(1, math.prod(one.shape[1:]) * one.dtype.itemsize)
            most = max(1, _PIECE_BYTES // row_bytes)
            first, end = overlap.offsets[0], overlap.offsets[0] + overlap.sizes[0]
            for start in range(first, end, most):
                count = min(most, end - start)
                rows = run(functools.partial(self._rows, one, start, count))
                box = Box((start, *overlap.offsets[1:]), (count, *overlap.sizes[1:]))
                for dim in range(1, len(one.shape)):
                    rows = rows.narrow(dim, box.offsets[dim], box.sizes[dim])
                copy_to_target(rows, box, targets[transfer.want.target])

    def _rows(self, one: _Location, start: int, count: int) -> torch.Tensor:
        row = math.prod(one.shape[1:]) * one.dtype.itemsize
        data = self._read(one.file, one.offset_bytes + start * row, count * row)
        # A bytearray: torch wants memory that may be written to.
        return torch.frombuffer(bytearray(data), dtype=one.dtype).reshape((count, *one.shape[1:]))

    def _read(self, file: str, offset: int, length: int) -> bytes:
        data = self._storage.read(f"{self._name}/{file}", offset, length)
        if data is None:
            raise NotFoundError(f"{self.where}/{file}: expected a file, found none")
        if len(data) != length:
            raise CorruptShardError(
                f"{self.where}/{file}: expected {length} bytes at {offset}, found {len(data)}: it is cut short"
            )
        return data

    # --- what the headers say -------------------------------------------------------------------------------

    def _refuse_quantized(self) -> None:
        data = self._storage.read(f"{self._name}/{_CONFIG}", 0, _MAX_JSON_BYTES)
        if data is not None and self._parsed(data, _CONFIG).get("quantization_config"):
            raise IncompatibleError(
                f"{self.where}/{_CONFIG}: expected plain numbers, found a quantization_config",
                hint="dequantize the model first: without its scales the weights would be wrong",
            )

    def _find(self) -> dict[str, _Location]:
        index = self._storage.read(f"{self._name}/{INDEX}", 0, _MAX_JSON_BYTES)
        if index is None:
            return {f"{PART}.{name}": one for name, one in self._header(SINGLE).items()}
        weight_map = self._parsed(index, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_ENTRIES:
            raise CorruptShardError(f"{self.where}/{INDEX}: expected a weight_map, found {str(weight_map)[:80]!r}")
        headers: dict[str, dict[str, _Location]] = {}
        found = {}
        for name, file in weight_map.items():
            # A name from a file never becomes a path unchecked.
            if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\0" in file:
                raise CorruptShardError(
                    f"{self.where}/{INDEX}: {name!r}: expected a *.safetensors file beside it, found {file!r}"
                )
            if file not in headers:
                headers[file] = self._header(file)
            if name not in headers[file]:
                raise CorruptShardError(f"{self.where}/{file}: expected {name!r}, as {INDEX} says, found none")
            found[f"{PART}.{name}"] = headers[file][name]
        return found

    def _header(self, file: str) -> dict[str, _Location]:
        length = int.from_bytes(self._read(file, 0, 8), "little")
        if length > _MAX_HEADER_BYTES:
            raise CorruptShardError(
                f"{self.where}/{file}: expected a header of at most {_MAX_HEADER_BYTES} bytes, found {length}"
            )
        content = self._parsed(self._read(file, 8, length), file)
        content.pop("__metadata__", None)
        if len(content) > MAX_ENTRIES:
            raise CorruptShardError(f"{self.where}/{file}: expected at most {MAX_ENTRIES} tensors, found more")
        found, end = {}, 0
        # In the order of their offsets: the format allows no holes and no overlaps.
        for name, info in sorted(content.items(), key=lambda one: _range(one[1])):
            location, (start, stop) = self._one(file, name, info, 8 + length)
            if start != end:
                raise CorruptShardError(f"{self.where}/{file}: {name!r}: expected its bytes at {end}, found {start}")
            end = stop
            found[name] = location
        total = 8 + length + end
        if end:
            self._read(file, total - 1, 1)
        if self._storage.read(f"{self._name}/{file}", total, 1):
            raise CorruptShardError(f"{self.where}/{file}: expected {total} bytes, found more")
        return found

    def _one(self, file: str, name: str, info: Any, base: int) -> tuple[_Location, tuple[int, int]]:
        where = f"{self.where}/{file}: {name[:200]!r}"
        if len(name.encode()) > MAX_NAME_BYTES or not name:
            raise CorruptShardError(f"{where}: expected a name of 1 to {MAX_NAME_BYTES} bytes")
        start, stop = _range(info)
        shape = info.get("shape") if isinstance(info, dict) else None
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_natural(one) for one in shape):
            raise CorruptShardError(f"{where}: expected a shape, found {str(shape)[:80]}")
        dtype = _DTYPES.get(info.get("dtype"))
        if dtype is None:
            raise IncompatibleError(
                f"{where}: expected one of {', '.join(_DTYPES)}, found dtype {info.get('dtype')!r}",
                hint="numbers of 8 bits and less are quantized: dequantize the model first",
            )
        if not 0 <= start <= stop <= MAX_INTEGER or stop - start != math.prod(shape) * dtype.itemsize:
            raise CorruptShardError(
                f"{where}: expected {math.prod(shape) * dtype.itemsize} bytes, found the range {start} to {stop}"
            )
        return _Location(file, base + start, dtype, tuple(shape)), (start, stop)

    def _parsed(self, data: bytes, file: str) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptShardError(f"{self.where}/{file}: expected JSON, found: {error}") from error
        if not isinstance(found, dict):
            raise CorruptShardError(f"{self.where}/{file}: expected a JSON object, found a {type(found).__name__}")
        return found


def _range(info: Any) -> tuple[int, int]:
    found = info.get("data_offsets") if isinstance(info, dict) else None
    if isinstance(found, list) and len(found) == 2 and all(_is_natural(one) for one in found):
        return found[0], found[1]
    return -1, -1  # the caller refuses it


def _is_natural(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MAX_INTEGER
