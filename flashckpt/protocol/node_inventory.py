"""Defines what a node tells a load about itself. Values only."""

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
    level: Level  # REPLICATED if the node has a record of its generation, else SEALED
    verified: bool  # True: every chunk was checked here since it arrived; False: only the head was


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """What one node holds, and what it remembers of who held what."""

    node_id: str
    holdings: tuple[Holding, ...]
    lines: tuple[Line, ...]  # of launches of which something is left here, the newest last
    quarantined: int  # files that failed verification and were set aside
    damaged: tuple[tuple[ShardId, str], ...]  # found damaged here lately, with the reason; not among the holdings
    past: tuple[Session, ...]  # of earlier launches, newest last: they tell which nodes should have a missing shard
    damaged_lines: int = 0  # number of files whose lines can't be trusted
