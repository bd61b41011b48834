"""What the servers call and the clients offer: plain Python, so that neither side sees gRPC or protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashckpt.protocol.verdict import Change
from flashckpt.rpc.settings import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashckpt.protocol.line import Line
    from flashckpt.protocol.node_inventory import NodeInventory
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.owner import Owner
    from flashckpt.types import (
        Claimant,
        Generation,
        Launch,
        Level,
        Retrieval,
        Session,
        ShardId,
    )


__all__ = [
    "VERSION",
    "AgentApi",
    "GenerationProgress",
    "Hello",
    "Lease",
    "Overtaken",
    "RetrieveFailed",
    "RetrieveNews",
    "RetrieveProgress",
    "Retrieved",
    "ShardProblem",
    "WatchNews",
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
class GenerationProgress:
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


WatchNews = GenerationProgress | Overtaken | Change


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

    def watch(self, ticket: bytes) -> Iterator[WatchNews | None]:
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
