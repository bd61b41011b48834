"""Encodes and decodes messages with chunks, and the offers of lanes that send them instead. Checks what arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.move.transports.tcp.layout import TICKET_BYTES
from flashckpt.move.transports.tcp.policy import Offer
from flashckpt.rpc.checks import bounded, refused
from flashckpt.types import MAX_LANES
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


# Encodes and decodes chunks as bytes of a PutRequest or a GetResponse, which lay them out alike.
#
# This saves protobuf's two extra copies of each, about a fifth of the CPU time of a push with TLS. `encode_chunks`
# returns what protobuf would for the same message. `decode_chunks` returns None for any other layout, and the caller
# lets protobuf decode it.

_PART = 0x1A  # PutRequest.chunks, GetResponse.chunks
_FIRST = 0x08  # first_index
_DATA = 0x12  # data
_MAX_VARINT_BYTES = 10


def encode_chunks(first_index: int, chunks: Sequence[bytes]) -> bytes:
    parts = [bytes((_FIRST,)) + _varint(first_index)] if first_index else []  # proto3 leaves zeros out
    for chunk in chunks:
        parts.append(bytes((_DATA,)) + _varint(len(chunk)))
        parts.append(chunk)
    size = sum(map(len, parts))
    return b"".join([bytes((_PART,)), _varint(size), *parts])


def decode_chunks(data: bytes) -> tuple[int, list[memoryview]] | None:
    """Return the first index and a view of each chunk; the views keep `data` alive."""
    end = len(data)
    if end < 2 or data[0] != _PART:
        return None
    size, at = _read_varint(data, 1)
    if at < 0 or at + size != end:
        return None
    first_index = 0
    if at < end and data[at] == _FIRST:
        first_index, at = _read_varint(data, at + 1)
        if at < 0:
            return None
    view, chunks = memoryview(data), []
    while at < end:
        if data[at] != _DATA:
            return None
        size, at = _read_varint(data, at + 1)
        if at < 0 or size > end - at:
            return None
        chunks.append(view[at : at + size])
        at += size
    return first_index, chunks


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value and the position after it; position -1 if there is none that fits 64 bits."""
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        if at + count >= len(data):
            return 0, -1
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return (value, at + count + 1) if value < 1 << 64 else (0, -1)
    return 0, -1


# Converts offers of lanes to protobuf messages and back. Checks what arrives.


def to_offer(offer: Offer) -> peer_pb2.Lanes:
    return peer_pb2.Lanes(port=offer.port, tickets=offer.tickets, tls=offer.tls)


def from_offer(message: peer_pb2.Lanes) -> Offer:
    if not 0 < message.port < 1 << 16:
        raise refused("port of lanes", "1 to 65535", message.port)
    tickets = bounded(message.tickets, "tickets of lanes", MAX_LANES)
    if not tickets or any(len(one) != TICKET_BYTES for one in tickets):
        raise refused("tickets of lanes", f"one or more of {TICKET_BYTES} bytes", [len(one) for one in tickets])
    return Offer(message.port, tuple(tickets), message.tls)
