"""Sends a push: turns what a Source reads into the messages of one stream, or sends it by lanes if they are offered.

gRPC takes the messages from a thread of its own, while the thread that asked for the push follows the answers. Both
share what `_state` protects: how far the receiver is, and whether anybody still listens.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from flashckpt.errors import ClosedError, IncompatibleError, PeerError
from flashckpt.failpoints import failpoint
from flashckpt.move.seam import PutEnd, PutResult
from flashckpt.move.transports.grpc.frames import encode_chunks, from_offer
from flashckpt.move.transports.tcp.lane import send_chunks
from flashckpt.move.transports.tcp.layout import Batches
from flashckpt.rpc import convert
from flashckpt.rpc.checks import optional
from flashckpt.rpc.settings import BATCH_BYTES, MAX_HEAD_PIECE_BYTES, MAX_STREAMED_CHUNK_BYTES
from flashckpt.types import ChunkRange
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flashckpt.move.seam import BandwidthLimit, Source
    from flashckpt.move.transports.tcp.connections import Connections
    from flashckpt.move.transports.tcp.ends import LaneClient
    from flashckpt.move.transports.tcp.policy import Offer
    from flashckpt.protocol.wire import PutOpen, PutReady
    from flashckpt.rpc.watchdog import Watched

_log = logging.getLogger(__name__)

# Bytes sent and not yet taken: enough for 10 Gbit/s over 25 ms, and at most this is lost with a connection.
WINDOW_BYTES = 32 << 20
# Seconds between two requests for progress while chunks are sent by lanes.
ASK_SECONDS = 1.0


class Push:
    """One attempt to push one shard."""

    def __init__(
        self, opening: PutOpen, source: Source, receiver: str, throttle: BandwidthLimit | None, lanes: LaneClient
    ) -> None:
        self._opening = opening
        self._source = source
        self._receiver = receiver
        self._throttle = throttle
        self._lanes = lanes
        self._wanted_lanes = lanes.wanted(opening.size_bytes - opening.head_bytes)
        self._state = threading.Condition()  # protects what follows
        self._ready: PutReady | None = None
        self._offer: Offer | None = None
        self._connections: Connections | None = None
        self._closed = False
        self._finishing = False
        self.sent_bytes = 0
        self.taken_bytes = 0
        self.error: Exception | None = None  # of this side: raised by the source or the throttle
        self.patience = 0.0  # the seconds that the receiver was given at the last wait
        self._watched: Watched | None = None
        self._stall_timeout = 0.0

    def close(self) -> None:
        """End the push: its caller follows it no longer. Ends the thread that makes messages."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            connections = self._connections
        if connections is not None:
            connections.close()

    # --- gRPC's thread

    def requests(self) -> Iterator[bytes]:
        try:
            opening = convert.to_opening(self._opening, self._receiver, self._wanted_lanes)
            yield peer_pb2.PutRequest(open=opening).SerializeToString()
            ready = self._wait_ready()
            if ready is None:
                return
            for data, size in self._head(ready):
                if not self._admit(size):
                    return
                yield data
            connections = self._open_lanes()
            if connections is not None:
                yield from self._by_lanes(connections, ready)
            else:
                for data, size in self._chunks(ready):
                    if not self._admit(size):
                        return
                    failpoint("mid_push")
                    yield data
            with self._state:
                if self._closed:
                    return
                self._finishing = True
                self._expect(self._stall_timeout)
            yield peer_pb2.PutRequest(finish=peer_pb2.PutFinish()).SerializeToString()
        except Exception as error:
            # gRPC would log it and tell the caller nothing. The stream ends without its finish, so the receiver keeps
            # what it has and answers; follow() raises.
            self.error = error

    def _head(self, ready: PutReady) -> Iterator[tuple[bytes, int]]:
        """Yield each message of the head with the number of the shard's bytes in it."""
        source = self._source
        offset = ready.next_head_offset
        while offset < source.head_bytes:
            data = source.read_head(offset, min(MAX_HEAD_PIECE_BYTES, source.head_bytes - offset))
            head = peer_pb2.PutHead(offset=offset, data=data)
            yield peer_pb2.PutRequest(head=head).SerializeToString(), len(data)
            offset += len(data)

    def _chunks(self, ready: PutReady) -> Iterator[tuple[bytes, int]]:
        source = self._source
        if source.chunk_bytes > MAX_STREAMED_CHUNK_BYTES:
            raise IncompatibleError(
                f"{self._opening.shard}: expected chunks of at most {MAX_STREAMED_CHUNK_BYTES} bytes, "
                f"found {source.chunk_bytes}",
                hint="larger ones are sent by lanes only: make the other node's port for lanes reachable",
            )
        at_once = max(1, BATCH_BYTES // source.chunk_bytes)
        for first in range(ready.next_chunk, source.chunks, at_once):
            chunks = [source.read_chunk(index) for index in range(first, min(first + at_once, source.chunks))]
            yield encode_chunks(first, chunks), sum(map(len, chunks))

    def _open_lanes(self) -> Connections | None:
        """Open the lanes that were offered. None: chunks are sent by this stream."""
        if not self._wanted_lanes:
            return None
        with self._state:  # the receiver accepts chunks only once it has the complete head
            self._state.wait_for(lambda: self.taken_bytes == self.sent_bytes or self._closed)
            if self._closed:
                return None
        if self._offer is None and not self._lanes.must:
            return None
        try:
            connections = self._lanes.open(self._offer)
        except PeerError as error:
            if self._lanes.must:
                raise
            text = "push of %s to node %r uses gRPC instead of lanes: %s"
            _log.info(text, self._opening.shard, self._receiver, error.message)
            return None
        if self._keep(connections):
            return connections
        connections.close()
        return None

    def _keep(self, connections: Connections) -> bool:
        """Keep the connections for close(), which ends them. Return False if the push was closed already."""
        with self._state:
            if not self._closed:
                self._connections = connections
            return not self._closed

    def _by_lanes(self, connections: Connections, ready: PutReady) -> Iterator[bytes]:
        left = ChunkRange(ready.next_chunk, self._source.chunks - ready.next_chunk)
        batches = Batches((left,) if left.count else (), self._source.chunk_bytes)
        connections.start(lambda lane: send_chunks(lane, batches, self._source, self._before_frame))
        try:
            while not connections.wait(min(ASK_SECONDS, self._stall_timeout / 4)):
                yield peer_pb2.PutRequest(ask=peer_pb2.PutAsk()).SerializeToString()
        finally:
            batches.stop()
            connections.close()
        if connections.error is not None:
            raise connections.error

    def _before_frame(self, size: int) -> None:
        if not self._admit(size):
            raise ClosedError("the push was stopped: nobody waits for it any more")
        failpoint("mid_push")

    def _wait_ready(self) -> PutReady | None:
        with self._state:
            self._state.wait_for(lambda: self._ready is not None or self._closed)
            return None if self._closed else self._ready

    def _admit(self, size: int) -> bool:
        """Wait until so many bytes may be sent. Return False if the push was closed."""
        if self._throttle is not None:
            self._throttle.take(size)
        with self._state:
            if self._connections is None:  # a lane has a window of its own
                self._state.wait_for(lambda: self.sent_bytes - self.taken_bytes < WINDOW_BYTES or self._closed)
            if self.sent_bytes == self.taken_bytes:
                self._expect(self._stall_timeout)
            self.sent_bytes += size
            return not self._closed

    # --- the caller's thread

    def follow(
        self,
        answers: Iterable[bytes],
        watched: Watched,
        open_timeout: float,
        stall_timeout: float,
        on_progress: Callable[[int], None] | None,
    ) -> PutResult:
        """Follow the answers until the push ends. Passes gRPC's errors on."""
        with self._state:
            self._watched, self._stall_timeout = watched, stall_timeout
            self._expect(open_timeout)
        began = time.monotonic()
        for data in answers:
            result = self._answered(data, on_progress)
            if result is not None:
                if result.end is PutEnd.SEALED:
                    seconds = time.monotonic() - began
                    text = "push of %s to node %r: %d bytes in %.4f s"
                    _log.debug(text, self._opening.shard, self._receiver, self.sent_bytes, seconds)
                return result
        if self.error is not None:
            raise self.error
        raise self._broken("the end of the stream")

    def _answered(self, data: bytes, on_progress: Callable[[int], None] | None) -> PutResult | None:
        message = convert.parse(peer_pb2.PutResponse, data, f"answer of node {self._receiver!r}")
        part = message.WhichOneof("part")
        if (part in ("ready", "have", "refused")) != (self._ready is None):
            raise self._broken(f"{part} out of turn")
        match part:
            case "ready":
                offer = optional(message.ready, "lanes", from_offer)
                self._start(convert.from_ready(message.ready), offer)
            case "have":
                return PutResult(PutEnd.HAVE, self._checked(message.have.digest))
            case "refused":
                refused = convert.from_refused(message.refused)
                return PutResult(
                    PutEnd.REFUSED,
                    reason=refused.reason,
                    retry=refused.retry,
                    launch=refused.launch,
                    line=refused.line,
                )
            case "progress":
                self._advance(message.progress.taken_bytes)
                if on_progress is not None:
                    on_progress(self.taken_bytes)
            case "sealed":
                return PutResult(PutEnd.SEALED, self._checked(message.sealed.digest), self.sent_bytes)
            case _:
                raise self._broken("an answer that this version does not know")
        return None

    def _start(self, ready: PutReady, offer: Offer | None) -> None:
        source = self._source
        if ready.next_head_offset > source.head_bytes or ready.next_chunk > source.chunks:
            raise self._broken(f"{ready}, beyond its {source.head_bytes} bytes of head or {source.chunks} chunks")
        with self._state:
            self._ready, self._offer = ready, offer
            self._relax()
            self._state.notify_all()

    def _advance(self, taken_bytes: int) -> None:
        with self._state:
            if not self.taken_bytes <= taken_bytes <= self.sent_bytes:
                raise self._broken(f"progress {taken_bytes} after {self.taken_bytes}, {self.sent_bytes} sent")
            self.taken_bytes = taken_bytes
            if taken_bytes < self.sent_bytes or self._finishing:
                self._expect(self._stall_timeout)
            else:
                self._relax()  # it is our turn, and the throttle may need time
            self._state.notify_all()

    def _expect(self, timeout: float) -> None:
        self.patience = timeout
        if self._watched is not None:
            self._watched.expect(timeout)

    def _relax(self) -> None:
        if self._watched is not None:
            self._watched.relax()

    def _checked(self, digest: bytes) -> bytes:
        # IMPORTANT: a copy counts only if it consists of exactly these bytes.
        if digest != self._opening.digest:
            raise self._broken(f"digest {digest.hex()}, expected {self._opening.digest.hex()}")
        return digest

    def _broken(self, found: str) -> PeerError:
        return PeerError(
            f"node {self._receiver!r}, push of {self._opening.shard}: expected an answer to it, found {found}",
            peer=self._receiver,
        )
