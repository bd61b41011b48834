"""Decodes packed values from hostile bytes: every count is compared with the bytes that are left before it is used.

A decoder takes (reader, depth); the reader is just behind the tag.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.errors import IncompatibleError
from flashckpt.format import value_tags as tags
from flashckpt.format.caps import (
    MAX_INTEGER,
    MAX_SAME_HASH,
    MAX_VALUE_DEPTH,
    MAX_VALUE_DIMS,
    MAX_VALUE_INT_BYTES,
    MAX_VALUE_ITEMS,
    MAX_VALUES_BYTES,
)
from flashckpt.format.dtypes import ITEMSIZE, QUANTIZED
from flashckpt.format.refuse import corrupt

if TYPE_CHECKING:
    from collections.abc import Callable

_DOUBLE = struct.Struct("<d")
_TWO_DOUBLES = struct.Struct("<dd")


class _Reader:
    __slots__ = ("data", "items", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.items = 0

    def refuse(self, expected: str, found: Any) -> NoReturn:
        corrupt(f"values: byte {self.position}", expected, found)

    def byte(self) -> int:
        position = self.position
        if position >= len(self.data):
            self.refuse("another byte", "the end")
        self.position = position + 1
        return self.data[position]

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.position:
            self.refuse(f"{length} more bytes", f"{len(self.data) - self.position}")
        self.position += length

    def take(self, length: int) -> bytes:
        position = self.position
        self.skip(length)
        return self.data[position : self.position]

    def varint(self) -> int:
        byte = self.byte()
        if byte < 0x80:
            return byte
        number, shift = byte & 0x7F, 7
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 56:
                self.refuse(f"a number of at most {MAX_INTEGER}", "a longer one")
        if byte == 0:
            self.refuse("the shortest form of a number", "a longer one")
        return number

    def count(self, bytes_each: int = 1) -> int:
        """Reads a number of items of at least `bytes_each` bytes each. Refuses it if fewer bytes are left."""
        number = self.varint()
        if number > (len(self.data) - self.position) // bytes_each:
            self.refuse(f"at most {len(self.data) - self.position} bytes' worth of items", f"{number}")
        return number

    def text(self) -> str:
        start = self.position
        try:
            return self.take(self.varint()).decode()
        except UnicodeDecodeError as error:
            corrupt(f"values: byte {start}", "valid UTF-8", str(error))

    def value(self, depth: int) -> Any:
        tag = self.byte()
        decoder = _DECODERS.get(tag)
        if decoder is None:
            self.position -= 1
            corrupt(f"values: byte {self.position}", "a known tag", f"{tag:#04x}")
        if depth > MAX_VALUE_DEPTH:
            self.refuse(f"at most {MAX_VALUE_DEPTH} levels", "more")
        self.items += 1
        if self.items > MAX_VALUE_ITEMS:
            self.refuse(f"at most {MAX_VALUE_ITEMS} values", "more")
        return decoder(self, depth)


def decode_values(data: bytes | memoryview) -> dict[str, Any]:
    """Decodes what `encode_values` made. Raises CorruptShardError for anything that it could not have written, and
    IncompatibleError for a dtype or device that the installed torch does not have."""
    if len(data) > MAX_VALUES_BYTES:
        corrupt("values", f"at most {MAX_VALUES_BYTES} bytes", f"{len(data)}")
    # A copy, because a view of shared memory could change between a check and the use.
    reader = _Reader(bytes(data))
    values: dict[str, Any] = {}
    if not reader.data:
        return values
    count = reader.count(2)
    if count == 0:
        reader.refuse("no bytes at all for no values", f"{len(reader.data)} bytes")
    for _ in range(count):
        key = reader.text()
        if key in values:
            reader.refuse("each key once", key)
        values[key] = reader.value(1)
    if reader.position != len(reader.data):
        reader.refuse("the end", f"{len(reader.data) - reader.position} more bytes")
    return values


def _int(reader: _Reader, depth: int) -> int:
    length = reader.varint()
    if not 1 <= length <= MAX_VALUE_INT_BYTES:
        reader.refuse(f"an integer of 1 to {MAX_VALUE_INT_BYTES} bytes", f"{length}")
    number = int.from_bytes(reader.take(length), "little", signed=True)
    if length != number.bit_length() // 8 + 1:
        reader.refuse("the shortest form of an integer", "a longer one")
    return number


def _float(reader: _Reader, depth: int) -> float:
    number: float = _DOUBLE.unpack(reader.take(8))[0]
    return number


def _complex(reader: _Reader, depth: int) -> complex:
    return complex(*_TWO_DOUBLES.unpack(reader.take(16)))


def _sequence(make: Callable[[list[Any]], Any]) -> Callable[[_Reader, int], Any]:
    def decode(reader: _Reader, depth: int) -> Any:
        count = reader.count()
        below = depth + 1
        return make([reader.value(below) for _ in range(count)])

    return decode


def _dict(make: Callable[[], dict[Any, Any]]) -> Callable[[_Reader, int], Any]:
    def decode(reader: _Reader, depth: int) -> dict[Any, Any]:
        count = reader.count(2)
        result = make()
        hashes: dict[int, int] = {}
        for _ in range(count):
            key = reader.value(depth + 1)
            if type(key) is not str:
                _count_hash(reader, key, hashes)
            if key in result:
                reader.refuse("each key once", key)
            result[key] = reader.value(depth + 1)
        return result

    return decode


def _set(make: Callable[[set[Any]], Any]) -> Callable[[_Reader, int], Any]:
    def decode(reader: _Reader, depth: int) -> Any:
        count = reader.count()
        result: set[Any] = set()
        hashes: dict[int, int] = {}
        previous = b""
        for _ in range(count):
            start = reader.position
            member = reader.value(depth + 1)
            encoded = reader.data[start : reader.position]
            if encoded < previous:
                reader.refuse("members ordered by their bytes", "another order")
            previous = encoded
            if type(member) is not str:
                _count_hash(reader, member, hashes)
            if member in result:
                reader.refuse("each member once", member)
            result.add(member)
        return make(result)

    return decode


def _count_hash(reader: _Reader, key: Any, hashes: dict[int, int]) -> None:
    try:
        number = hash(key)
    except (TypeError, ValueError, OverflowError):
        reader.refuse("a hashable key", type(key).__name__)
    hashes[number] = hashes.get(number, 0) + 1
    if hashes[number] > MAX_SAME_HASH:
        reader.refuse(f"at most {MAX_SAME_HASH} keys with one hash", "more")


def _slice(reader: _Reader, depth: int) -> slice:
    return slice(reader.value(depth + 1), reader.value(depth + 1), reader.value(depth + 1))


def _range(reader: _Reader, depth: int) -> range:
    parts = [reader.value(depth + 1) for _ in range(3)]
    if any(type(part) is not int for part in parts) or parts[2] == 0:
        reader.refuse("three integers with a step", parts)
    return range(*parts)


def _torch_size(reader: _Reader, depth: int) -> Any:
    import torch

    return torch.Size([reader.varint() for _ in range(reader.count())])


def _torch_dtype(reader: _Reader, depth: int) -> Any:
    import torch

    name = reader.text()
    if name not in ITEMSIZE and name not in QUANTIZED:
        reader.refuse("a torch dtype", name)
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise IncompatibleError(f"values: torch {torch.__version__} has no dtype {name}")
    return dtype


def _torch_device(reader: _Reader, depth: int) -> Any:
    import torch

    name = reader.text()
    if not tags.DEVICE.fullmatch(name):
        reader.refuse("a device", name)
    try:
        return torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise IncompatibleError(f"values: torch {torch.__version__} has no device {name}") from error


def _numpy_dtype(reader: _Reader) -> Any:
    import numpy as np

    name = reader.text()
    if not tags.NUMPY_DTYPE.fullmatch(name):
        reader.refuse("a numpy dtype of numbers or times", name)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        corrupt(f"values: byte {reader.position}", "a numpy dtype", str(error))
    if dtype.str != name:
        reader.refuse(f"the dtype's own name {dtype.str}", name)
    return dtype


def _numpy(reader: _Reader, dtype: Any, count: int) -> Any:
    """Reads `count` elements into an array with its own memory."""
    import numpy as np

    start = reader.position
    reader.skip(count * dtype.itemsize)
    array = np.frombuffer(reader.data, dtype, count, start).copy() if count else np.empty(0, dtype)
    if dtype.kind == "b" and count and array.view(np.uint8).max() > 1:
        reader.refuse("booleans of 0 or 1", "another byte")
    return array


def _numpy_scalar(reader: _Reader, depth: int) -> Any:
    dtype = _numpy_dtype(reader)
    if dtype.str[0] == ">":
        reader.refuse("a little-endian scalar", dtype.str)
    return _numpy(reader, dtype, 1)[0]


def _numpy_array(reader: _Reader, depth: int) -> Any:
    dtype = _numpy_dtype(reader)
    dims = reader.varint()
    if dims > MAX_VALUE_DIMS:
        reader.refuse(f"at most {MAX_VALUE_DIMS} dimensions", f"{dims}")
    shape = [reader.varint() for _ in range(dims)]
    count = 1
    for extent in shape:
        count *= extent
    flat = _numpy(reader, dtype, count)
    try:
        return flat.reshape(shape)
    except (ValueError, OverflowError) as error:  # no elements, but extents beyond what numpy can address
        corrupt(f"values: byte {reader.position}", "a shape numpy can hold", str(error))


_DECODERS: dict[int, Callable[[_Reader, int], Any]] = {
    tags.NONE: lambda reader, depth: None,
    tags.TRUE: lambda reader, depth: True,
    tags.FALSE: lambda reader, depth: False,
    tags.INT: _int,
    tags.FLOAT: _float,
    tags.COMPLEX: _complex,
    tags.STR: lambda reader, depth: reader.text(),
    tags.BYTES: lambda reader, depth: reader.take(reader.varint()),
    tags.BYTEARRAY: lambda reader, depth: bytearray(reader.take(reader.varint())),
    tags.BLOB: lambda reader, depth: tags.Blob(reader.take(reader.varint())),
    tags.LIST: _sequence(lambda items: items),
    tags.TUPLE: _sequence(tuple),
    tags.DICT: _dict(dict),
    tags.ORDERED_DICT: _dict(OrderedDict),
    tags.SET: _set(lambda members: members),
    tags.FROZENSET: _set(frozenset),
    tags.SLICE: _slice,
    tags.RANGE: _range,
    tags.TORCH_SIZE: _torch_size,
    tags.TORCH_DTYPE: _torch_dtype,
    tags.TORCH_DEVICE: _torch_device,
    tags.NUMPY_SCALAR: _numpy_scalar,
    tags.NUMPY_ARRAY: _numpy_array,
}
