"""What goes into the agent's core (events) and what comes out of it (effects). Plain values, no behaviour."""

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
    """The agent looked at what lies in its directory."""

    held: tuple[Held, ...]
    lines: tuple[Line, ...]  # of launches that something is left of; the one in force last
    records: tuple[Record, ...]
    session: Session | None
    base: Generation | None = None  # what the session has loaded


@dataclass(frozen=True, slots=True)
class Begun:
    """Trainers of this node began, or go on with, a launch."""

    session: Session


@dataclass(frozen=True, slots=True)
class LinePut:
    """The launch goes on from `base` (None: from nothing): what its line abandons is dead."""

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
    """Whoever asked does not wait any longer, or what was granted could not be had."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShardSealed:
    """A shard lies sealed in the directory: a trainer said so, or a scan found it."""

    held: Held


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A rank of this node will not deliver its shard of a generation."""

    generation: Generation
    rank: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A trainer said goodbye or died."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Rotten:
    """A held shard failed verification."""

    shard: ShardId
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A held shard is not in the directory any more, though nobody here released it."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class FlushWanted:
    """A generation is wanted in persist_dir. None: nobody works here any more, so the newest is, also if it is only
    committed after this."""

    generation: Generation | None
    reason: str
    urgent: bool = False  # somebody waits for it


@dataclass(frozen=True, slots=True)
class FlushEnded:
    """This node's flusher ended; `reason` says what went wrong, "" = nothing."""

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
    launch: Launch  # in whose name it was sent
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
    REFUSED = enum.auto()  # for good: nobody needs it any more
    LATER = enum.auto()  # refused for now
    FAILED = enum.auto()  # in transport


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
    """Give the slot that was asked for."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RefuseBusy:
    request_id: int
    reason: str
    in_vain: bool = False  # to ask again now would not help


@dataclass(frozen=True, slots=True)
class RefuseFenced:
    """To a request, or (None) to the event itself."""

    request_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StartPush:
    held: Held
    node_id: str
    heals: bool = False  # for the healer, not for a commit


@dataclass(frozen=True, slots=True)
class Send:
    node_id: str
    body: Body


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to Told."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer to PutAsked: take it."""

    heals: bool = False  # only where saves have room enough beside it


@dataclass(frozen=True, slots=True)
class Decline:
    """The answer to PutAsked: don't."""

    answer: PutHave | PutRefused


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The answer to Received and Fetched: this copy counts. Absent: nobody needs it any more."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The answer to GetAsked: let it read this."""

    held: Held


@dataclass(frozen=True, slots=True)
class DeclineGet:
    """The answer to GetAsked: don't."""

    refused: GetRefused


@dataclass(frozen=True, slots=True)
class Notify:
    """To all trainers of this node."""

    generation: Generation
    level: Level  # NONE: it will never get further; `reason` says why
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotifyFlushFailed:
    """To all trainers of this node: the flush of this generation failed, and is tried again."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class HurryFlush:
    """Somebody waits for the flush that is under way."""


@dataclass(frozen=True, slots=True)
class StartFlush:
    """This node's part of a flush."""

    order: FlushOrder
    writers: tuple[tuple[str, tuple[int, ...]], ...]  # node → the ranks whose shards it writes
    commits: bool  # this node gave the order, and its flusher writes the index


@dataclass(frozen=True, slots=True)
class StopFlush:
    """The order does not hold any more."""


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
