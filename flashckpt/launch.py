"""The start of a launch: who is on which node, and the launch's place in time."""

from __future__ import annotations

import json
import secrets
import struct
import time
from typing import TYPE_CHECKING

from flashckpt.errors import IncompatibleError
from flashckpt.topology import Node, Topology
from flashckpt.types import Launch

if TYPE_CHECKING:
    from flashckpt.config import Settings
    from flashckpt.group import PrivateGroup

# What decides when a rank saves, loads or makes memory: where ranks differ in it, they wait for each other in vain.
_COLLECTIVE = (
    "interval",
    "fixed_steps",
    "persist_interval",
    "persist_interval_minutes",
    "save_cooldown",
    "enable_first_step_checkpoint",
    "prewarm",
    "load_only",
    "initial_load_path",
    "same_on_ranks",
    "on_busy",
)


def agree_topology(group: PrivateGroup, settings: Settings, directory_id: str) -> Topology:
    """Gathers who is where. Collective. Refuses what would silently not work."""
    config = settings.config
    agreed = {
        "job": settings.job,
        "agent": "auto" if settings.uses_agent else "off",
        "replicas": config.replicas,
        "placement": config.placement,
        "slots_per_rank": config.slots,
        "keep_memory": config.keep_memory,
        "certificates": "operator's" if settings.tls_files else "made",
        **{name: getattr(config, name) for name in _COLLECTIVE},
    }
    mine = json.dumps([settings.node_id, directory_id, settings.domain, agreed]).encode()
    ranks = [json.loads(one) for one in group.gather(mine, "learning which ranks share a node")]
    for name in agreed:
        _refuse_difference(name, [str(one[3][name]) for one in ranks])
    members: dict[str, list[int]] = {}
    for rank, (node_id, *_) in enumerate(ranks):
        members.setdefault(node_id, []).append(rank)
    nodes = []
    for node_id, node_ranks in members.items():
        directories = {ranks[rank][1] for rank in node_ranks}
        if len(directories) > 1:
            raise IncompatibleError(
                f"ranks {node_ranks} of job {settings.job!r} all call their node {node_id!r}, but do not share one "
                "memory directory",
                hint="two machines need two names (FLASHCKPT_NODE_ID); ranks of one machine need the same memory_dir",
            )
        nodes.append(Node(node_id, ranks[node_ranks[0]][2], tuple(node_ranks)))
    _refuse_shared_directory(ranks, settings.job)
    if len(nodes) > 1 and not settings.uses_agent:
        raise IncompatibleError(
            f"ranks of job {settings.job!r} are on nodes {sorted(members)}, and agent='off' is for one node",
            hint="leave agent= at 'auto', or give all ranks the same FLASHCKPT_NODE_ID and FLASHCKPT_MEMORY_DIR",
        )
    return Topology(group.rank, group.world, tuple(nodes), group.global_ranks)


def _refuse_difference(name: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        who = ", ".join(
            f"{one!r} on ranks {[r for r, v in enumerate(values) if v == one]}" for one in sorted(set(values))
        )
        raise IncompatibleError(f"ranks disagree on {name}: {who}", hint=f"set the same {name} everywhere")


def _refuse_shared_directory(ranks: list[list[str]], job: str) -> None:
    owners: dict[str, str] = {}
    for rank, (node_id, directory_id, *_) in enumerate(ranks):
        if owners.setdefault(directory_id, node_id) != node_id:
            raise IncompatibleError(
                f"rank {rank} of job {job!r} calls its node {node_id!r}, but shares the memory directory of node "
                f"{owners[directory_id]!r}",
                hint="a node is one memory: give ranks that share it the same FLASHCKPT_NODE_ID, "
                "or each node its own FLASHCKPT_MEMORY_DIR",
            )


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
