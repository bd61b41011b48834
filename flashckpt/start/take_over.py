"""The two ends of a load: the job is taken over before anybody looks at what is there, and its line is kept after."""

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
    """That this node knows of: a line, a shard, a record, what its agent last worked for, or persist_dir."""
    known = 0
    session = store.read_session()
    if session is not None:
        with contextlib.suppress(CorruptShardError):  # of another version: its agent forgets it too
            known = decode_session(session).launch.epoch
    return max(known, on_disk, store.highest_epoch())


def take_over(group: PrivateGroup, topology: Topology, slots: Slots, highest: int) -> None:
    """Every load begins a new launch, so that its line abandons also what this one saved above it. Collective.

    IMPORTANT: the agents are taken over before anybody looks at what lies there. A launch that is still running
    could otherwise commit a newer generation during the load, and free the one that is being read.
    """
    slots.enter(agree_launch(group, topology, highest))
    group.together("taking the agents over", lambda: slots.begin() if topology.is_leader else None)


def put_line(group: PrivateGroup, topology: Topology, slots: Slots, line: Line, base: Generation | None) -> None:
    """From now on the job goes on from `base`, and without what the line abandons. Collective."""
    group.together("keeping the line", lambda: slots.put_line(line, base) if topology.is_leader else None)
