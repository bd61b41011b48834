"""Ways to spoil a shard or a blob of values. Each takes a random source and bytes, and gives bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from flashckpt.v1 import format_pb2
from tests.fuzz.forge import (
    entry_bytes,
    header_of,
    message_of,
    with_entries,
    with_header,
    with_header_bytes,
    with_preamble,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

NUMBERS = (
    0, 1, 2, 7, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 8192, 65536, 2**24, 2**24 + 1, 2**26, 2**30,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61 - 1, 2**62, 2**63 - 64, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 64,
    2**64 - 1,
)  # fmt: skip


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


# Pieces of hostile protobuf: lengths beyond the end, deep groups, over-long varints, text that is none, every
# singular field of a header once more.
FRAGMENTS = (
    b"\x4a\xff\xff\xff\xff\x07",
    b"\x4a" + varint(2**63),
    b"\x0b" * 150,
    b"\x0b" * 40 + b"\x0c" * 40,
    b"\x0a\x03\xed\xa0\x80",
    b"\x0a\x02\xc3\x28",
    b"\x20" + b"\x80" * 9 + b"\x01",
    b"\x20" + b"\xff" * 11,
    b"\x20\x85\x80\x00",
    b"\x1a" + varint(300) + bytes(300),
    b"\x22" + varint(200) + b"\x80" * 199 + b"\x01",
    b"\xfa\xff\xff\xff\x0f\x01a",
    b"\x00\x00",
    b"\x07",
    b"\x0a\x00",
    b"\x0a\x00" * 500,
    b"\x12\x00" * 500,
    b"\x12\x02\x10\x00",
    *(format_pb2.ShardHeader(**{field: value}).SerializeToString() for field, value in (
        ("job", "other"), ("epoch", 5), ("nonce", 6), ("step", 7), ("seq", 8), ("rank", 1), ("world", 9),
        ("saved_at", 1.5), ("layout_fingerprint", bytes(16)), ("chunk_bytes", 8192), ("chunk_crcs", bytes(8)),
    )),
)  # fmt: skip


def truncate(source: random.Random, data: bytes) -> bytes:
    return data[: source.randrange(len(data) + 1)]


def append(source: random.Random, data: bytes) -> bytes:
    return data + source.choice([b"\0", source.randbytes(source.randrange(1, 100)), bytes(4096), data])


def flip_bits(source: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    # Mostly near the start, where nearly every byte has a meaning.
    reach = source.choice([64, 512, len(data)])
    for _ in range(source.choice([1, 1, 1, 2, 8])):
        if spoiled:
            spoiled[source.randrange(min(reach, len(spoiled)))] ^= 1 << source.randrange(8)
    return bytes(spoiled)


def splice(source: random.Random, data: bytes, other: bytes | None = None) -> bytes:
    """Insert, delete, overwrite or repeat a stretch of bytes."""
    start = source.randrange(len(data) + 1)
    length = source.choice([1, 2, 3, 8, 40, source.randrange(200)])
    end = min(len(data), start + length)
    piece = (
        source.choice(FRAGMENTS)
        if source.random() < 0.4
        else (other or data)[(at := source.randrange(len(other or data) + 1)) : at + length]
    )
    how = source.randrange(4)
    if how == 0:
        return data[:start] + piece + data[start:]
    if how == 1:
        return data[:start] + data[end:]
    if how == 2:
        return data[:start] + piece + data[start + len(piece) :]
    return data[:end] + data[start:end] + data[end:]


def _bytes_changed(source: random.Random, data: bytes) -> bytes:
    for _ in range(source.choice([1, 1, 2, 4])):
        data = source.choice([flip_bits, splice, splice, truncate])(source, data)
    return data


def lie_in_preamble(source: random.Random, data: bytes) -> bytes:
    field, bits = source.choice(
        [("version", 32), ("header_length", 32), ("header_crc", 32), ("data_offset", 64), ("data_length", 64)]
    )
    lies = {field: source.choice(NUMBERS) & (1 << bits) - 1}
    if source.random() < 0.3:  # two lies that agree on the length of the file
        offset = source.choice(NUMBERS) & 2**64 - 1
        lies = {"data_offset": offset, "data_length": (len(data) - offset) & 2**64 - 1}
    return with_preamble(data, **lies)


def lie_in_header(source: random.Random, data: bytes) -> bytes:
    lies = {}
    for _ in range(source.choice([1, 1, 2])):
        field = source.choice(
            [
                "job",
                "epoch",
                "nonce",
                "step",
                "seq",
                "rank",
                "world",
                "saved_at",
                "layout_fingerprint",
                "values_offset_bytes",
                "values_length_bytes",
                "chunk_bytes",
                "chunk_crcs",
            ]
        )
        if field == "job":
            lies[field] = source.choice(["", "x", "y" * 256, "z" * 257, "\0", "ü" * 128])
        elif field == "saved_at":
            lies[field] = source.choice([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), 5e-324])
        elif field in ("layout_fingerprint", "chunk_crcs"):
            lies[field] = source.randbytes(source.choice([0, 3, 4, 8, 12, 15, 16, 17]))
        else:
            bits = 32 if field in ("rank", "world", "chunk_bytes") else 64
            lies[field] = source.choice(NUMBERS) & (1 << bits) - 1
    return with_header(data, **lies)


def spoil_header_bytes(source: random.Random, data: bytes) -> bytes:
    return with_header_bytes(data, _bytes_changed(source, header_of(data)))


def add_header_field(source: random.Random, data: bytes) -> bytes:
    header, piece = header_of(data), source.choice(FRAGMENTS)
    return with_header_bytes(data, source.choice([header + piece, piece + header]))


def spoil_layout_bytes(source: random.Random, data: bytes) -> bytes:
    return with_header(data, layout=_bytes_changed(source, message_of(data).layout))


def lie_in_entry(source: random.Random, data: bytes) -> bytes:
    entries = _entries(data)
    if not entries:
        return lie_in_header(source, data)
    for _ in range(source.choice([1, 1, 2])):
        entry = source.choice(entries)
        field = source.choice(
            ["fqn", "path", "dtype", "global_shape", "offsets", "sizes", "offset_bytes", "length_bytes", "per_rank"]
        )
        if field == "fqn":
            entry.fqn = source.choice(["", "x", "k" * 4096, "k" * 4097, source.choice(entries).fqn])
        elif field == "dtype":
            entry.dtype = source.choice(["", "float32", "int32", "qint8", "complex128", "nonsense"])
        elif field == "per_rank":
            entry.per_rank = not entry.per_rank
        elif field == "path":
            how = source.randrange(4)
            if how == 0:
                del entry.path[:]
            elif how == 1:
                entry.path.add()
            elif how == 2:
                entry.path.add(index=source.choice(NUMBERS) - 2**63)
            else:
                entry.path.extend([format_pb2.PathPart(key="p")] * source.choice([1, 62, 63, 64]))
        elif field in ("offset_bytes", "length_bytes"):
            near = getattr(entry, field) + source.choice([-64, -1, 1, 64])
            setattr(entry, field, source.choice([source.choice(NUMBERS), near % 2**64]))
        else:
            dims = getattr(entry, field)
            if dims and source.random() < 0.7:
                dims[source.randrange(len(dims))] = source.choice(NUMBERS)
            else:
                dims.extend([source.choice(NUMBERS)] * source.choice([1, 1, 64]))
    return with_entries(data, *entries)


def rearrange_entries(source: random.Random, data: bytes) -> bytes:
    entries = _entries(data)
    if not entries:
        return add_header_field(source, data)
    how = source.randrange(4)
    if how == 0:
        source.shuffle(entries)
    elif how == 1:
        entries.insert(source.randrange(len(entries) + 1), source.choice(entries))
    elif how == 2:
        del entries[source.randrange(len(entries))]
    else:  # a tied copy of one, under a name of its own
        at = source.randrange(len(entries))
        tied = format_pb2.TensorEntry()
        tied.CopyFrom(entries[at])
        tied.fqn += "'"
        entries.insert(at + 1, tied)
    return with_entries(data, *entries)


def add_many_entries(source: random.Random, data: bytes) -> bytes:
    """Thousands of entries in few bytes: what expands most."""
    small = format_pb2.TensorEntry(path=[format_pb2.PathPart(index=0)], dtype="bool", global_shape=[0], sizes=[0])
    small.offsets.append(0)
    piece = source.choice([b"\x0a\x00", entry_bytes(small), b"\x0a\x04\x12\x02\x10\x00", b"\x0a\x02\x12\x00"])
    return with_header(data, layout=message_of(data).layout + piece * source.randrange(1, 3000))


def _entries(data: bytes) -> list[format_pb2.TensorEntry]:
    return list(format_pb2.Layout.FromString(message_of(data).layout).entries)


SHARD_MUTATORS: tuple[tuple[Callable[[random.Random, bytes], bytes], int], ...] = (
    (truncate, 3),
    (append, 2),
    (flip_bits, 6),
    (splice, 3),
    (lie_in_preamble, 6),
    (lie_in_header, 10),
    (spoil_header_bytes, 16),
    (add_header_field, 5),
    (spoil_layout_bytes, 16),
    (lie_in_entry, 20),
    (rearrange_entries, 8),
    (add_many_entries, 1),
)


def spoil_shard(source: random.Random, data: bytes) -> tuple[str, bytes]:
    """The name of what was done, and the result. Sometimes twice, while the first left something to parse."""
    (mutator,) = source.choices(*zip(*SHARD_MUTATORS, strict=True))
    name, spoiled = mutator.__name__, mutator(source, data)
    if source.random() < 0.2:
        try:
            spoiled = lie_in_header(source, spoiled)
            name += " + lie_in_header"
        except (DecodeError, struct.error, ValueError):
            pass
    return name, spoiled


VALUE_PIECES = (
    b"l\x01", b"t\x01", b"d\x01", b"S\x01", b"Z\x01", b"O\x01N", b"N", b"T", b"l" + varint(2**40), b"b" + varint(2**62),
    b"i\x01\x00", b"i\xff\xff\x03", b"f12345678", b"c" + bytes(16), b"s\x02\xc3\x28", b"r" + b"i\x01\x01" * 3,
    b":NNN", b"z\x02\x03\x04", b"D\x07float32", b"D\x05qint8", b"V\x03cpu", b"V\x06cuda:9", b"n\x03<f4\x00\x00\x80\x3f",
    b"n\x03|b1\x01", b"n\x06<M8[s]" + bytes(8), b"a\x03<i2\x02\x01\x02abcd", b"a\x03<i8\x03\x00" + varint(2**62) * 2,
    b"a\x03|b1\x01\x02\x01\x02", b"a\x02|O\x01\x00", b"X\x02ab", b"B\x02ab", b"l\x01" * 70, b"Z\x00", b"S\x00" * 50,
)  # fmt: skip


def spoil_values(source: random.Random, data: bytes, other: bytes) -> bytes:
    for _ in range(source.choice([1, 1, 2, 3])):
        how = source.randrange(5)
        if how == 0:
            data = flip_bits(source, data)
        elif how == 1:
            data = truncate(source, data)
        elif how == 2:
            data = splice(source, data, other)
        elif how == 3:
            at = source.randrange(len(data) + 1)
            data = data[:at] + source.choice(VALUE_PIECES) + data[at:]
        else:  # values of our own making under one key
            pieces = b"".join(source.choices(VALUE_PIECES, k=source.randrange(1, 6)))
            data = b"\x01\x01k" + source.choice([pieces, b"l" + varint(source.randrange(8)) + pieces])
    return data
