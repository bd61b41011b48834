"""Encodes and decodes the layout of a shard's tensors, and checks the rules of its entries.

The same checks run before encoding and after decoding, so that every sealed layout can be read.
"""

from __future__ import annotations

import hashlib

from google.protobuf.message import DecodeError, EncodeError

from flashckpt import native
from flashckpt.errors import InternalError, UnsupportedValueError
from flashckpt.format.caps import (
    ENTRY_ALIGNMENT_BYTES,
    FINGERPRINT_BYTES,
    MAX_DIMS,
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    MAX_INTEGER,
    MAX_NAME_BYTES,
    MAX_PATH_PARTS,
)
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.refuse import corrupt, corrupt_because, shorten
from flashckpt.types import Box, Layout, TensorEntry
from flashckpt.v1 import format_pb2

_ENTRIES_TAG = 0x0A  # Layout.entries: field 1, length-delimited
_ITEM_BYTES = dict(ITEMSIZE)


def encode_layout(layout: Layout) -> bytes:
    """Encodes a layout, always to the same bytes. Refuses what `decode_layout` would refuse."""
    entries = layout.entries
    if len(entries) > MAX_ENTRIES:
        raise UnsupportedValueError(f"layout: expected at most {MAX_ENTRIES} entries, found {len(entries)}")
    rules = _RangeRules()
    for index, entry in enumerate(entries):
        where = f"layout: entry {index}"
        if reason := _refuse_name(entry):
            hint = "rename the key or save the tensor in another form"
            raise UnsupportedValueError(f"{where} ({shorten(entry.fqn)}): {reason}", hint=hint, key=entry.fqn)
        if reason := rules.refuse(entry):
            raise InternalError(f"{where} ({shorten(entry.fqn)}): {reason}")
    parts = bytearray()
    for entry in entries:
        try:
            encoded = _to_message(entry).SerializeToString(deterministic=True)
        except (EncodeError, TypeError, ValueError) as error:
            raise InternalError(f"layout: entry {shorten(entry.fqn)} can't be encoded: {error}") from error
        if len(encoded) > MAX_ENTRY_BYTES:
            raise UnsupportedValueError(
                f"layout: entry {shorten(entry.fqn)}: expected at most {MAX_ENTRY_BYTES} bytes of metadata, "
                f"found {len(encoded)}",
                hint="use shorter keys",
                key=entry.fqn,
            )
        parts.append(_ENTRIES_TAG)
        _append_varint(parts, len(encoded))
        parts += encoded
    return bytes(parts)


def fingerprint(layout_bytes: bytes) -> bytes:
    """Returns a hash of the layout: two shards with the same fingerprint have the same layout."""
    return hashlib.blake2b(layout_bytes, digest_size=FINGERPRINT_BYTES).digest()


def decode_layout(data: bytes, where: str = "layout") -> Layout:
    """Decodes hostile bytes: one entry at a time, so that the cost is bounded by the entries accepted so far."""
    caps = (MAX_ENTRIES, MAX_ENTRY_BYTES, MAX_NAME_BYTES, MAX_PATH_PARTS, MAX_DIMS, ENTRY_ALIGNMENT_BYTES)
    plain = native.layout_entries(data, _ITEM_BYTES, caps, TensorEntry, Box)
    if plain is not None and len({entry.fqn for entry in plain}) == len(plain):
        return Layout(tuple(plain))
    return _decode_layout(data, where)


def _decode_layout(data: bytes, where: str) -> Layout:
    """Checks every rule, with a message for each. The native core only decodes layouts that keep all of them."""
    entries: list[TensorEntry] = []
    rules = _RangeRules()
    position, size = 0, len(data)
    while position < size:
        if len(entries) == MAX_ENTRIES:
            corrupt(where, f"at most {MAX_ENTRIES} entries", "more")
        if data[position] != _ENTRIES_TAG:
            corrupt(f"{where}: byte {position}", "the start of an entry (0x0a)", f"{data[position]:#04x}")
        length, position = _entry_length(data, position + 1, where)
        of_entry = f"{where}: entry {len(entries)}"
        entry = _from_bytes(data[position : position + length], of_entry)
        if reason := _refuse_name(entry) or rules.refuse(entry):
            corrupt_because(f"{of_entry} ({shorten(entry.fqn)})", reason)
        entries.append(entry)
        position += length
    return Layout(tuple(entries))


def end_bytes(layout: Layout) -> int:
    """Returns the end of the last tensor in the data area. Ranges are ordered, so that it is the last entry's end."""
    if not layout.entries:
        return 0
    last = layout.entries[-1]
    return last.offset_bytes + last.length_bytes


def _append_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _entry_length(data: bytes, position: int, where: str) -> tuple[int, int]:
    """Reads the varint at `position`. Refuses a form that is not the shortest, and an entry that is cut off."""
    length = shift = 0
    start = position
    for byte in data[start : start + 3]:  # three bytes reach 2 MiB, far above MAX_ENTRY_BYTES
        position += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        corrupt(f"{where}: byte {start}", f"an entry length of at most {MAX_ENTRY_BYTES}", data[start:position])
    if position - start > 1 and byte == 0:
        corrupt(f"{where}: byte {start}", "the shortest varint", data[start:position])
    if length > min(MAX_ENTRY_BYTES, len(data) - position):
        corrupt(
            f"{where}: byte {start}",
            f"an entry of at most {min(MAX_ENTRY_BYTES, len(data) - position)} bytes",
            f"{length}",
        )
    return length, position


def _to_message(entry: TensorEntry) -> format_pb2.TensorEntry:
    return format_pb2.TensorEntry(
        fqn=entry.fqn,
        path=[
            format_pb2.PathPart(key=part) if isinstance(part, str) else format_pb2.PathPart(index=part)
            for part in entry.path
        ],
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        offsets=entry.box.offsets,
        sizes=entry.box.sizes,
        offset_bytes=entry.offset_bytes,
        length_bytes=entry.length_bytes,
        per_rank=entry.per_rank,
    )


def _from_bytes(data: bytes, where: str) -> TensorEntry:
    try:
        message = format_pb2.TensorEntry.FromString(data)
    except DecodeError as error:
        corrupt(where, "a TensorEntry", str(error))
    # Unknown fields, repeated singular fields, over-long or overflowing varints, a true that is not 1: all are refused,
    # so that no two readers can interpret one shard differently.
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        corrupt(where, "the canonical encoding of what it says", "another one")
    # Check the counts first: then nothing below iterates over more elements than the caps allow.
    if len(message.path) > MAX_PATH_PARTS:
        corrupt(where, f"at most {MAX_PATH_PARTS} path parts", f"{len(message.path)}")
    shape, offsets, sizes = message.global_shape, message.offsets, message.sizes
    if max(len(shape), len(offsets), len(sizes)) > MAX_DIMS:
        corrupt(where, f"at most {MAX_DIMS} dimensions", f"{len(shape)}, {len(offsets)}, {len(sizes)}")
    path: list[str | int] = []
    for part in message.path:
        kind = part.WhichOneof("part")
        if kind is None:
            corrupt(where, "a key or an index in every path part", "neither")
        path.append(part.key if kind == "key" else part.index)
    return TensorEntry(
        message.fqn,
        tuple(path),
        message.dtype,
        tuple(shape),
        Box(tuple(offsets), tuple(sizes)),
        message.offset_bytes,
        message.length_bytes,
        message.per_rank,
    )


def _refuse_name(entry: TensorEntry) -> str:
    """Returns why the key, path, dtype or number of dimensions can't be in a shard; "" if they can."""
    if reason := _refuse_text(entry.fqn):
        return f"key: {reason}"
    if not 1 <= len(entry.path) <= MAX_PATH_PARTS:
        return f"expected a path of 1 to {MAX_PATH_PARTS} parts, found {len(entry.path)}"
    for part in entry.path:
        if type(part) is str:
            if reason := _refuse_text(part):
                return f"path: {reason}"
        elif type(part) is not int:
            return f"expected str or int in the path, found {type(part).__name__}"
        elif not -MAX_INTEGER - 1 <= part <= MAX_INTEGER:
            return f"expected a path index of at most 64 bits, found {part.bit_length()} bits"
    if entry.dtype not in ITEMSIZE:
        return f"expected a dtype with bytes of its own, found {shorten(entry.dtype)}"
    if len(entry.global_shape) > MAX_DIMS:
        return f"expected at most {MAX_DIMS} dimensions, found {len(entry.global_shape)}"
    return ""


def _refuse_text(text: str) -> str:
    if text.isascii():
        length = len(text)
    else:
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            return f"expected text that UTF-8 can hold, found {shorten(text)}"
    if length > MAX_NAME_BYTES:
        return f"expected at most {MAX_NAME_BYTES} bytes, found {length}"
    return ""


class _RangeRules:
    """Checks the rules about boxes and byte ranges, which depend on the entries before."""

    __slots__ = ("_boxes", "_end", "_first", "_previous")

    def __init__(self) -> None:
        self._previous: TensorEntry | None = None
        self._end = 0
        self._first: dict[str, TensorEntry] = {}
        # Boxes of keys with several entries. As text, because Python's hash of text is keyed; integers could be chosen
        # so that their hashes collide.
        self._boxes: set[tuple[str, str]] = set()

    def refuse(self, entry: TensorEntry) -> str:
        """Returns why the next entry can't be in a shard; "" if it can."""
        reason = _refuse_box(entry) or self._refuse_range(entry) or self._refuse_sibling(entry)
        self._previous = entry
        self._end = max(self._end, entry.offset_bytes + entry.length_bytes)
        return reason

    def _refuse_range(self, entry: TensorEntry) -> str:
        offset, length, previous = entry.offset_bytes, entry.length_bytes, self._previous
        if offset < 0 or offset % ENTRY_ALIGNMENT_BYTES:
            return f"expected an offset that is a multiple of {ENTRY_ALIGNMENT_BYTES}, found {offset}"
        if offset + length > MAX_INTEGER:
            return f"expected a range that ends below 2^63, found {offset}+{length}"
        if offset >= self._end:
            return ""
        if previous is None or (offset, length) != (previous.offset_bytes, previous.length_bytes):
            return f"expected a range from {self._end} on or exactly the previous one, found {offset}+{length}"
        if entry.dtype != previous.dtype or entry.box.sizes != previous.box.sizes:
            return (
                f"expected {previous.dtype}{list(previous.box.sizes)} like {shorten(previous.fqn)}, "
                f"with which it shares its bytes, found {entry.dtype}{list(entry.box.sizes)}"
            )
        return ""

    def _refuse_sibling(self, entry: TensorEntry) -> str:
        """Returns why an entry with the key of an earlier one is not another region of the same tensor; "" if it is."""
        first = self._first.setdefault(entry.fqn, entry)
        if first is entry:
            return ""
        if (entry.path, entry.dtype, entry.global_shape, entry.per_rank) != (
            first.path,
            first.dtype,
            first.global_shape,
            first.per_rank,
        ):
            return "expected the same path, dtype, shape and ownership in every entry of a key, found others"
        self._boxes.add((first.fqn, _box_text(first.box)))
        box = (entry.fqn, _box_text(entry.box))
        if box in self._boxes:
            return f"expected each region once, found {entry.box.offsets} + {entry.box.sizes} again"
        self._boxes.add(box)
        return ""


def _refuse_box(entry: TensorEntry) -> str:
    shape, offsets, sizes = entry.global_shape, entry.box.offsets, entry.box.sizes
    if not len(shape) == len(offsets) == len(sizes):
        return f"expected {len(shape)} offsets and sizes like the shape, found {len(offsets)} and {len(sizes)}"
    volume = 1
    for extent, start, size in zip(shape, offsets, sizes, strict=True):
        if start < 0 or size < 0 or start + size > extent or extent > MAX_INTEGER:
            return f"expected a region within {list(shape)}, found {list(offsets)} + {list(sizes)}"
        volume *= size
    expected = volume * ITEMSIZE[entry.dtype]
    if entry.length_bytes != expected:
        return f"expected {expected} bytes for {entry.dtype}{list(sizes)}, found {entry.length_bytes}"
    return ""


def _box_text(box: Box) -> str:
    return f"{box.offsets}{box.sizes}"
