"""Encodes values. Only exact types, because an instance of a subclass would be decoded as another type."""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from flashckpt.errors import UnsupportedValueError
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
from flashckpt.format.refuse import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_DOUBLE = struct.Struct("<Bd")
_TWO_DOUBLES = struct.Struct("<Bdd")
_PLAIN_KEY = re.compile(r"\w+(?:\.\w+)*")


class _RefusedError(Exception):
    """Raised for a value that can't be saved. Each container that it passes adds its key, innermost first."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.keys: list[str] = []


class _Out(bytearray):
    """The encoded bytes, and the number of values in them."""

    items = 0


class Encoded:
    """A value that many keys have, encoded once. It is decoded as the value itself."""

    __slots__ = ("data", "items")

    def __init__(self, data: bytes, items: int) -> None:
        self.data, self.items = data, items


def encode_once(value: Any) -> Encoded | None:
    """Encodes a value for several keys. Returns None if it can't be encoded: no key is known here to name in an
    error."""
    out = _Out()
    try:
        _value(out, value, 1)
    except _RefusedError:
        return None
    return Encoded(bytes(out), out.items)


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Encodes `{fqn: value}` in its own order. Raises UnsupportedValueError, with the key, for what can't be
    encoded."""
    if not values:
        return b""
    out = _Out()
    _varint(out, len(values))
    try:
        for key, value in values.items():
            try:
                if type(key) is not str:
                    raise _refused_type(key)
                _text(out, key)
                _value(out, value, 1)
                if len(out) > MAX_VALUES_BYTES:
                    raise _RefusedError(f"more than {MAX_VALUES_BYTES} bytes of values", "save it as a tensor")
            except _RefusedError as error:
                error.keys.append(key if type(key) is str else shorten(key))
                raise
    except _RefusedError as error:
        path = "".join(reversed(error.keys))
        raise UnsupportedValueError(
            f"{path}: expected a value that can be saved, found {error.what}",
            hint=error.hint,
            key=path,
        ) from None
    return bytes(out)


def _refused_type(value: Any) -> _RefusedError:
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return _RefusedError(f"type {name}", "save its plain value, or pass allow_torch_save=True")


def _value(out: _Out, value: Any, depth: int) -> None:
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        encoder = _late_encoder(type(value))
        if encoder is None:
            raise _refused_type(value)
    if depth > MAX_VALUE_DEPTH:
        raise _RefusedError(f"more than {MAX_VALUE_DEPTH} levels of nesting", "does it contain itself?")
    out.items += 1
    if out.items > MAX_VALUE_ITEMS:
        raise _RefusedError(f"more than {MAX_VALUE_ITEMS} values", "save them as a tensor")
    encoder(out, value, depth)


def _varint(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _text(out: bytearray, text: str) -> None:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise _RefusedError(
            f"text with a lone surrogate: {shorten(text)}", "save bytes, for a file name os.fsencode(name)"
        ) from None
    _varint(out, len(encoded))
    out += encoded


def _none(out: _Out, value: None, depth: int) -> None:
    out.append(tags.NONE)


def _bool(out: _Out, value: bool, depth: int) -> None:
    out.append(tags.TRUE if value else tags.FALSE)


def _int(out: _Out, value: int, depth: int) -> None:
    length = value.bit_length() // 8 + 1
    if length > MAX_VALUE_INT_BYTES:
        raise _RefusedError(f"an integer of {length} bytes", f"at most {MAX_VALUE_INT_BYTES} bytes fit")
    out.append(tags.INT)
    _varint(out, length)
    out += value.to_bytes(length, "little", signed=True)


def _float(out: _Out, value: float, depth: int) -> None:
    out += _DOUBLE.pack(tags.FLOAT, value)


def _complex(out: _Out, value: complex, depth: int) -> None:
    out += _TWO_DOUBLES.pack(tags.COMPLEX, value.real, value.imag)


def _str(out: _Out, value: str, depth: int) -> None:
    out.append(tags.STR)
    _text(out, value)


def _raw(tag: int) -> Callable[[_Out, Any, int], None]:
    def encode(out: _Out, value: bytes | bytearray, depth: int) -> None:
        out.append(tag)
        _varint(out, len(value))
        out += value

    return encode


def _sequence(tag: int) -> Callable[[_Out, Any, int], None]:
    def encode(out: _Out, value: list[Any] | tuple[Any, ...], depth: int) -> None:
        out.append(tag)
        _varint(out, len(value))
        index = 0
        try:
            for item in value:
                _value(out, item, depth + 1)
                index += 1
        except _RefusedError as error:
            error.keys.append(f"[{index}]")
            raise

    return encode


def _dict(tag: int) -> Callable[[_Out, Any, int], None]:
    def encode(out: _Out, value: dict[Any, Any], depth: int) -> None:
        _refuse_same_hashes(value)
        out.append(tag)
        _varint(out, len(value))
        for key, item in value.items():
            try:
                _value(out, key, depth + 1)
                _value(out, item, depth + 1)
            except _RefusedError as error:
                plain = type(key) is str and _PLAIN_KEY.fullmatch(key)
                error.keys.append(f".{key}" if plain else f"[{shorten(key)}]")
                raise

    return encode


def _set(tag: int) -> Callable[[_Out, Any, int], None]:
    def encode(out: _Out, value: set[Any] | frozenset[Any], depth: int) -> None:
        _refuse_same_hashes(value)
        members = []
        for member in value:
            part = _Out()
            part.items = out.items
            try:
                _value(part, member, depth + 1)
            except _RefusedError as error:
                error.keys.append(f"{{{shorten(member)}}}")
                raise
            out.items = part.items
            members.append(bytes(part))
        # The order of a set differs between processes, so its members are ordered by their bytes.
        members.sort()
        out.append(tag)
        _varint(out, len(members))
        out += b"".join(members)

    return encode


def _refuse_same_hashes(keys: Iterable[Any]) -> None:
    """Refuses keys that a reader would refuse (see MAX_SAME_HASH)."""
    counts: dict[int, int] = {}
    for key in keys:
        if type(key) is not str:
            number = hash(key)
            counts[number] = counts.get(number, 0) + 1
            if counts[number] > MAX_SAME_HASH:
                raise _RefusedError(f"more than {MAX_SAME_HASH} keys with one hash", "use other keys")


def _encoded(out: _Out, value: Encoded, depth: int) -> None:
    if depth != 1:
        raise _RefusedError("a value that was encoded before, inside of another", "save it under a key of its own")
    out.items += value.items - 1
    out += value.data


def _slice(out: _Out, value: slice, depth: int) -> None:
    out.append(tags.SLICE)
    for part in (value.start, value.stop, value.step):
        _value(out, part, depth + 1)


def _range(out: _Out, value: range, depth: int) -> None:
    out.append(tags.RANGE)
    for part in (value.start, value.stop, value.step):
        _value(out, part, depth + 1)


def _torch_size(out: _Out, value: tuple[int, ...], depth: int) -> None:
    out.append(tags.TORCH_SIZE)
    _varint(out, len(value))
    for extent in value:
        if type(extent) is not int or not 0 <= extent <= MAX_INTEGER:
            raise _RefusedError(f"torch.Size with {shorten(extent)}", "save sizes that are plain numbers")
        _varint(out, extent)


def _torch_dtype(out: _Out, value: object, depth: int) -> None:
    name = str(value).removeprefix("torch.")
    if name not in ITEMSIZE and name not in QUANTIZED:
        raise _RefusedError(f"dtype {name}", "save its name as text")
    out.append(tags.TORCH_DTYPE)
    _text(out, name)


def _torch_device(out: _Out, value: object, depth: int) -> None:
    name = str(value)
    if not tags.DEVICE.fullmatch(name):
        raise _RefusedError(f"device {shorten(name)}", "save its name as text")
    out.append(tags.TORCH_DEVICE)
    _text(out, name)


def _numpy_scalar(out: _Out, value: Any, depth: int) -> None:
    name = value.dtype.str
    if not tags.NUMPY_DTYPE.fullmatch(name) or name[0] == ">":
        raise _RefusedError(f"numpy scalar of dtype {name}", "save its plain value, e.g. value.item()")
    out.append(tags.NUMPY_SCALAR)
    _text(out, name)
    out += value.tobytes()


def _numpy_array(out: _Out, value: Any, depth: int) -> None:
    name = value.dtype.str
    if not tags.NUMPY_DTYPE.fullmatch(name):
        raise _RefusedError(f"numpy array of dtype {value.dtype}", "save a list, e.g. value.tolist()")
    if value.ndim > MAX_VALUE_DIMS:
        raise _RefusedError(f"numpy array of {value.ndim} dimensions", f"at most {MAX_VALUE_DIMS} fit")
    out.append(tags.NUMPY_ARRAY)
    _text(out, name)
    _varint(out, value.ndim)
    for extent in value.shape:
        _varint(out, extent)
    out += value.tobytes()  # in C order, even if the array has another


_ENCODERS: dict[type, Callable[[_Out, Any, int], None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _raw(tags.BYTES),
    bytearray: _raw(tags.BYTEARRAY),
    tags.Blob: _raw(tags.BLOB),
    Encoded: _encoded,
    list: _sequence(tags.LIST),
    tuple: _sequence(tags.TUPLE),
    dict: _dict(tags.DICT),
    OrderedDict: _dict(tags.ORDERED_DICT),
    set: _set(tags.SET),
    frozenset: _set(tags.FROZENSET),
    slice: _slice,
    range: _range,
}


def _late_encoder(cls: type) -> Callable[[_Out, Any, int], None] | None:
    """Returns the encoder of a type of torch or numpy, which this module imports only if a value is of such a type."""
    encoder: Callable[[_Out, Any, int], None] | None = None
    if cls.__module__ == "torch":
        encoder = {"Size": _torch_size, "dtype": _torch_dtype, "device": _torch_device}.get(cls.__name__)
        if encoder is not None:
            import torch

            if cls is not getattr(torch, cls.__name__):
                encoder = None
    elif cls.__module__ == "numpy":
        import numpy as np

        if cls is np.ndarray:
            encoder = _numpy_array
        elif issubclass(cls, np.generic) and getattr(np, cls.__name__, None) is cls:
            encoder = _numpy_scalar
    if encoder is not None:
        _ENCODERS[cls] = encoder
    return encoder
