"""Tracks which launch a node works for, who its members are, and which newer launch has taken over. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import KeepLine
from flashckpt.protocol.line import by_head, launch_of, newer
from flashckpt.protocol.placement import Placement, place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashckpt.protocol.events import Effect
    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation, Launch, Member, Session, ShardId


class CurrentLaunch:
    """The launch that this node works for. All parts of the core read it; only the core changes it."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.session: Session | None = None
        self.placement: Placement | None = None
        self.line: Line | None = None  # in force
        self._lines: dict[Launch, Line] = {}  # of launches with shards or a record here, and the one in force
        self.seen: Launch | None = None  # the newest launch that any message named
        # The last answer of `newest`, with the values it was computed from.
        self._newest: tuple[Launch | None, Session | None, Line | None, Launch | None] = (None, None, None, None)

    # --- changes --------------------------------------------------------------------------------------------

    def start(self, lines: Iterable[Line]) -> None:
        """Adopt the lines found in the directory."""
        self._lines = by_head(lines)
        self.line = next(reversed(self._lines.values()), None)

    def enter(self, session: Session) -> Placement:
        self.session = session
        self.placement = place(session.members, session.replicas, session.strategy)
        return self.placement

    def learn(self, launch: Launch | None, line: Line | None) -> list[Effect]:
        """Adopt a launch or line if it is newer."""
        if launch is not None and (self.seen is None or self.seen.is_older_than(launch)):
            self.seen = launch
        # The line of an overtaken launch is ignored: the newer launch has chosen, or is choosing, from what lies here,
        # and its own line will say what is dead. The old line might abandon the very generation that the newer launch
        # loads.
        if line is None or self.is_older(line.head):
            return []
        in_force = newer(self.line, line)
        if in_force is None or in_force == self.line:
            return []
        self.line = self._lines[in_force.head] = in_force
        return [KeepLine(in_force)]

    def forget(self, present: Collection[Launch]) -> None:
        """Drop the lines of launches of which nothing is left here, if the line in force knows of those launches."""
        line = self.line
        if line is not None:
            self._lines = {
                head: one
                for head, one in self._lines.items()
                if head == line.head or head in present or not line.supersedes(one)
            }

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the lines of launches of which something is left here; the one in force comes last."""
        return tuple(by_head(self._lines.values()).values())

    def root_of(self, launch: Launch) -> Launch | None:
        """Return the root of a launch's line; None if its line is not known here."""
        line = self._lines.get(launch)
        return None if line is None else line.root

    # --- launches -------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Launch | None:
        """The newest launch known here, from any source."""
        seen, session, line, answer = self._newest
        if seen is not self.seen or session is not self.session or line is not self.line:
            known = [self.session.launch] if self.session is not None else []
            known += [self.seen] if self.seen is not None else []
            known += [self.line.head] if self.line is not None else []
            answer = max(known, key=lambda launch: (launch.epoch, launch.nonce), default=None)
            self._newest = (self.seen, self.session, self.line, answer)
        return answer

    @property
    def is_fenced(self) -> bool:
        """True if a newer launch was seen than the one that this node's trainers began."""
        return self.session is not None and self.is_older(self.session.launch)

    def is_older(self, launch: Launch) -> bool:
        newest = self.newest
        return newest is not None and launch.is_older_than(newest)

    def is_killed(self, generation: Generation) -> bool:
        return self.line is not None and self.line.kills(generation, self.root_of(launch_of(generation)))

    def is_of_this_launch(self, generation: Generation) -> bool:
        return self.session is not None and launch_of(generation) == self.session.launch

    def why_fenced(self, launch: Launch) -> str:
        newest = self.newest
        if newest is None or not launch.is_older_than(newest):
            return f"the launch of epoch {launch.epoch} has not begun on {self.node_id}"
        return overtaken_by(newest, launch)

    def why_not_begin(self, session: Session) -> str:
        """Return why trainers may not begin the launch here; "" = they may, or have begun it."""
        if self.is_older(session.launch):
            return self.why_fenced(session.launch)
        # The same launch with other members would be two sessions under one name: the first one stays.
        if self.session is not None and self.session.launch == session.launch and self.session != session:
            return "this launch began with other members or settings"
        return ""

    # --- members --------------------------------------------------------------------------------------------

    @property
    def is_coordinator(self) -> bool:
        return self.session is not None and self.session.coordinator == self.node_id

    @property
    def replicas(self) -> int:
        """The number of copies on other nodes that a shard of this launch needs."""
        return self.placement.replicas if self.placement is not None else 0

    def member(self, node_id: str) -> Member | None:
        members = self.session.members if self.session is not None else ()
        return next((member for member in members if member.node_id == node_id), None)

    def owner_of(self, shard: ShardId) -> str | None:
        """Return the node whose rank wrote the shard; None if it was written in another launch."""
        if self.session is None or not self.is_of_this_launch(shard.generation):
            return None
        return next((m.node_id for m in self.session.members if shard.rank in m.ranks), None)

    def owns(self, shard: ShardId) -> bool:
        """Return True if a rank of this node wrote the shard in the present launch."""
        return self.owner_of(shard) == self.node_id

    def buddies(self, rank: int) -> tuple[str, ...]:
        return self.placement.buddies(rank)[: self.replicas] if self.placement is not None else ()

    def why_stranger(self, sender: str, launch: Launch) -> tuple[str, bool]:
        """Return why a node's messages are refused ("" = they are not), and whether a later try may succeed."""
        if self.is_older(launch):
            return self.why_fenced(launch), False
        if self.session is None or self.session.launch != launch:
            return f"{self.node_id} has not begun this launch yet", True
        if self.member(sender) is None:
            return f"{sender} is no member of this launch", False
        return "", False


def overtaken_by(newer: Launch, older: Launch) -> str:
    return f"a launch of epoch {newer.epoch} has taken over from that of epoch {older.epoch}"
