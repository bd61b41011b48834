"""Both ends of a lane once it is open: chunks out of a sealed shard into the wire, and out of the wire to whoever
verifies and keeps them.

A plain lane sends out of a mapping of the shard, without a look: the receiver verifies, and where it finds a bad frame,
the sender verifies its own copy of it to know whose fault it was. A lane with TLS has to read anyway, and verifies
before it sends. Not sendfile: it hands over single pages, which costs both ends more than one copy in large pieces.
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
_LAST_WORDS_SECONDS = 0.2


class Chunks(Protocol):
    """A sealed shard's data area."""

    @property
    def chunks(self) -> int: ...

    def read_chunk(self, index: int) -> bytes:
        """Verified: CorruptShardError where it is bad."""

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        """These chunks, mapped, for the kernel to read; None where they have to be read. The caller releases it."""


def carry(lane: Lane, batches: Batches, chunks: Chunks, before: Callable[[int], object]) -> None:
    """Sends until there is no batch left, and waits for the verdict. `before` gets the bytes of each frame before it
    goes; what it raises ends the lane.

    CorruptShardError: our copy is bad. PeerError: the lane broke, or the receiver did not want it.
    """
    try:
        while (batch := batches.take()) is not None:
            _send(lane, batch, chunks, before)
            if _has_news(lane, 0.0):
                break  # the receiver has something to say before the end
        else:
            write(lane, FRAME.pack(END, 0))
    except PeerError:
        batches.stop()
        # What the receiver said last explains more than how the lane broke.
        if _has_news(lane, _LAST_WORDS_SECONDS):
            with contextlib.suppress(PeerError):
                _judge(read_verdict(lane), batches, chunks)
        raise
    except BaseException:
        batches.stop()
        raise
    _judge(read_verdict(lane), batches, chunks)


def _has_news(lane: Lane, timeout: float) -> bool:
    # Not select(): an agent may have more descriptors than that takes.
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
            # SAFETY: nobody but the kernel touches the view. Where the file was cut short, that is an error, no signal.
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
            chunks.read_chunk(index)  # raises, if it is ours that is bad
    raise PeerError(f"lane: not taken: {verdict.text}")


class Sink(Protocol):
    """Verifies and keeps chunks."""

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview, /) -> bool:
        """Takes them out of a socket by itself, verified and counted; False: it does not, and they have to be put.
        OSError is the socket's."""

    def put_chunks(self, first: int, data: memoryview, /) -> None:
        """Data is a view of a buffer: it must not be kept beyond the call."""


def land(lane: Lane, sink: Sink) -> None:
    """Receives until the end, and gives the verdict. What the basin raises is in it, and is raised here as well."""
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
        _part(lane, LaneVerdict(Code.BAD, first, error.message), buffer)
        raise
    except FlashError as error:
        _part(lane, LaneVerdict(Code.REFUSED, first, error.message), buffer)
        raise
    write(lane, LaneVerdict(Code.TAKEN).pack())


def _received(sink: Sink, first: int, size: int, lane: Lane, scratch: memoryview) -> bool:
    try:
        return sink.receive(first, size, lane.fileno(), scratch)
    except OSError as error:
        raise broken(error) from error


def _part(lane: Lane, verdict: LaneVerdict, buffer: memoryview) -> None:
    """Says why, and reads on until the sender has heard: a connection that is closed with bytes unread resets, and the
    verdict would be lost with it."""
    drained = 0
    with contextlib.suppress(OSError, PeerError):
        write(lane, verdict.pack())
        while drained < _MOST_DRAINED_BYTES and (size := lane.recv_into(buffer)):
            drained += size
