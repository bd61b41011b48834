"""The holder's half of a Get: from a Giver to the messages of one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError
from flashckpt.rpc import convert_load
from flashckpt.rpc.frames import encode_chunks
from flashckpt.rpc.settings import BATCH_BYTES, MAX_HEAD_PIECE_BYTES
from flashckpt.v1 import peer_pb2
from flashckpt.wire import GetRefused

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from flashckpt.rpc.api import Giver
    from flashckpt.wire import GetOpen


def give(giver: Giver, get: GetOpen) -> Generator[bytes, None, None]:
    """gRPC takes one message at a time, and the next one only when the connection has room: no more is read ahead."""
    try:
        if get.ranges and get.ranges[-1].first + get.ranges[-1].count > giver.chunks:
            last = get.ranges[-1]
            reason = f"expected chunks up to {giver.chunks - 1}, found {last.first} to {last.first + last.count - 1}"
            yield refuse(GetRefused(reason, retry=False))
            return
        yield peer_pb2.GetResponse(opened=convert_load.to_info(giver.info)).SerializeToString()
        try:
            if get.with_head:
                yield from _head(giver)
            yield from _chunks(giver, get)
        except CorruptShardError as error:
            giver.rotten(error)
            # The reader goes to its next source at once; what came before was right, and it keeps that.
            yield refuse(GetRefused(f"the copy here is bad: {error.message}", retry=False))
    finally:
        giver.close()


def refuse(refused: GetRefused) -> bytes:
    return peer_pb2.GetResponse(refused=convert_load.to_get_refused(refused)).SerializeToString()


def _head(giver: Giver) -> Iterator[bytes]:
    offset = 0
    while offset < giver.head_bytes:
        data = giver.read_head(offset, MAX_HEAD_PIECE_BYTES)
        yield peer_pb2.GetResponse(head=peer_pb2.GetHead(offset=offset, data=data)).SerializeToString()
        offset += len(data)


def _chunks(giver: Giver, get: GetOpen) -> Iterator[bytes]:
    at_once = max(1, BATCH_BYTES // giver.chunk_bytes)
    for one in get.ranges:
        end = one.first + one.count
        for first in range(one.first, end, at_once):
            yield encode_chunks(first, [giver.read_chunk(i) for i in range(first, min(first + at_once, end))])
