"""The reader's half of a Get: from the messages of one answer to the calls of one Taker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.errors import PeerError
from flashckpt.rpc import convert, convert_load
from flashckpt.rpc.frames import decode_chunks
from flashckpt.rpc.settings import MAX_HEAD_PIECE_BYTES
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashckpt.rpc.api import Taker
    from flashckpt.rpc.watchdog import Watched
    from flashckpt.wire import GetInfo, GetOpen, GetRefused


class Take:
    """One answer. Nothing reaches the taker that was not asked for, or not in the order it was asked for."""

    def __init__(self, get: GetOpen, holder: str, taker: Taker) -> None:
        self._get = get
        self._holder = holder
        self._taker = taker
        self._info: GetInfo | None = None
        self._next_head_offset = 0
        self._expected = _indices(get)
        self._next_chunk = next(self._expected, None)
        self.taken_bytes = 0

    def follow(self, answers: Iterable[bytes], watched: Watched, stall_timeout: float) -> GetRefused | None:
        """Until all is here, or the holder refuses. Lets gRPC's errors through."""
        watched.expect(stall_timeout)
        for data in answers:
            watched.relax()  # what takes time now is ours
            refused = self._take(data)
            if refused is not None:
                return refused
            watched.expect(stall_timeout)
        watched.relax()
        if self._info is None or not self._has_head or self._next_chunk is not None:
            raise self._broken("the end of the answer")
        return None

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
