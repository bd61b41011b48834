"""The start of a launch: who is on this node, and the launch's place in time."""

from __future__ import annotations

import json
import secrets
import struct
import time
from typing import TYPE_CHECKING

from flashckpt.errors import IncompatibleError
from flashckpt.topology import Topology
from flashckpt.types import Launch

if TYPE_CHECKING:
    from flashckpt.group import PrivateGroup


def agree_topology(group: PrivateGroup, node_id: str, directory_id: str, job: str) -> Topology:
    """Gathers who is where. Collective. Refuses what would silently not work."""
    if group.world == 1:
        return Topology(rank=0, world=1, node_ranks=(0,), global_ranks=group.global_ranks)
    mine = json.dumps([node_id, directory_id, job]).encode()
    ranks = [tuple(json.loads(one)) for one in group.gather(mine, "learning which ranks share a node")]
    jobs = sorted({job for _, _, job in ranks})
    if len(jobs) > 1:
        who = ", ".join(f"{one!r} on ranks {[r for r, x in enumerate(ranks) if x[2] == one]}" for one in jobs)
        raise IncompatibleError(
            f"ranks disagree on the job: {who}",
            hint="set the same job= or FLASHCKPT_JOB everywhere",
        )
    if len({(node, directory) for node, directory, _ in ranks}) > 1:
        nodes = sorted({node for node, _, _ in ranks})
        raise IncompatibleError(
            f"ranks of job {job!r} do not share one memory directory: nodes {nodes}",
            hint="this version keeps a job's checkpoints in the memory of one node; "
            "give all ranks the same FLASHCKPT_NODE_ID and FLASHCKPT_MEMORY_DIR",
        )
    node_ranks = tuple(rank for rank, (node, _, _) in enumerate(ranks) if node == node_id)
    return Topology(group.rank, group.world, node_ranks, group.global_ranks)


def next_launch(highest_epoch: int) -> Launch:
    """A launch above every one that was seen."""
    return Launch(epoch=max(1 + highest_epoch, int(time.time() * 1000)), nonce=secrets.randbits(64))


def agree_launch(group: PrivateGroup, highest_epoch: int) -> Launch:
    """A place in time above every launch any rank has seen, and a nonce. Collective.

    The clock keeps a launch on blank nodes above one that it can't see; the nonce keeps two launches apart
    even when the clock does not (two shards of one generation always come from one launch).
    """
    mine = next_launch(highest_epoch)
    answers = group.gather(struct.pack("<QQ", mine.epoch, mine.nonce), "agreeing on the epoch")
    proposed = [Launch(*struct.unpack("<QQ", one)) for one in answers]
    return Launch(epoch=max(one.epoch for one in proposed), nonce=proposed[0].nonce)
