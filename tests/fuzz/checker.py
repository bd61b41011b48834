"""A second reader of shards, written from docs/format.md alone.

It shares no code with flashckpt.format: own wire parser, own tables, another library's CRC. The fuzzer and the
golden tests hold the two against each other.
"""

from __future__ import annotations

import hashlib
import math
import struct

import google_crc32c

SIZES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
ITEM = {name: size for size, names in SIZES.items() for name in names.split()}


class Bad(Exception):
    """A rule of docs/format.md does not hold."""


def need(condition: object, rule: str) -> None:
    if not condition:
        raise Bad(rule)


def varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    start = at
    while True:
        need(at < len(data) and at - start < 10, "varint")
        byte = data[at]
        number |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            break
    need(at - start == 1 or byte, "shortest varint")
    need(number < 1 << 64, "64 bits")
    return number, at


def fields(data: bytes) -> list[tuple[int, int, object]]:
    """(number, wire type, payload) of a message without groups."""
    at, found = 0, []
    while at < len(data):
        tag, at = varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            payload, at = varint(data, at)
        else:
            if wire == 2:
                length, at = varint(data, at)
            else:
                need(wire in (1, 5), "wire type")
                length = 8 if wire == 1 else 4
            need(length <= len(data) - at, "field within message")
            payload, at = data[at : at + length], at + length
        found.append((number, wire, payload))
    return found


def single(data: bytes, kinds: dict[int, str], repeated: tuple[int, ...] = ()) -> dict[int, object]:
    """Fields by number, in that order; singular ones once and not with their default."""
    result: dict[int, object] = {number: [] for number in repeated}
    last = 0
    for number, wire, payload in fields(data):
        need(number in kinds, "known field")
        need(number >= last, "fields in order")
        last = number
        kind = kinds[number]
        need(wire == {"int": 0, "bool": 0, "fixed": 1, "double": 1}.get(kind, 2), "wire type of field")
        if number in repeated and kind == "message":
            result[number].append(payload)
            continue
        need(number not in result or number in repeated, "singular field once")
        if number in repeated:
            need(not result[number] and payload, "packed field once")
            at = 0
            while at < len(payload):
                element, at = varint(payload, at)
                result[number].append(element)
            continue
        if kind == "string":
            payload.decode()
        value = {
            "int": lambda p: p,
            "bool": lambda p: p == 1,
            "fixed": lambda p: struct.unpack("<Q", p)[0],
            "double": lambda p: struct.unpack("<d", p)[0],
            "string": lambda p: p.decode(),
            "bytes": bytes,
        }[kind](payload)
        need(payload not in (0, b"", bytes(8)) if kind != "bool" else value, "no default values")
        result[number] = value
    return result


HEADER = {
    1: "string", 2: "int", 3: "fixed", 4: "int", 5: "int", 6: "int", 7: "int", 8: "double",
    9: "bytes", 10: "bytes", 11: "int", 12: "int", 13: "int", 14: "bytes",
}  # fmt: skip
ENTRY = {
    1: "string", 2: "message", 3: "string", 4: "packed", 5: "packed", 6: "packed",
    7: "int", 8: "int", 9: "bool",
}  # fmt: skip


def check(shard: bytes) -> dict[str, object]:
    """What the shard says, or Bad. Reads the data area too."""
    try:
        return _check(shard)
    except UnicodeDecodeError as error:
        raise Bad("UTF-8") from error


def _check(shard: bytes) -> dict[str, object]:
    need(len(shard) >= 64, "P1")
    magic, version, header_length, header_crc = struct.unpack_from("<8sIII", shard)
    data_offset, data_length = struct.unpack_from("<QQ", shard, 24)
    need(magic == bytes.fromhex("8946434b50540d0a"), "P3")
    need(struct.unpack_from("<I", shard, 60)[0] == google_crc32c.value(shard[:60]), "P4")
    need(version == 1, "P5")
    need(shard[20:24] == bytes(4) and shard[40:60] == bytes(20), "P6")
    need(1 <= header_length <= 2**26, "P7")
    need(data_offset % 4096 == 0 and 64 + header_length <= data_offset <= 67_112_960, "P8")
    need(data_offset + data_length == len(shard), "F1")
    header = shard[64 : 64 + header_length]
    need(google_crc32c.value(header) == header_crc, "H1")
    need(not shard[64 + header_length : data_offset].strip(b"\0"), "F3")
    found = single(header, HEADER)
    job = found.get(1, "")
    identity = tuple(found.get(number, 0) for number in (2, 3, 4, 5, 6, 7))
    need(1 <= len(job.encode()) <= 256, "H4")
    need(max(identity[0], identity[2], identity[3]) < 2**63, "H5")
    need(1 <= identity[5] <= 2**24 and identity[4] < identity[5], "H6")
    saved_at = found.get(8, 0.0)
    need(math.isfinite(saved_at) and saved_at >= 0, "H7")
    layout = found.get(9, b"")
    need(found.get(10) == hashlib.blake2b(layout, digest_size=16).digest(), "H8")
    chunk = found.get(13, 0)
    need(chunk.bit_count() == 1 and 2**12 <= chunk <= 2**26, "H9")
    crcs = found.get(14, b"")
    need(len(crcs) == 4 * math.ceil(data_length / chunk), "H10")
    entries = _entries(layout)
    values = (found.get(11, 0), found.get(12, 0))
    end = max((entry[5] + entry[6] for entry in entries), default=0)
    need(values[0] % 64 == 0 and values[1] <= 2**30 and end <= values[0], "H11")
    need(values[0] + values[1] <= data_length, "H11")
    data = shard[data_offset:]
    bad = [
        index
        for index, (crc,) in enumerate(struct.iter_unpack("<I", crcs))
        if crc != google_crc32c.value(data[index * chunk : (index + 1) * chunk])
    ]
    return {
        "job": job,
        "identity": identity,
        "entries": entries,
        "values": values,
        "chunk_bytes": chunk,
        "chunk_crcs": crcs,
        "saved_at": saved_at,
        "data": (data_offset, data_length),
        "bad_chunks": bad,
    }


def _entries(layout: bytes) -> list[tuple]:
    found = []
    at = 0
    while at < len(layout):
        need(layout[at] == 0x0A, "L1")
        length, at = varint(layout, at + 1)
        need(length <= 16384 and length <= len(layout) - at, "L1")
        raw, at = layout[at : at + length], at + length
        entry = single(raw, ENTRY, repeated=(2, 4, 5, 6))
        fqn, dtype = entry.get(1, ""), entry.get(3, "")
        shape, offsets, sizes = entry[4], entry[5], entry[6]
        need(len(fqn.encode()) <= 4096, "L4")
        need(1 <= len(entry[2]) <= 64, "L5")
        path = tuple(_part(part) for part in entry[2])
        need(dtype in ITEM, "L6")
        need(len(shape) == len(offsets) == len(sizes) <= 64, "L7")
        need(all(o + s <= d < 2**63 for o, s, d in zip(offsets, sizes, shape, strict=True)), "L8")
        start, size = entry.get(7, 0), entry.get(8, 0)
        need(size == math.prod(sizes) * ITEM[dtype], "L9")
        need(start % 64 == 0 and start + size < 2**63, "L10")
        found.append((fqn, path, dtype, tuple(shape), (tuple(offsets), tuple(sizes)), start, size, entry.get(9, False)))
    need(len(found) <= 2**20, "L2")
    need([entry[5:7] for entry in found] == sorted(entry[5:7] for entry in found), "L11")
    owners: dict[tuple[int, int], tuple] = {}
    for entry in found:
        owner = owners.setdefault(entry[5:7], entry)
        if entry[6]:
            need((owner[2], owner[4][1]) == (entry[2], entry[4][1]), "L12")
    # Each byte of the data area at most once, and no empty range inside another one.
    ends = 0
    for start, size in owners:
        need(start >= ends, "L11")
        ends = start + size
    keys = {}
    for entry in found:
        meaning = (entry[1], entry[2], entry[3], entry[7])
        need(keys.setdefault(entry[0], meaning) == meaning, "L13")
    need(len({(entry[0], entry[4]) for entry in found}) == len(found), "L14")
    return found


def _part(raw: bytes) -> str | int:
    found = fields(raw)
    need(len(found) == 1, "L5")
    number, wire, payload = found[0]
    if (number, wire) == (1, 2):
        need(len(payload) <= 4096, "L4")
        return payload.decode()
    need((number, wire) == (2, 0), "L5")
    return payload - (1 << 64) if payload >> 63 else payload
