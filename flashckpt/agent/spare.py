"""Decides whether a node has room for a copy that only heals. Pure.

Saves come first: a copy that was received and acknowledged stays until the next commit, so it is received only if the
launch's own slots still fit beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.store.room import check_room, format_bytes

if TYPE_CHECKING:
    from flashckpt.protocol.placement import Placement
    from flashckpt.store.room import Room
    from flashckpt.types import Session, ShardId


def missing_slots(session: Session, placement: Placement, node_id: str, slots: int) -> int:
    """Return how many more slots a launch may need on a node that has `slots` for it already."""
    own = sum(len(member.ranks) for member in session.members if member.node_id == node_id)
    # For each hosted rank, as many as a receiver accepts at most.
    most = own * session.slots_per_rank + len(placement.held_by(node_id)) * (session.slots_per_rank + 1)
    return max(0, most - slots)


def why_no_room(shard: ShardId, size_bytes: int, world: int, missing: int, room: Room) -> str | None:
    """Return why a copy of that size is refused while `missing` slots of a launch of `world` ranks are still to be
    made."""
    # Another number of ranks divides the same state differently.
    expected = missing * -(-size_bytes * shard.world // world)
    reason = check_room(size_bytes + expected, room)
    return None if reason is None else f"{format_bytes(expected)} are kept free for saves: {reason}"
