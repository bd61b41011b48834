"""Defines the messages between agents. They are state, not commands: each may be lost, repeated or late without
harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.types import ChunkRange, Generation, Launch, Record, ShardId


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life that asks for news."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tells the coordinator that this shard lies on its own node and, verified, on `holders`.

    A report with fewer holders takes the earlier one back.
    """

    shard: ShardId
    digest: bytes
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tells the coordinator that a rank of the sender will never deliver its shard of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class FlushOrder:
    """Orders all nodes to write this generation to persist_dir, for as long as the order is in force."""

    generation: Generation
    attempt: int  # different for every try; names the temporary directory
    reason: str
    down: tuple[str, ...]  # nodes whose shards others write
    urgent: bool = False  # somebody waits for it: it does not yield to the training

    @property
    def token(self) -> str:
        return f"{self.attempt:016x}"


@dataclass(frozen=True, slots=True)
class FlushFailure:
    """Tells how a flush failed.

    From a node whose part failed to the node that ordered; from that one to all, until a flush succeeds.
    """

    generation: Generation
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tells what the coordinator has decided: the newest record of this launch, and its void generations.

    The fields on flushes also come from the node that orders them if the coordinator does not answer.
    """

    record: Record | None
    voids: tuple[Generation, ...]
    flush: FlushOrder | None = None
    persisted: Generation | None = None  # the newest that lies in persist_dir
    failure: FlushFailure | None = None  # of the last flush


@dataclass(frozen=True, slots=True)
class WantPersisted:
    """Tells the node that orders flushes that this generation is wanted in persist_dir."""

    generation: Generation
    reason: str
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Asks the owner of a shard to push it again: the sender's copy turned out damaged and was set aside."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class WantBack:
    """Asks a holder of a shard to push it back: the sender's own copy turned out damaged."""

    shard: ShardId
    digest: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A copy that the healer ordered and that its target refused."""

    rank: int
    target: str  # node id
    reason: str


@dataclass(frozen=True, slots=True)
class Holds:
    """Tells the healer which shards the sender has of the generation that must not be lost."""

    generation: Generation
    world: int  # 0 if the sender does not know it: it has no shard of it
    committed: bool  # the sender has its record
    ranks: tuple[int, ...]  # ascending
    sizes_bytes: tuple[int, ...]  # of these ranks' shards
    digests: tuple[bytes, ...]  # of these ranks' shards: copies have to agree
    refusals: tuple[Refusal, ...] = ()


Body = Beat | Report | GiveUp | Announce | Lost | WantBack | WantPersisted | FlushFailure | Holds


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """One copy to make of a shard of the kept generation."""

    rank: int
    source: str  # node ids
    target: str
    digest: bytes = b""  # of the content; empty in a summary


@dataclass(frozen=True, slots=True)
class Fatal:
    """Nodes that hold all copies of a shard."""

    nodes: tuple[str, ...]  # sorted
    rank: int  # of such a shard


@dataclass(frozen=True, slots=True)
class Survival:
    """The losses of nodes that would be survived."""

    any_nodes: int  # any set of so many nodes may be lost; -1: a shard is lost already
    live: int  # nodes that are counted
    fatal: tuple[Fatal, ...]  # the smallest sets of nodes that must not be lost together, or the first of them
    fatal_count: int
    fatal_domains: tuple[str, ...]  # domains of which not all nodes may be lost, or the first of them


@dataclass(frozen=True, slots=True)
class Health:
    """How the kept generation stands, as its healer sees it."""

    generation: Generation
    world: int
    committed: bool
    wanted: int  # copies of every shard
    copies: int  # number of copies of the shard that has the fewest
    lost: tuple[int, ...]  # ranks whose shard nobody has, or the first of them
    lost_count: int
    at_risk: tuple[int, ...]  # ranks whose shard has fewer copies than wanted, or the first of them
    at_risk_count: int
    left_copies: int  # still to be made
    left_bytes: int
    running: tuple[CopyOrder, ...]  # or the first of them
    missing: tuple[str, ...]  # members that do not answer, or the first of them
    survival: Survival
    reason: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """Wraps every message: its sender, the sender's launch and line."""

    sender: str  # node id
    launch: Launch
    line: Line | None
    body: Body


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers every message: what the receiver knows, which may be newer than what the sender does."""

    launch: Launch | None  # the newest launch that the receiver has seen
    line: Line | None
    record: Record | None  # of the sender's launch
    voids: tuple[Generation, ...]
    refused: str = ""  # why the message was refused; "" = it was accepted
    flush: FlushOrder | None = None
    persisted: Generation | None = None
    failure: FlushFailure | None = None
    base: Generation | None = None  # what the sender's launch has loaded
    health: Health | None = None  # from the healer, to Holds
    copies: tuple[CopyOrder, ...] = ()  # copies of the generation in `health` that the sender has to make or to expect


@dataclass(frozen=True, slots=True)
class PutOpen:
    """Asks to store a replica."""

    sender: str
    launch: Launch
    line: Line | None
    shard: ShardId
    tag: int
    digest: bytes
    size_bytes: int  # of the complete file
    head_bytes: int  # of what comes before the data area


@dataclass(frozen=True, slots=True)
class PutReady:
    """Accept a replica. A transfer that continues a broken one starts after the bytes that were kept."""

    next_head_offset: int
    next_chunk: int


@dataclass(frozen=True, slots=True)
class PutHave:
    """The shard is here already, with these bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class PutRefused:
    reason: str
    retry: bool  # a later try may succeed
    launch: Launch | None  # the newest launch that the receiver has seen
    line: Line | None


@dataclass(frozen=True, slots=True)
class GetOpen:
    """Asks for a shard, or for parts of it."""

    sender: str
    launch: Launch  # the sender's launch, not the shard's
    line: Line | None
    shard: ShardId
    digest: bytes
    with_head: bool
    ranges: tuple[ChunkRange, ...]  # ascending, not adjacent or overlapping


@dataclass(frozen=True, slots=True)
class GetInfo:
    """Describes the shard that follows."""

    size_bytes: int  # of the complete file
    head_bytes: int  # of what comes before the data area
    chunk_bytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class GetRefused:
    """Refuses a shard, or the rest of it."""

    reason: str
    retry: bool  # a later try may succeed
    launch: Launch | None = None  # the newest launch that the holder has seen
    line: Line | None = None
