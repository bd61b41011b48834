"""One simulated machine: a memory directory that outlives its agent, and the real core of that agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.load.inventory import encode
from flashckpt.protocol.events import Started
from flashckpt.protocol.line import by_head, launch_of, newer, order
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.types import Level

if TYPE_CHECKING:
    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation, Held, Launch, Record, Session, ShardId
    from tests.sim.truth import Instance


class File:
    """A sealed shard in a directory. `instance` is the truth about where it comes from; no agent sees it."""

    __slots__ = ("good", "held", "instance")

    def __init__(self, held: Held, instance: Instance) -> None:
        self.held = held
        self.instance = instance
        self.good = True


class Machine:
    """Everything but `core` and what follows it survives the agent; nothing survives the machine."""

    def __init__(self, number: int, name: str, domain: str, offset: float) -> None:
        self.number = number
        self.name = name
        self.domain = domain
        self.offset = offset  # of its monotone clock
        self.alive = True
        self.isolated = False  # cut off from everybody, with its memory
        # the directory
        self.files: dict[ShardId, File] = {}
        self.lines: dict[Launch, Line] = {}  # by head
        self.records: tuple[Record, ...] = ()
        self.session: Session | None = None
        self.base: Generation | None = None  # what the session has loaded
        self.quarantined = 0
        # the agent
        self.core: AgentCore | None = None
        self.incarnation = 0
        self.paused_until = 0.0
        self.heard: tuple[int, int] = (0, 0)  # the newest launch that this agent was told of
        self.partial: set[ShardId] = set()  # puts that broke and may be resumed

    def __repr__(self) -> str:
        return self.name

    def started(self) -> Started:
        """What an agent finds that looks into the directory."""
        held = tuple(file.held for file in self.files.values())
        return Started(held, tuple(by_head(self.lines.values()).values()), self.records, self.session, self.base)

    def wipe(self) -> None:
        """Its memory is gone."""
        self.files.clear()
        self.lines.clear()
        self.session, self.base, self.records = None, None, ()

    @property
    def line(self) -> Line | None:
        """In force."""
        return max(self.lines.values(), key=lambda line: order(line.head), default=None)

    def keep_line(self, line: Line) -> None:
        """Write a line as `store/lines.py` does: join it with what is there of its launch, and remove idle ones."""
        joined = newer(self.lines.get(line.head), line)
        if joined is not None:
            self.lines[line.head] = joined
        in_force = self.line
        present = {launch_of(shard.generation) for shard in self.files}
        for head, one in list(self.lines.items()):
            idle = head not in present and in_force is not None and head != in_force.head
            if idle and in_force.supersedes(one):
                del self.lines[head]

    def current(self) -> tuple[int, int]:
        """The newest launch that the directory knows of."""
        known = [(0, 0)]
        if self.session is not None:
            known.append((self.session.launch.epoch, self.session.launch.nonce))
        known += [order(head) for head in self.lines]
        return max(known)

    def highest_epoch(self) -> int:
        """As a trainer learns it when it begins: from the directory and from the agent."""
        newest = self.core.newest if self.core is not None else None
        epochs = [shard.generation.epoch for shard in self.files]
        return max(self.current()[0], newest.epoch if newest is not None else 0, *epochs, 0)

    def inventory(self) -> bytes:
        """As its agent tells it."""
        recorded = {record.generation for record in self.records}
        holdings = tuple(
            Holding(file.held, Level.REPLICATED if shard.generation in recorded else Level.SEALED, verified=False)
            for shard, file in self.files.items()
        )
        lines = self.core.lines if self.core is not None else tuple(by_head(self.lines.values()).values())
        return encode(NodeInventory(self.name, holdings, lines, self.quarantined, (), ()))

    def hear(self, launch: Launch | None, line: Line | None) -> None:
        heads = (launch, line.head if line is not None else None)
        self.heard = max([self.heard, *(order(one) for one in heads if one is not None)])
