"""Reads DCP's `.metadata` without running it: the unpickler builds only stand-ins for the objects in it.

`pickle.load` runs whatever a file says. This unpickler knows every name that an index of any version of torch has, and
refuses every other one. The result is plain data, checked field by field.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import CorruptShardError, DeniedError
from flashckpt.format.dtypes import ITEMSIZE, QUANTIZED
from flashckpt.types import Box

MAX_INDEX_BYTES = 4 << 30

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    (_SHARDED, "TensorProperties"),  # where older versions of torch had it
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint._fsspec_filesystem", "_StorageInfo"),
}
_ENUMS = {(_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING")}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath"}
_DTYPES = frozenset(ITEMSIZE) | QUANTIZED


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Location:
    file: str
    offset_bytes: int
    length_bytes: int
    transforms: tuple[str, ...]  # what was done to the bytes, e.g. compression; such bytes are refused


@dataclass(frozen=True, slots=True)
class DcpIndex:
    """The contents of `.metadata`."""

    tensors: dict[str, StoredTensor]
    values: frozenset[str]  # keys of values that are no tensors
    locations: dict[tuple[str, tuple[int, ...] | None], Location]  # (key, offsets of the region; None: a value)


def read_index(data: bytes, where: str) -> DcpIndex:
    """Raises DeniedError if the file names what no index has, and CorruptShardError if it is no index."""
    unpickler = _Unpickler(io.BytesIO(data), where)
    try:
        return _parse(unpickler.load(), where)
    except DeniedError:
        raise
    except Exception as error:  # a hostile pickle can make anything fail
        raise CorruptShardError(f"{where}: expected the index of a DCP checkpoint, found: {error!r}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where
        # New classes for each file, so that a file that changes them does not affect the next one.
        self._records = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in self._records:
            return self._records[key]
        if key in _ENUMS:
            return _ignored
        if module == "torch" and name in _DTYPES:
            return name
        if key == ("torch", "Size"):
            return _Size
        if key in (("torch.serialization", "_get_layout"), ("torch", "device")):
            return _ignored
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _joined
        if key == ("collections", "OrderedDict"):
            return dict
        if module == "builtins" and name in ("set", "frozenset", "list", "dict", "tuple"):
            return {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple}[name]
        if key == ("builtins", "getattr"):
            return _ignored  # how some versions of Python pickle a member of an enum
        raise DeniedError(
            f"{self._where}: expected the index of a DCP checkpoint, found that it asks for {module}.{name}",
            hint="nothing was run. If you trust the file, load it with torch.distributed.checkpoint and save it again",
            name=f"{module}.{name}",
        )


class _Record:
    """Stands in for a pickled object: keeps its state, and runs nothing of it."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        return

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __getitem__(self, name: str) -> Any:
        return self.__dict__["state"][name]

    def get(self, name: str) -> Any:
        state = self.__dict__.get("state")
        return state.get(name) if isinstance(state, dict) else None


class _Size(tuple[int, ...]):
    __slots__ = ()


def _ignored(*_: Any) -> None:
    """Stands in for layouts and memory formats, which are deprecated in DCP and always the plain ones."""


def _joined(*parts: str) -> str:
    return "/".join(map(str, parts)).replace("//", "/")


def _parse(found: Any, where: str) -> DcpIndex:
    _expect(_is(found, "Metadata"), where, "Metadata", found)
    tensors: dict[str, StoredTensor] = {}
    values = set()
    for key, one in found["state_dict_metadata"].items():
        _expect(isinstance(key, str), where, "a key", key)
        if _is(one, "BytesStorageMetadata"):
            values.add(key)
            continue
        _expect(_is(one, "TensorStorageMetadata"), where, f"the metadata of {key!r}", one)
        state = one["properties"].state
        dtype = state[0] if isinstance(state, tuple) else state["dtype"]
        _expect(isinstance(dtype, str) and dtype in _DTYPES, where, f"the dtype of {key!r}", dtype)
        shape = _naturals(one["size"])
        boxes = tuple(Box(_naturals(chunk["offsets"]), _naturals(chunk["sizes"])) for chunk in one["chunks"])
        for box in boxes:
            ends = [a + n for a, n in zip(box.offsets, box.sizes, strict=True)]
            fits = len(ends) == len(shape) and all(end <= size for end, size in zip(ends, shape, strict=True))
            _expect(fits, where, f"chunks of {key!r} within {shape}", box)
        tensors[key] = StoredTensor(dtype, shape, boxes)
    locations = {}
    storage = found["storage_data"]
    _expect(isinstance(storage, dict), where, "where the data lies (storage_data)", storage)
    for index, info in storage.items():
        _expect(_is(index, "MetadataIndex") and _is(info, "_StorageInfo"), where, "the place of a chunk", index)
        offsets = index.get("offset")
        file = info["relative_path"]
        plain = isinstance(file, str) and file != "" and not file.startswith("/") and ".." not in file.split("/")
        _expect(plain and "\0" not in file, where, "the name of a file beside it", file)
        (start,), (length,) = _naturals((info["offset"],)), _naturals((info["length"],))
        transforms = tuple(map(str, info.get("transform_descriptors") or ()))
        key = str(index["fqn"]), None if offsets is None else _naturals(offsets)
        locations[key] = Location(file, start, length, transforms)
    return DcpIndex(tensors, frozenset(values), locations)


def _is(found: Any, name: str) -> bool:
    return isinstance(found, _Record) and type(found).__name__ == name


def _naturals(found: Any) -> tuple[int, ...]:
    numbers = tuple(found)
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"expected numbers from 0 on, found {numbers!r}")
    return numbers


def _expect(fits: bool, where: str, what: str, found: Any) -> None:
    if not fits:
        raise CorruptShardError(f"{where}: expected {what}, found {str(found)[:80]!r}")
