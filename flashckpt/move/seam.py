"""Defines both ends of a transfer between nodes, and the calls that join them, as plain Python.

Nothing above a transport sees gRPC, protobuf or sockets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.wire import (
        Answer,
        Envelope,
        GetInfo,
        GetOpen,
        GetRefused,
        PutHave,
        PutOpen,
        PutReady,
        PutRefused,
    )
    from flashckpt.rpc.api import Hello
    from flashckpt.types import (
        ChunkRange,
        Launch,
    )


class Receiver(Protocol):
    """Takes one replica. Exactly one of finish, suspend and fail ends it; nothing is called after that.

    Chunks are complete, in any order, and may come from several threads at once. Data is a view of a buffer: it must
    not be kept beyond the call.
    """

    @property
    def ready(self) -> PutReady:
        """Where the sender has to continue; the bytes before are here already."""

    def put_head(self, offset: int, data: bytes | memoryview) -> None: ...

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Receive complete chunks from a socket, verified and counted. Return False if the caller has to read and put
        them.

        `scratch` belongs to the lane and may be used for anything. OSError is the socket's.
        """

    def put_chunks(self, first: int, data: bytes | memoryview) -> None: ...

    def finish(self) -> bytes:
        """Seal the replica, and return the digest to acknowledge. If it raises, `fail` follows."""

    def suspend(self) -> None:
        """Keep what was verified for the next attempt: the connection broke."""

    def fail(self, error: Exception) -> None:
        """Give the replica up: what was sent is wrong or can't be kept."""


class Source(Protocol):
    """A sealed shard to send; reading verifies it."""

    @property
    def head_bytes(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def chunks(self) -> int: ...

    def read_head(self, offset: int, limit: int) -> bytes: ...

    def read_chunk(self, index: int) -> bytes: ...

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        """Return a mapped view of these chunks, to be sent unread; the caller releases it. None: they have to be read.

        IMPORTANT: only the kernel may touch it: if the file was cut short, any other reader gets a signal.
        """


class Giver(Source, Protocol):
    """A shard that another node reads. `close` is the last call."""

    @property
    def info(self) -> GetInfo: ...

    def rotten(self, error: Exception) -> None:
        """Report that the shard turned out damaged while it was read."""

    def close(self) -> None: ...


class Taker(Protocol):
    """Takes what was asked of another node. An exception that it raises ends the call and reaches its caller.

    Chunks are complete, and may come from several threads at once. Data is a view of a buffer: it must not be kept
    beyond the call.
    """

    def opened(self, info: GetInfo) -> None: ...

    def put_head(self, offset: int, data: bytes | memoryview) -> None: ...

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Receive complete chunks from a socket, verified and counted. Return False if the caller has to read and put
        them.

        `scratch` belongs to the lane and may be used for anything. OSError is the socket's.
        """

    def put_chunks(self, first: int, data: bytes | memoryview) -> None: ...


class PeerApi(Protocol):
    """The calls that agents make to each other.

    `peer` is the node id in the caller's certificate. The sender that a message names has been compared with it, and
    its receiver with this node.
    """

    def hello(self, peer: str, hello: Hello) -> Hello: ...

    def tell(self, peer: str, envelope: Envelope) -> Answer: ...

    def put_open(self, peer: str, opening: PutOpen) -> Receiver | PutHave | PutRefused: ...

    def get_open(self, peer: str, opening: GetOpen) -> Giver | GetRefused: ...


class BandwidthLimit(Protocol):
    """Limits the bandwidth of pushes."""

    def take(self, size_bytes: int, /) -> object:
        """Return once that many bytes may be sent."""


class PutEnd(enum.Enum):
    SEALED = enum.auto()  # the receiver wrote, verified and sealed it
    HAVE = enum.auto()  # the receiver had it already
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class PutResult:
    """How a push ended whose connection did not break."""

    end: PutEnd
    digest: bytes = b""  # what the receiver holds; b"" if it refused
    sent_bytes: int = 0  # fewer than the shard has if a push was resumed
    reason: str = ""  # of a refusal
    retry: bool = False  # a later try may succeed
    launch: Launch | None = None  # the newest one that a refusing receiver has seen
    line: Line | None = None
