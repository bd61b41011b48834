"""What a node tells a load of itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.types import Held, Level, Session, ShardId


@dataclass(frozen=True, slots=True)
class Holding:
    """One shard in a node's inventory."""

    held: Held
    level: Level  # REPLICATED where the node has a record of its generation, else SEALED
    verified: bool  # every chunk was checked here since it came; else only the head was


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """What one node holds, and what it remembers of who held what."""

    node_id: str
    holdings: tuple[Holding, ...]
    lines: tuple[Line, ...]  # of the launches that something is left of here, the newest last
    quarantined: int  # files that failed verification and were set aside
    damaged: tuple[tuple[ShardId, str], ...]  # found bad here lately, with the reason; not among the holdings
    past: tuple[Session, ...]  # of earlier launches, newest last: they say who would have a shard that is missing
    damaged_lines: int = 0  # files with lines that can't be believed
