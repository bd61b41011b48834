"""Reads a Get's answer: turns its messages, or what arrives by lanes, into the calls of one Taker."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, PeerError
from flashckpt.move.transports.grpc.frames import decode_chunks, from_offer
from flashckpt.move.transports.tcp.lane import receive_chunks
from flashckpt.rpc import convert, convert_load
from flashckpt.rpc.settings import MAX_HEAD_PIECE_BYTES
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashckpt.move.seam import Taker
    from flashckpt.move.transports.tcp.connections import Connections
    from flashckpt.move.transports.tcp.ends import LaneClient
    from flashckpt.move.transports.tcp.policy import Offer
    from flashckpt.protocol.wire import GetInfo, GetOpen, GetRefused
    from flashckpt.rpc.watchdog import Watched

_END_SECONDS = 10.0


class NoLanesError(Exception):
    """Raised when the holder offers lanes that can't be opened: ask again without lanes."""


class Take:
    """One answer. The taker receives only what was asked for and, by the call itself, only in that order."""

    def __init__(self, get: GetOpen, holder: str, taker: Taker, lanes: LaneClient) -> None:
        self._get = get
        self._holder = holder
        self._taker = taker
        self._info: GetInfo | None = None
        self._next_head_offset = 0
        self._expected = _indices(get)
        self._next_chunk = next(self._expected, None)
        self._lanes = lanes
        self._connections: Connections | None = None
        self._lock = threading.Lock()  # protects what follows while lanes run
        self._awaited: set[int] = set()
        self._error: Exception | None = None  # the taker's
        self.taken_bytes = 0

    def follow(self, answers: Iterable[bytes], watched: Watched, stall_timeout: float) -> GetRefused | None:
        """Follow the answer until all is here, or the holder refuses. Passes gRPC's errors on."""
        watched.expect(stall_timeout)
        for data in answers:
            watched.relax()  # the time that follows is ours, not the holder's
            refused = self._take(data)
            if refused is not None:
                return self._explained(refused)
            watched.expect(stall_timeout)
        watched.relax()
        if self._connections is not None:
            self._end_lanes()
        if self._info is None or not self._has_head or self._next_chunk is not None:
            raise self._broken("the end of the answer")
        return None

    def close(self) -> None:
        """End the lanes. Once it has returned, the taker is not called any more."""
        if self._connections is not None:
            self._connections.close()

    def _explained(self, refused: GetRefused) -> GetRefused:
        """Raise the error of this side, if the refusal only repeats it.

        The holder learns of failures here through its lanes. Its answer adds something only if it looked into the
        failure: a bad chunk is bad in its copy, or was damaged on the way.
        """
        if self._error is not None and not isinstance(self._error, CorruptShardError):
            raise self._error
        return refused

    def _open_lanes(self, offer: Offer) -> None:
        if self._next_chunk is None:
            return
        try:
            self._connections = self._lanes.open(offer)
        except PeerError as error:
            raise NoLanesError(error.message) from error
        self._awaited = {self._next_chunk, *self._expected}
        self._next_chunk = None
        self._connections.start(lambda lane: receive_chunks(lane, self))

    # The calls of the lanes (Sink).

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        indices = self._awaited_chunks(first, size_bytes)
        with self._noted(passing=OSError):
            taken = self._taker.receive(first, size_bytes, fd, scratch)
        if taken:
            self._arrived(indices, size_bytes)
        return taken

    def put_chunks(self, first: int, data: memoryview) -> None:
        indices = self._awaited_chunks(first, len(data))
        with self._noted():
            self._taker.put_chunks(first, data)
        self._arrived(indices, len(data))

    @contextlib.contextmanager
    def _noted(self, passing: type[Exception] = PeerError) -> Iterator[None]:
        try:
            yield
        except (PeerError, passing):
            raise  # the lane's
        except Exception as error:
            self._error = self._error or error  # before the holder can learn of it and answer
            raise

    def _awaited_chunks(self, first: int, size_bytes: int) -> range:
        assert self._info is not None
        indices = range(first, first + max(1, -(-size_bytes // self._info.chunk_bytes)))
        with self._lock:
            if not self._awaited.issuperset(indices):
                raise self._broken(f"chunks {first} to {indices[-1]} by a lane")
        return indices

    def _arrived(self, indices: range, size_bytes: int) -> None:
        with self._lock:
            self._awaited.difference_update(indices)
            self.taken_bytes += size_bytes

    def _end_lanes(self) -> None:
        """Check how the lanes ended. The holder has ended its answer, so it has our verdicts."""
        assert self._connections is not None
        if not self._connections.wait(_END_SECONDS):
            raise self._broken("the end of the answer while lanes run")
        if self._connections.error is not None:
            raise self._connections.error
        if self._awaited:
            raise self._broken(f"the end of the answer, with {len(self._awaited)} chunks missing")

    @property
    def _has_head(self) -> bool:
        return not self._get.with_head or (self._info is not None and self._next_head_offset == self._info.head_bytes)

    def _take(self, data: bytes) -> GetRefused | None:
        chunks = decode_chunks(data)
        if chunks is None:
            message = convert.parse(peer_pb2.GetResponse, data, f"answer of node {self._holder!r}")
            match message.WhichOneof("part"):
                case "opened" if self._info is None:
                    self._info = convert_load.from_info(message.opened)
                    self._taker.opened(self._info)
                    if message.opened.HasField("lanes"):
                        self._open_lanes(from_offer(message.opened.lanes))
                    elif self._lanes.must and self._next_chunk is not None:
                        raise PeerError(f"node {self._holder!r} offers no lanes", peer=self._holder)
                    return None
                case "progress" if self._connections is not None:
                    return None
                case "refused":
                    return convert_load.from_get_refused(message.refused)
                case "head" if self._info is not None and not self._has_head:
                    self._take_head(message.head.offset, message.head.data)
                    return None
                case "chunks":
                    chunks = message.chunks.first_index, [memoryview(one) for one in message.chunks.data]
                case part:
                    raise self._broken(f"{part or 'nothing that this version knows'} out of turn")
        self._take_chunks(*chunks)
        return None

    def _take_head(self, offset: int, data: bytes) -> None:
        if offset != self._next_head_offset or not 0 < len(data) <= MAX_HEAD_PIECE_BYTES:
            raise self._broken(f"{len(data)} bytes of head at {offset}, after {self._next_head_offset}")
        self._taker.put_head(offset, data)
        self._next_head_offset += len(data)
        self.taken_bytes += len(data)

    def _take_chunks(self, first_index: int, pieces: list[memoryview]) -> None:
        if self._info is None or not self._has_head or not pieces:
            raise self._broken(f"{len(pieces)} chunks out of turn")
        for index, piece in enumerate(pieces, first_index):
            if index != self._next_chunk:
                raise self._broken(f"chunk {index} instead of {self._next_chunk}")
            self._taker.put_chunks(index, piece)
            self._next_chunk = next(self._expected, None)
            self.taken_bytes += len(piece)

    def _broken(self, found: str) -> PeerError:
        return PeerError(
            f"node {self._holder!r}, get of {self._get.shard}: expected what was asked for, found {found}",
            peer=self._holder,
        )


def _indices(get: GetOpen) -> Iterator[int]:
    for one in get.ranges:
        yield from range(one.first, one.first + one.count)
