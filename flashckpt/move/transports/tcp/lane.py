"""Sends and receives chunks over an open lane.

A plain lane sends from a mapping of the shard, unread: the receiver verifies, and if it finds a bad frame, the sender
verifies its own copy to learn on which side the fault is. A lane with TLS has to read anyway, and verifies before it
sends. Not sendfile: it hands over single pages, which costs both ends more than one copy in large pieces.
"""

from __future__ import annotations

import contextlib
import errno
import select
import ssl
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import CorruptShardError, FlashError, PeerError
from flashckpt.move.transports.tcp.layout import (
    END,
    FRAME,
    FRAME_BYTES,
    MAX_FRAME_BYTES,
    Code,
    LaneVerdict,
    broken,
    read_exactly,
    read_into,
    read_verdict,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.move.transports.tcp.layout import Batches, Lane
    from flashckpt.types import ChunkRange

_MOST_DRAINED_BYTES = 256 << 20
_VERDICT_SECONDS = 0.2


class Chunks(Protocol):
    """A sealed shard's data area."""

    @property
    def chunks(self) -> int: ...

    def read_chunk(self, index: int) -> bytes:
        """Return a chunk, verified. Raise CorruptShardError if it is bad."""

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        """Return a mapped view of these chunks, which only the kernel may read; the caller releases it. None: they have
        to be read."""


def send_chunks(lane: Lane, batches: Batches, chunks: Chunks, before: Callable[[int], object]) -> None:
    """Send until no batch is left, then wait for the verdict.

    `before` gets the bytes of each frame before it is sent; an exception that it raises ends the lane.

    Raises CorruptShardError if our copy is bad; PeerError if the lane broke, or the receiver refused the chunks.
    """
    try:
        while (batch := batches.take()) is not None:
            _send(lane, batch, chunks, before)
            if _has_news(lane, 0.0):
                break  # the receiver has sent its verdict before the end
        else:
            write(lane, FRAME.pack(END, 0))
    except PeerError:
        batches.stop()
        # The receiver's verdict explains more than how the lane broke.
        if _has_news(lane, _VERDICT_SECONDS):
            with contextlib.suppress(PeerError):
                _judge(read_verdict(lane), batches, chunks)
        raise
    except BaseException:
        batches.stop()
        raise
    _judge(read_verdict(lane), batches, chunks)


def _has_news(lane: Lane, timeout: float) -> bool:
    # Not select(): an agent may have more descriptors than it supports.
    poll = select.poll()
    poll.register(lane, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _send(lane: Lane, batch: ChunkRange, chunks: Chunks, before: Callable[[int], object]) -> None:
    view = None if isinstance(lane, ssl.SSLSocket) else chunks.view_of(batch)
    if view is None:
        pieces = [chunks.read_chunk(index) for index in range(batch.first, batch.first + batch.count)]
        size = sum(map(len, pieces))
        before(size)
        write(lane, FRAME.pack(batch.first, size))
        for piece in pieces:
            write(lane, piece)
        return
    with view:
        before(len(view))
        write(lane, FRAME.pack(batch.first, len(view)))
        try:
            # SAFETY: only the kernel touches the view. If the file was cut short, that is an error, not a signal.
            lane.sendall(view)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise CorruptShardError(f"chunk {batch.first}: its file ends before {len(view)} bytes of it") from error
            raise broken(error) from error


def _judge(verdict: LaneVerdict, batches: Batches, chunks: Chunks) -> None:
    if verdict.code is Code.TAKEN:
        return
    batches.stop()
    if verdict.code is Code.BAD:
        for index in range(verdict.first, min(verdict.first + batches.at_once, chunks.chunks)):
            chunks.read_chunk(index)  # raises if our copy is bad
    raise PeerError(f"lane: the receiver refused the chunks: {verdict.text}")


class Sink(Protocol):
    """Verifies and keeps chunks."""

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview, /) -> bool:
        """Receive chunks from a socket, verified and counted. Return False if the caller has to read and put them.

        OSError is the socket's.
        """

    def put_chunks(self, first: int, data: memoryview, /) -> None:
        """Take consecutive chunks. Data is a view of a buffer: it must not be kept beyond the call."""


def receive_chunks(lane: Lane, sink: Sink) -> None:
    """Receive until the end, and send the verdict. An exception of the sink is sent in it, and raised here as well."""
    buffer = memoryview(bytearray(FRAME_BYTES))
    is_plain = not isinstance(lane, ssl.SSLSocket)
    first = 0
    try:
        while True:
            first, size = FRAME.unpack(read_exactly(lane, FRAME.size))
            if first == END:
                break
            if not 0 < size <= MAX_FRAME_BYTES:
                raise PeerError(f"lane: expected a frame of 1 to {MAX_FRAME_BYTES} bytes, found {size}")
            if is_plain and _received(sink, first, size, lane, buffer):
                continue
            if size > len(buffer):
                buffer = memoryview(bytearray(size))
            read_into(lane, buffer[:size])
            sink.put_chunks(first, buffer[:size])
    except CorruptShardError as error:
        _reject(lane, LaneVerdict(Code.BAD, first, error.message), buffer)
        raise
    except FlashError as error:
        _reject(lane, LaneVerdict(Code.REFUSED, first, error.message), buffer)
        raise
    write(lane, LaneVerdict(Code.TAKEN).pack())


def _received(sink: Sink, first: int, size: int, lane: Lane, scratch: memoryview) -> bool:
    try:
        return sink.receive(first, size, lane.fileno(), scratch)
    except OSError as error:
        raise broken(error) from error


def _reject(lane: Lane, verdict: LaneVerdict, buffer: memoryview) -> None:
    """Send the verdict, and read on until the sender has it.

    A connection that is closed with bytes unread resets, and the verdict would be lost with it.
    """
    drained = 0
    with contextlib.suppress(OSError, PeerError):
        write(lane, verdict.pack())
        while drained < _MOST_DRAINED_BYTES and (size := lane.recv_into(buffer)):
            drained += size
