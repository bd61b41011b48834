"""What the servers call and the clients offer: plain Python, so that neither side sees gRPC or protobuf."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashckpt.rpc.settings import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashckpt.credentials import Bundle
    from flashckpt.line import Line
    from flashckpt.store.owner import Owner
    from flashckpt.types import (
        ChunkRange,
        Claimant,
        Generation,
        Launch,
        Level,
        NodeInventory,
        Retrieval,
        Session,
        ShardId,
    )
    from flashckpt.wire import (
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


__all__ = [
    "VERSION",
    "AgentApi",
    "Brake",
    "Giver",
    "Hello",
    "Lease",
    "Overtaken",
    "PeerApi",
    "Progress",
    "PutEnd",
    "PutResult",
    "Receiver",
    "RetrieveFailed",
    "RetrieveNews",
    "RetrieveProgress",
    "Retrieved",
    "ShardProblem",
    "Source",
    "Taker",
]


@dataclass(frozen=True, slots=True)
class Lease:
    """What a trainer gets for its hello."""

    ticket: bytes
    agent_pid: int
    node_id: str
    granule_bytes: int  # sizes of slots are multiples of it

    def __repr__(self) -> str:
        return f"Lease(agent_pid={self.agent_pid}, node_id={self.node_id!r}, ticket=***)"


@dataclass(frozen=True, slots=True)
class Progress:
    """A generation got somewhere, or never will (level NONE, with the reason); or its flush failed, and is tried
    again."""

    generation: Generation
    level: Level
    reason: str = ""
    flush_problem: str = ""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A newer launch has taken the job over from the trainer's: none of its saves will count any more."""

    launch: Launch  # the newer one
    reason: str


@dataclass(frozen=True, slots=True)
class RetrieveProgress:
    done_bytes: int
    total_bytes: int  # grows while heads come in


@dataclass(frozen=True, slots=True)
class Retrieved:
    """All is here: "" = sealed, else the name of the file that it was fetched into in part."""

    places: tuple[tuple[ShardId, str], ...]


@dataclass(frozen=True, slots=True)
class ShardProblem:
    """Why a part of a shard can't be had: (node, reason) of each source; node "" where the reason is this node's."""

    shard: ShardId
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RetrieveFailed:
    problems: tuple[ShardProblem, ...]


RetrieveNews = RetrieveProgress | Retrieved | RetrieveFailed


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A rank whose process an agent knows."""

    rank: int
    lives: bool
    how: str = ""  # how it ended


class AgentApi(Protocol):
    """A node's agent as its trainers and its operator see it. Every call comes from a thread of its own.

    A ticket has been checked before the call that carries it; what was checked may have ended meanwhile.
    """

    def lease_of(self, ticket: bytes) -> Lease | None:
        """The live lease with this ticket. None: there is none, or it has ended."""

    def hello(
        self,
        owner: Owner,
        rank: int,
        version: int,
        job: str,
        launch: Launch | None = None,
        claimed_at: float = 0.0,
        acts_for: str = "",
    ) -> Lease:
        """`launch`: what the trainer began, at `claimed_at`, with an agent that was here before. `acts_for`: the
        identity of the trainer that this process acts for, where it is not one itself."""

    def listen(self, credentials: Bundle, advertise: str | None, port: int) -> str:
        """host:port for other nodes; starts the server for them if it does not run yet."""

    def claimants(self, ticket: bytes) -> tuple[Claimant, ...]:
        """The live trainers of the launch that the agent works for, unless a newer one has overtaken it."""

    def begin(self, ticket: bytes, session: Session, credentials: Bundle | None) -> None: ...

    def put_line(self, ticket: bytes, line: Line, base: Generation | None) -> Line:
        """The line in force."""

    def acquire(self, ticket: bytes, shard: ShardId, size_bytes: int, on_busy: str, timeout: float) -> int:
        """The id of a slot that now belongs to the lease's process."""

    def prepare(self, ticket: bytes, size_bytes: int, count: int, timeout: float) -> None: ...

    def sealed(self, ticket: bytes, shard: ShardId, tag: int, slot_id: int) -> None: ...

    def flush(self, generation: Generation | None, step: int | None, urgent: bool) -> Generation:
        """What is going to be flushed: the one that is named, that of the step, or the newest committed one. `urgent`:
        somebody waits for it."""

    def void(self, ticket: bytes, generation: Generation) -> None: ...

    def watch(self, ticket: bytes) -> Iterator[Progress | Overtaken | None]:
        """Ends when the agent drains or the lease does.

        None says that nothing is new: yielded about once a second, so that a caller who left is noticed.
        """

    def inventory(self, ticket: bytes) -> NodeInventory: ...

    def retrieve(self, ticket: bytes, retrievals: Sequence[Retrieval], timeout: float) -> Iterator[RetrieveNews | None]:
        """Progress, then Retrieved or RetrieveFailed. After Retrieved it goes on until it is closed, and what was
        fetched in part goes with it. None says that nothing is new, so that a caller who left is noticed."""

    def trainers(self, ticket: bytes) -> tuple[TrainerState, ...]:
        """Ranks of the launch, on all nodes that answer at once; those that no node knows are left out."""

    def bye(self, ticket: bytes) -> None: ...

    def status(self) -> dict[str, Any]:
        """Only what JSON can hold."""

    def stop(self, drain_timeout: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Hello:
    """How two agents make sure that they belong together."""

    version: int
    job: str
    node_id: str
    address: str  # "" where the speaker can't be reached
    launch: Launch | None  # the newest one the speaker has seen
    line: Line | None
    trainers: tuple[TrainerState, ...] = ()  # of the speaker's node


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
