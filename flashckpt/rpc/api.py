"""Defines what the servers call and the clients offer: plain Python, so that neither side sees gRPC or protobuf."""

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
    """What a trainer is given for its hello: the proof that its process may have slots."""

    ticket: bytes
    agent_pid: int
    node_id: str
    granule_bytes: int  # sizes of slots are multiples of it

    def __repr__(self) -> str:
        return f"Lease(agent_pid={self.agent_pid}, node_id={self.node_id!r}, ticket=***)"


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """A level that a generation has reached or never will (level NONE, with the reason); or a failed flush that is
    tried again."""

    generation: Generation
    level: Level
    reason: str = ""
    flush_problem: str = ""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Tells that a newer launch has taken over the job: none of the trainer's saves will count any more."""

    launch: Launch  # the newer one
    reason: str


WatchNews = GenerationProgress | Overtaken | Change


@dataclass(frozen=True, slots=True)
class RetrieveProgress:
    done_bytes: int
    total_bytes: int  # grows while heads come in


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Tells that the retrieval is complete. For each shard "" = sealed, else the name of the file with its fetched
    parts."""

    places: tuple[tuple[ShardId, str], ...]


@dataclass(frozen=True, slots=True)
class ShardProblem:
    """Why a part of a shard can't be fetched: (node, reason) per source; node "" for a reason of this node."""

    shard: ShardId
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RetrieveFailed:
    problems: tuple[ShardProblem, ...]


RetrieveNews = RetrieveProgress | Retrieved | RetrieveFailed


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A rank whose process an agent knows, live or ended."""

    rank: int
    lives: bool
    how: str = ""  # how it ended


class AgentApi(Protocol):
    """The calls that a node's agent offers to its trainers and its operator. Each call has a thread of its own.

    A ticket has been checked before the call that brings it; its lease may have ended since.
    """

    def lease_of(self, ticket: bytes) -> Lease | None:
        """Return the live lease with this ticket; None if there is none, or it has ended."""

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
        """Give the trainer a lease.

        `launch`: what the trainer began, at `claimed_at`, with an earlier agent of this node. `acts_for`: the identity
        of the trainer that this process acts for, if it is not one itself.
        """

    def listen(self, credentials: Bundle, advertise: str | None, port: int) -> str:
        """Return host:port for other nodes; start the server for them if it does not run yet."""

    def claimants(self, ticket: bytes) -> tuple[Claimant, ...]:
        """Return the live trainers of the launch that the agent works for, unless a newer one has overtaken it."""

    def begin(self, ticket: bytes, session: Session, credentials: Bundle | None) -> None: ...

    def put_line(self, ticket: bytes, line: Line, base: Generation | None) -> Line:
        """Return the line in force."""

    def acquire(self, ticket: bytes, shard: ShardId, size_bytes: int, on_busy: str, timeout: float) -> int:
        """Return the id of a slot that now belongs to the lease's process."""

    def prepare(self, ticket: bytes, size_bytes: int, count: int, timeout: float) -> None: ...

    def sealed(self, ticket: bytes, shard: ShardId, tag: int, slot_id: int) -> None: ...

    def flush(self, generation: Generation | None, step: int | None, urgent: bool) -> Generation:
        """Return the generation that is going to be flushed: the one that is named, that of the step, or the newest
        committed one.

        `urgent`: somebody waits for it.
        """

    def void(self, ticket: bytes, generation: Generation) -> None: ...

    def watch(self, ticket: bytes) -> Iterator[WatchNews | None]:
        """Yield news until the agent drains or the lease ends.

        None says that nothing is new: yielded about once per second, so that a caller who left is noticed.
        """

    def inventory(self, ticket: bytes) -> NodeInventory: ...

    def retrieve(self, ticket: bytes, retrievals: Sequence[Retrieval], timeout: float) -> Iterator[RetrieveNews | None]:
        """Yield progress, then Retrieved or RetrieveFailed.

        After Retrieved the call continues until it is closed, which removes what was fetched in part. None says that
        nothing is new, so that a caller who left is noticed.
        """

    def trainers(self, ticket: bytes) -> tuple[TrainerState, ...]:
        """Return the ranks of the launch, on all nodes that answer at once; ranks that no node knows are left out."""

    def bye(self, ticket: bytes) -> None: ...

    def status(self) -> dict[str, Any]:
        """Return the status, as values that JSON can hold."""

    def stop(self, drain_timeout: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Hello:
    """What two agents tell each other first, to make sure that they belong to the same job."""

    version: int
    job: str
    node_id: str
    address: str  # "" if the sender can't be reached
    launch: Launch | None  # the newest launch that the sender has seen
    line: Line | None
    trainers: tuple[TrainerState, ...] = ()  # of the sender's node
