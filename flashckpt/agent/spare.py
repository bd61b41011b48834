"""Whether a node has room for a copy that only heals. Pure.

Saves come first: a copy that was taken and acknowledged stays until the next commit, so it may lie only where the
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
    """How many more a launch may come to need on a node that has `slots` for it already."""
    own = sum(len(member.ranks) for member in session.members if member.node_id == node_id)
    # As many of each hosted rank as a receiver takes at most.
    most = own * session.slots_per_rank + len(placement.held_by(node_id)) * (session.slots_per_rank + 1)
    return max(0, most - slots)


def why_no_room(shard: ShardId, size_bytes: int, world: int, missing: int, room: Room) -> str | None:
    """Why a copy of that size is not taken where `missing` slots of a launch of `world` ranks are still to come."""
    # Another number of ranks divides the same state.
    expected = missing * -(-size_bytes * shard.world // world)
    reason = check_room(size_bytes + expected, room)
    return None if reason is None else f"{format_bytes(expected)} are kept free for saves: {reason}"
