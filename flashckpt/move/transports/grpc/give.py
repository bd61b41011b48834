"""Answers a Get: sends what a Giver reads as the messages of one answer, or by lanes if the reader wants some."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, PeerError
from flashckpt.move.transports.grpc.frames import encode_chunks, to_offer
from flashckpt.move.transports.tcp.lane import send_chunks
from flashckpt.move.transports.tcp.layout import Batches
from flashckpt.protocol.wire import GetRefused
from flashckpt.rpc import convert_load
from flashckpt.rpc.checks import maybe
from flashckpt.rpc.settings import BATCH_BYTES, MAX_HEAD_PIECE_BYTES
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from flashckpt.move.seam import Giver
    from flashckpt.move.transports.tcp.ends import LaneServer
    from flashckpt.move.transports.tcp.layout import Lane
    from flashckpt.protocol.wire import GetOpen

PROGRESS_SECONDS = 1.0
_OPEN_SECONDS = 10.0  # until the reader has opened a lane


def give(giver: Giver, get: GetOpen, lanes: LaneServer, wanted_lanes: int) -> Generator[bytes, None, None]:
    """Yield the messages of the answer.

    gRPC takes one message at a time, and the next one only when the connection has room: nothing is read ahead.
    """
    by_lanes = _LaneTransfer(giver, get, lanes, wanted_lanes)
    try:
        if get.ranges and get.ranges[-1].first + get.ranges[-1].count > giver.chunks:
            last = get.ranges[-1]
            reason = f"expected chunks up to {giver.chunks - 1}, found {last.first} to {last.first + last.count - 1}"
            yield refuse(GetRefused(reason, retry=False))
            return
        opened = convert_load.to_info(giver.info, maybe(by_lanes.offer, to_offer))
        yield peer_pb2.GetResponse(opened=opened).SerializeToString()
        try:
            if get.with_head:
                yield from _head(giver)
            if by_lanes.offer is None:
                yield from _chunks(giver, get)
            else:
                yield from by_lanes.wait()
        except CorruptShardError as error:
            giver.rotten(error)
            # The reader asks its next source at once, and keeps what came before, which was right.
            yield refuse(GetRefused(f"the copy here is bad: {error.message}", retry=False))
        except PeerError as error:
            yield refuse(GetRefused(error.message, retry=True))
    finally:
        by_lanes.close()
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


class _LaneTransfer:
    """The part of an answer that is sent by lanes. Once close() has returned, nobody reads the shard any more."""

    def __init__(self, giver: Giver, get: GetOpen, lanes: LaneServer, wanted: int) -> None:
        self._giver = giver
        self._batches = Batches(get.ranges, giver.chunk_bytes)
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._expected = lanes.expect(get.sender, wanted if get.ranges else 0, self._send)
        self.offer = lanes.offer(self._expected)

    def wait(self) -> Iterator[bytes]:
        """Yield progress until all is sent. Raise the error of the first lane that failed."""
        assert self._expected is not None
        open_by = time.monotonic() + _OPEN_SECONDS
        while not self._expected.wait(PROGRESS_SECONDS):
            if not self._expected.entered and time.monotonic() > open_by:
                raise PeerError(f"expected a lane within {_OPEN_SECONDS:g} s, found none")
            progress = peer_pb2.GetProgress(sent_bytes=self._sent_bytes)
            yield peer_pb2.GetResponse(progress=progress).SerializeToString()
        if self._expected.error is not None:
            raise self._expected.error

    def close(self) -> None:
        self._batches.stop()
        if self._expected is not None:
            self._expected.close()

    def _send(self, lane: Lane) -> None:
        send_chunks(lane, self._batches, self._giver, self._count)

    def _count(self, size: int) -> None:
        with self._lock:
            self._sent_bytes += size
