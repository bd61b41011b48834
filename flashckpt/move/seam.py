"""What moves a shard from node to node, as plain Python: its two ends, and the calls that join them.

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

    Chunks are whole, in any order, and may come from several threads at once. Data is a view of a buffer: it must not
    be kept beyond the call.
    """

    @property
    def ready(self) -> PutReady:
        """Where to go on from; earlier bytes are here already."""

    def put_head(self, offset: int, data: bytes | memoryview) -> None: ...

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Takes whole chunks out of a socket by itself, verified and counted; False: it does not, and they are put.
        `scratch` is the lane's own, for whatever it needs. OSError is the socket's."""

    def put_chunks(self, first: int, data: bytes | memoryview) -> None: ...

    def finish(self) -> bytes:
        """Seals; the digest that the sender may count on. If it raises, `fail` follows."""

    def suspend(self) -> None:
        """The connection broke: keep what was verified for the next attempt."""

    def fail(self, error: Exception) -> None:
        """What was sent is wrong or can't be kept: give it up."""


class Source(Protocol):
    """A sealed shard that is read to be sent; reading verifies."""

    @property
    def head_bytes(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def chunks(self) -> int: ...

    def read_head(self, offset: int, limit: int) -> bytes: ...

    def read_chunk(self, index: int) -> bytes: ...

    def view_of(self, chunks: ChunkRange) -> memoryview | None:
        """These chunks, mapped, to be sent unread, the caller's to release; None where they have to be read. IMPORTANT:
        only the kernel may touch it: where the file was cut short, that is a signal for anybody else."""


class Giver(Source, Protocol):
    """A shard that another node reads. `close` is the last call."""

    @property
    def info(self) -> GetInfo: ...

    def rotten(self, error: Exception) -> None:
        """It turned out bad while it was read."""

    def close(self) -> None: ...


class Taker(Protocol):
    """Takes what was asked of another node. Whatever it raises ends the call and reaches its caller.

    Chunks are whole, and may come from several threads at once. Data is a view of a buffer: it must not be kept beyond
    the call.
    """

    def opened(self, info: GetInfo) -> None: ...

    def put_head(self, offset: int, data: bytes | memoryview) -> None: ...

    def receive(self, first: int, size_bytes: int, fd: int, scratch: memoryview) -> bool:
        """Takes whole chunks out of a socket by itself, verified and counted; False: it does not, and they are put.
        `scratch` is the lane's own, for whatever it needs. OSError is the socket's."""

    def put_chunks(self, first: int, data: bytes | memoryview) -> None: ...


class PeerApi(Protocol):
    """A node's agent as the agents of other nodes see it. `peer` is the node id in the caller's certificate;
    the sender that a message names has been compared with it, and its receiver with this node."""

    def hello(self, peer: str, hello: Hello) -> Hello: ...

    def tell(self, peer: str, envelope: Envelope) -> Answer: ...

    def put_open(self, peer: str, opening: PutOpen) -> Receiver | PutHave | PutRefused: ...

    def get_open(self, peer: str, opening: GetOpen) -> Giver | GetRefused: ...


class Brake(Protocol):
    """Limits the bandwidth of pushes."""

    def take(self, size_bytes: int, /) -> object:
        """Returns once that many bytes may be sent."""


class PutEnd(enum.Enum):
    SEALED = enum.auto()  # the receiver wrote, verified and sealed it
    HAVE = enum.auto()  # the receiver had it
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class PutResult:
    """How a push ended that did not break."""

    end: PutEnd
    digest: bytes = b""  # what the receiver holds; b"" where it refused
    sent_bytes: int = 0  # fewer than the shard has where a push was resumed
    reason: str = ""  # of a refusal
    retry: bool = False  # whether asking again later may help
    launch: Launch | None = None  # the newest one that a refusing receiver has seen
    line: Line | None = None
