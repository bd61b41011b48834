"""Receives a push: turns the messages of one stream into the calls of one Receiver."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

import grpc

from flashckpt.errors import IncompatibleError, PeerError
from flashckpt.move.transports.grpc.frames import decode_chunks, to_offer
from flashckpt.move.transports.tcp.lane import receive_chunks
from flashckpt.protocol.wire import PutHave, PutRefused
from flashckpt.rpc import convert
from flashckpt.rpc.checks import maybe
from flashckpt.rpc.settings import MAX_HEAD_PIECE_BYTES
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from flashckpt.move.seam import PeerApi, Receiver
    from flashckpt.move.transports.tcp.ends import LaneServer
    from flashckpt.rpc.watchdog import Watched

# An answer is due after so many bytes or seconds: often enough for the sender's window and patience, too seldom to cost
# much.
PROGRESS_BYTES = 4 << 20
PROGRESS_SECONDS = 1.0


def receive(
    api: PeerApi,
    peer: str,
    requests: Iterator[bytes],
    *,
    check: Callable[[str, str], None],
    watched: Watched,
    idle_timeout: float,
    lanes: LaneServer,
) -> Generator[bytes, None, None]:
    """Yield the answers. `check` is called with the sender and the receiver that the stream names, and raises."""
    messages = Messages(requests, watched, idle_timeout)
    first = messages.take()
    if first is None:
        return  # ended or broke before it began: there is nothing to keep
    message = convert.parse(peer_pb2.PutRequest, first, "Put")
    if message.WhichOneof("part") != "open":
        raise _out_of_turn(peer, "open", message)
    opening, meant = convert.from_opening(message.open)
    check(opening.sender, meant)
    answer = api.put_open(peer, opening)
    if isinstance(answer, PutHave):
        yield peer_pb2.PutResponse(have=peer_pb2.PutHave(digest=answer.digest)).SerializeToString()
        return
    if isinstance(answer, PutRefused):
        yield peer_pb2.PutResponse(refused=convert.to_refused(answer)).SerializeToString()
        return
    yield from _fill(answer, peer, messages, lanes, message.open.lanes)


class _Arrivals:
    """Counts what a receiver takes, by the stream and by lanes."""

    def __init__(self, receiver: Receiver, lanes: LaneServer, peer: str, wanted: int) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self.taken_bytes = 0
        self._expected = lanes.expect(peer, wanted, lambda lane: receive_chunks(lane, self))
        self.offer = lanes.offer(self._expected)

    def count(self, size: int) -> None:
        with self._lock:
            self.taken_bytes += size

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        taken = self._receiver.receive(first, size_bytes, fd, scratch)
        if taken:
            self.count(size_bytes)
        return taken

    def put_chunks(self, first: int, data: memoryview) -> None:
        self._receiver.put_chunks(first, data)
        self.count(len(data))

    def close(self) -> None:
        """End the lanes.

        IMPORTANT: before the receiver's last call. Nothing arrives by lanes once it has returned.
        """
        if self._expected is not None:
            self._expected.close()


def _fill(receiver: Receiver, peer: str, messages: Messages, lanes: LaneServer, wanted: int) -> Iterator[bytes]:
    """Pass the messages to the receiver, and yield the answers.

    IMPORTANT: whatever happens, exactly one of finish, suspend and fail is the receiver's last call; or finish raises,
    and fail is.
    """
    ended = False
    arrivals = _Arrivals(receiver, lanes, peer, wanted)
    try:
        ready = convert.to_ready(receiver.ready, maybe(arrivals.offer, to_offer))
        yield peer_pb2.PutResponse(ready=ready).SerializeToString()
        told = 0
        told_at = -math.inf  # the first answer at once: a slow sender may need long for the next message
        while (data := messages.take()) is not None:
            part, size = _take(receiver, peer, data)
            if part == "finish":
                arrivals.close()
                digest = receiver.finish()
                ended = True
                sealed = peer_pb2.PutSealed(digest=digest)
                yield peer_pb2.PutResponse(sealed=sealed).SerializeToString()
                return
            arrivals.count(size)
            now, taken = time.monotonic(), arrivals.taken_bytes
            # A sender opens lanes once it knows that the head was taken, and asks for progress while they run.
            is_due = part != "chunks" or taken - told >= PROGRESS_BYTES or now - told_at >= PROGRESS_SECONDS
            if is_due:
                told, told_at = taken, now
                progress = peer_pb2.PutProgress(taken_bytes=taken)
                yield peer_pb2.PutResponse(progress=progress).SerializeToString()
        arrivals.close()
        ended = True
        receiver.suspend()
        if messages.half_closed:
            raise PeerError(
                f"expected more of a push of node {peer!r} or its finish, found the end of the stream",
                hint="what was verified is kept; the push can be resumed",
                peer=peer,
            )
    except Exception as error:
        if not ended:
            ended = True
            arrivals.close()
            receiver.fail(error)
        raise
    finally:
        if not ended:  # this generator was closed: the call ended while an answer was on its way
            arrivals.close()
            receiver.suspend()


def _take(receiver: Receiver, peer: str, data: bytes) -> tuple[str, int]:
    """Pass one message to the receiver. Return its kind, and the number of bytes taken."""
    chunks = decode_chunks(data)
    if chunks is None:
        message = convert.parse(peer_pb2.PutRequest, data, "Put")
        match message.WhichOneof("part"):
            case "head":
                if len(message.head.data) > MAX_HEAD_PIECE_BYTES:
                    raise IncompatibleError(
                        f"expected at most {MAX_HEAD_PIECE_BYTES} bytes of head from node {peer!r}, "
                        f"found {len(message.head.data)}"
                    )
                receiver.put_head(message.head.offset, message.head.data)
                return "head", len(message.head.data)
            case "chunks":
                chunks = message.chunks.first_index, [memoryview(one) for one in message.chunks.data]
            case "finish" | "ask" as part:
                return part, 0
            case _:
                raise _out_of_turn(peer, "head, chunks or finish", message)
    first_index, pieces = chunks
    if not pieces:
        raise IncompatibleError(f"expected chunks in a message of node {peer!r}, found none")
    for index, piece in enumerate(pieces, first_index):
        receiver.put_chunks(index, piece)
    return "chunks", sum(map(len, pieces))


class Messages:
    """The incoming half of the stream. Its clock runs only while we wait for the other end."""

    def __init__(self, requests: Iterator[bytes], watched: Watched, idle_timeout: float) -> None:
        self._requests = requests
        self._watched = watched
        self._idle_timeout = idle_timeout
        self.half_closed = False

    def take(self) -> bytes | None:
        """Return the next message. None: the sender ended its half, or the connection broke."""
        self._watched.expect(self._idle_timeout)
        try:
            return next(self._requests)
        except StopIteration:
            self.half_closed = True
            return None
        except grpc.RpcError:
            return None
        finally:
            self._watched.relax()


def _out_of_turn(peer: str, expected: str, message: peer_pb2.PutRequest) -> IncompatibleError:
    found = message.WhichOneof("part") or "nothing that this version knows"
    return IncompatibleError(
        f"push of node {peer!r}: expected {expected}, found {found}",
        hint="run the same version of flashckpt on all nodes",
    )
