"""Defines the bytes of a lane.

    client  ── magic, ticket ──▶ ◀── welcome ── listener
    sender  ── frame, frame, …, end ──▶ ◀── verdict ── receiver

A frame is the index of its first chunk, the number of its bytes, and complete chunks. Both sides know the shard from
the call that the ticket belongs to. All integers are little-endian.
"""

from __future__ import annotations

import enum
import socket
import ssl
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import PeerError
from flashckpt.types import ChunkRange

if TYPE_CHECKING:
    from collections.abc import Iterable


MAGIC = b"flashckpt-lane-1"
TICKET_BYTES = 32
WELCOME = b"\x01"
FRAME = struct.Struct("<QQ")
END = (1 << 64) - 1
# A frame is received into a buffer, verified and then written: small enough to stay in a core's cache meanwhile.
FRAME_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20  # one chunk of the largest kind
_VERDICT = struct.Struct("<BQH")
_MAX_TEXT_BYTES = 1024

Lane = socket.socket  # or a TLS socket


class Code(enum.IntEnum):
    TAKEN = 0  # all chunks
    BAD = 1  # a frame that does not match the checksums of its chunks
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """The receiver's answer at the end of a lane."""

    code: Code
    first: int = 0  # chunk of the bad frame
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode()[:_MAX_TEXT_BYTES]
        return _VERDICT.pack(self.code, self.first, len(text)) + text


def read_verdict(lane: Lane) -> LaneVerdict:
    code, first, length = _VERDICT.unpack(read_exactly(lane, _VERDICT.size))
    if code not in Code.__members__.values() or length > _MAX_TEXT_BYTES:
        raise PeerError(f"lane: expected a verdict, found code {code} with {length} bytes of text")
    return LaneVerdict(Code(code), first, read_exactly(lane, length).decode(errors="replace"))


def read_exactly(lane: Lane, size: int) -> bytes:
    buffer = bytearray(size)
    read_into(lane, memoryview(buffer))
    return bytes(buffer)


def read_into(lane: Lane, view: memoryview) -> None:
    """Fill the view. Raise PeerError if the other end stalls or closes."""
    at = 0
    try:
        while at < len(view):
            size = lane.recv_into(view[at:])
            if not size:
                raise PeerError(f"lane: expected {len(view) - at} bytes more, found its end")
            at += size
    except OSError as error:
        raise broken(error) from error


def write(lane: Lane, data: bytes | memoryview) -> None:
    try:
        lane.sendall(data)
    except OSError as error:
        raise broken(error) from error


def broken(error: OSError) -> PeerError:
    # A timeout of the kernel's looks like an operation that would block.
    stalled = isinstance(error, BlockingIOError | TimeoutError | ssl.SSLWantReadError | ssl.SSLWantWriteError)
    return PeerError(f"lane: {'the other end stalled' if stalled else f'it broke: {error}'}")


def set_timeouts(lane: Lane, seconds: float) -> None:
    """Set the kernel's timeouts, so that every call, sendfile too, ends by itself."""
    whole = int(seconds)
    value = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


# Divides chunks among several lanes: each takes the next frame as soon as it has sent its last.


class Batches:
    """The frames that are left to send. Any thread may call it.

    A slow lane takes fewer, and the chunks that are missing after a break are close together.
    """

    def __init__(self, ranges: Iterable[ChunkRange], chunk_bytes: int) -> None:
        self.at_once = max(1, FRAME_BYTES // chunk_bytes)
        self._lock = threading.Lock()  # protects the two below
        self._ranges = iter(tuple(ranges))
        self._rest: ChunkRange | None = next(self._ranges, None)

    def take(self) -> ChunkRange | None:
        """Return the next frame. None: all were taken, or the transfer was stopped."""
        with self._lock:
            rest = self._rest
            if rest is None:
                return None
            if rest.count > self.at_once:
                self._rest = ChunkRange(rest.first + self.at_once, rest.count - self.at_once)
                return ChunkRange(rest.first, self.at_once)
            self._rest = next(self._ranges, None)
            return rest

    def stop(self) -> None:
        with self._lock:
            self._rest, self._ranges = None, iter(())
