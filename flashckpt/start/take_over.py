"""Takes the job over before a load looks at what the nodes hold, and keeps its line after the load."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError
from flashckpt.rpc.session import decode_session
from flashckpt.start.launch import agree_launch

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.own_slots import Slots
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation


def highest_epoch(store: SlotStore, on_disk: int) -> int:
    """Return the highest epoch that this node knows of: of a line, shard, record, its agent's session, or `on_disk`."""
    known = 0
    session = store.read_session()
    if session is not None:
        with contextlib.suppress(CorruptShardError):  # a session of another version: the agent drops it too
            known = decode_session(session).launch.epoch
    return max(known, on_disk, store.highest_epoch())


def take_over(group: PrivateGroup, topology: Topology, slots: Slots, highest: int) -> None:
    """Begin a new launch and tell every agent. Collective.

    A load needs a new launch, so that its line also abandons what the present launch has saved above the loaded step.

    IMPORTANT: take the agents over before any rank takes an inventory. A launch that is still running could otherwise
    commit a newer generation during the load, and free the one that is being read.
    """
    slots.enter(agree_launch(group, topology, highest))
    group.together("taking the agents over", lambda: slots.begin() if topology.is_leader else None)


def put_line(group: PrivateGroup, topology: Topology, slots: Slots, line: Line, base: Generation | None) -> None:
    """Keep the line on every node: the job goes on from `base`, and without what the line abandons. Collective."""
    group.together("keeping the line", lambda: slots.put_line(line, base) if topology.is_leader else None)
