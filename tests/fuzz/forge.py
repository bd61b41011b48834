"""Shards with a lie in them and every checksum right, so that the parser behind the checksums is reached."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import google_crc32c

from flashckpt.v1 import format_pb2

PREAMBLE = struct.Struct("<8sIII4sQQ20s")
NAMES = (
    "magic", "version", "header_length", "header_crc", "reserved", "data_offset", "data_length", "rest",
)  # fmt: skip


def preamble_of(shard: bytes) -> dict[str, Any]:
    return dict(zip(NAMES, PREAMBLE.unpack(shard[:60]), strict=True))


def header_of(shard: bytes) -> bytes:
    return shard[64 : 64 + preamble_of(shard)["header_length"]]


def message_of(shard: bytes) -> format_pb2.ShardHeader:
    return format_pb2.ShardHeader.FromString(header_of(shard))


def with_preamble(shard: bytes, **lies: Any) -> bytes:
    """Other preamble fields, with the preamble's checksum recomputed."""
    body = PREAMBLE.pack(*(preamble_of(shard) | lies).values())
    return body + struct.pack("<I", google_crc32c.value(body)) + shard[64:]


def with_header_bytes(shard: bytes, header: bytes) -> bytes:
    """Another header, with room made for it and all checksums recomputed."""
    before = preamble_of(shard)
    data_offset = -(-(64 + len(header)) // 4096) * 4096
    moved = shard[:64] + header.ljust(data_offset - 64, b"\0") + shard[before["data_offset"] :]
    return with_preamble(
        moved,
        header_length=len(header),
        header_crc=google_crc32c.value(header),
        data_offset=data_offset,
    )


def with_header(shard: bytes, **lies: Any) -> bytes:
    """Other header fields. The fingerprint follows the layout unless it is a lie itself."""
    message = message_of(shard)
    if "layout" in lies:
        lies.setdefault("layout_fingerprint", hashlib.blake2b(lies["layout"], digest_size=16).digest())
    for name, value in lies.items():
        setattr(message, name, value)
    return with_header_bytes(shard, message.SerializeToString(deterministic=True))


def entry_bytes(entry: format_pb2.TensorEntry) -> bytes:
    """An entry as it stands in a layout."""
    return format_pb2.Layout(entries=[entry]).SerializeToString(deterministic=True)


def with_entries(shard: bytes, *entries: format_pb2.TensorEntry) -> bytes:
    """Another layout, without any of the checks of `encode_layout`."""
    return with_header(shard, layout=b"".join(map(entry_bytes, entries)))
