"""Defines what the agent's core takes (events) and returns (effects). Plain values, no behaviour."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.wire import (
        Answer,
        Body,
        Envelope,
        FlushOrder,
        GetOpen,
        GetRefused,
        PutHave,
        PutOpen,
        PutRefused,
    )
    from flashckpt.types import Generation, Held, Launch, Level, Record, Session, ShardId

# --- events: from this node


@dataclass(frozen=True, slots=True)
class Started:
    """The agent has read its directory."""

    held: tuple[Held, ...]
    lines: tuple[Line, ...]  # of launches of which something is left; the one in force last
    records: tuple[Record, ...]
    session: Session | None
    base: Generation | None = None  # what the session's launch has loaded


@dataclass(frozen=True, slots=True)
class Begun:
    """Trainers of this node began a launch, or joined the one that is running."""

    session: Session


@dataclass(frozen=True, slots=True)
class LinePut:
    """A launch continues from `base` (None: from nothing). What its line abandons is dead."""

    launch: Launch
    line: Line
    base: Generation | None


@dataclass(frozen=True, slots=True)
class SlotWanted:
    """A rank asks for a slot to write `shard` into."""

    request_id: int
    lease_id: int
    shard: ShardId
    may_wait: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class WantDropped:
    """The trainer no longer waits for its slot, or the granted slot could not be provided."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShardSealed:
    """A sealed shard lies in the directory: a trainer reported it, or a scan found it."""

    held: Held


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A rank of this node will not deliver its shard of a generation."""

    generation: Generation
    rank: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A trainer closed its connection or died."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Rotten:
    """A held shard failed verification."""

    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A held shard is missing from the directory, although this agent did not release it."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class FlushWanted:
    """A generation is wanted in persist_dir.

    None: the last trainer has left, so the newest committed generation is wanted, even if it is committed after this
    event.
    """

    generation: Generation | None
    reason: str
    urgent: bool = False  # somebody waits for it


@dataclass(frozen=True, slots=True)
class FlushEnded:
    """This node's flusher ended. `reason` says what went wrong; "" = nothing."""

    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# --- events: from other nodes


@dataclass(frozen=True, slots=True)
class Told:
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Answered:
    """A node answered what was sent to it."""

    node_id: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message or a push to a node failed in transport."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PutAsked:
    """A node wants to store a replica here."""

    put: PutOpen


@dataclass(frozen=True, slots=True)
class Received:
    """A replica was received, verified and sealed."""

    sender: str
    launch: Launch  # the launch in whose name it was sent
    held: Held


@dataclass(frozen=True, slots=True)
class GetAsked:
    """A node wants to read a shard."""

    get: GetOpen


@dataclass(frozen=True, slots=True)
class Fetched:
    """A shard was fetched from other nodes for a load, verified and sealed."""

    held: Held


class PushEnd(enum.Enum):
    ACKED = enum.auto()
    REFUSED = enum.auto()  # for good: the node does not need the shard
    LATER = enum.auto()  # refused for now
    FAILED = enum.auto()  # the connection failed


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push ended."""

    shard: ShardId
    node_id: str
    end: PushEnd
    digest: bytes = b""  # what the holder acknowledged
    reason: str = ""
    launch: Launch | None = None  # the newest one that a refusing node has seen
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """A node said hello from another address."""

    node_id: str
    address: str


Event = (
    Started
    | Begun
    | LinePut
    | SlotWanted
    | WantDropped
    | ShardSealed
    | GaveUp
    | LeaseEnded
    | Rotten
    | Gone
    | FlushWanted
    | FlushEnded
    | Tick
    | Told
    | Answered
    | Unreachable
    | PutAsked
    | Received
    | GetAsked
    | Fetched
    | Pushed
    | Moved
)

# --- effects


@dataclass(frozen=True, slots=True)
class KeepSession:
    session: Session
    base: Generation | None = None


@dataclass(frozen=True, slots=True)
class KeepLine:
    line: Line


@dataclass(frozen=True, slots=True)
class KeepRecord:
    """IMPORTANT: durable in the directory before any later effect of the same list is carried out."""

    record: Record


@dataclass(frozen=True, slots=True)
class Release:
    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Give the requester its slot."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RefuseBusy:
    request_id: int
    reason: str
    in_vain: bool = False  # asking again now would not help


@dataclass(frozen=True, slots=True)
class RefuseFenced:
    """Refuse a request, or (None) the event itself, because a newer launch has taken over."""

    request_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StartPush:
    held: Held
    node_id: str
    heals: bool = False  # ordered by the healer; no commit waits for it


@dataclass(frozen=True, slots=True)
class Send:
    node_id: str
    body: Body


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer Told."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer PutAsked: receive the replica."""

    heals: bool = False  # only if saves have enough room beside it


@dataclass(frozen=True, slots=True)
class Decline:
    """Answer PutAsked: refuse the replica."""

    answer: PutHave | PutRefused


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer Received and Fetched: this copy counts. Without this effect nobody needs the copy any more."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Answer GetAsked: send the shard."""

    held: Held


@dataclass(frozen=True, slots=True)
class DeclineGet:
    """Answer GetAsked: refuse the shard."""

    refused: GetRefused


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell all trainers of this node which level a generation has reached."""

    generation: Generation
    level: Level  # NONE: it will never reach a higher one; `reason` says why
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotifyFlushFailed:
    """Tell all trainers of this node that the flush of this generation failed and will be tried again."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class HurryFlush:
    """Tell the running flusher that somebody waits for it."""


@dataclass(frozen=True, slots=True)
class StartFlush:
    """Start this node's part of a flush."""

    order: FlushOrder
    writers: tuple[tuple[str, tuple[int, ...]], ...]  # node → the ranks whose shards it writes
    commits: bool  # this node gave the order: its flusher writes the index


@dataclass(frozen=True, slots=True)
class StopFlush:
    """Stop the flusher: its order is no longer in force."""


Effect = (
    KeepSession
    | KeepLine
    | KeepRecord
    | Release
    | Quarantine
    | Grant
    | RefuseBusy
    | RefuseFenced
    | StartPush
    | Send
    | Reply
    | Accept
    | Decline
    | Acknowledge
    | Serve
    | DeclineGet
    | Notify
    | NotifyFlushFailed
    | HurryFlush
    | StartFlush
    | StopFlush
)
