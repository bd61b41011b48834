"""The start of a launch: who is on which node, and the launch's place in time."""

from __future__ import annotations

import json
import logging
import secrets
import struct
import time
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, IncompatibleError
from flashckpt.ranks.topology import Node, Topology
from flashckpt.types import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.config import Settings
    from flashckpt.ranks.group import PrivateGroup

log = logging.getLogger(__name__)

MAX_CLOCK_DIFFERENCE_MS = 24 * 3_600_000
LATEST_CLOCK_MS = 4_102_444_800_000  # 2100: later than any clock that is right
LAST_EPOCH = 1 << 62  # numbers in messages end at twice this

# What decides when a rank saves, loads or makes memory: where ranks differ in it, they wait for each other in vain. And
# what is kept in persist_dir: which node orders a flush changes when one is lost.
_COLLECTIVE = (
    "persist_dir",
    "persist_on_exit",
    "persist_overwrite",
    "keep_latest_k",
    "keep_every",
    "keep_steps",
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
    now = max(0, int(time.time() * 1000))
    return Launch(epoch=agree_epoch(highest_epoch, {"this one": now}), nonce=secrets.randbits(64))


def agree_launch(group: PrivateGroup, topology: Topology, highest_epoch: int) -> Launch:
    """A place in time above every launch any rank has seen, and a nonce. Collective.

    The clock keeps a launch on blank nodes above one that it can't see; the nonce keeps two launches apart
    even when the clock does not (two shards of one generation always come from one launch).
    """
    mine = struct.pack("<QQQ", highest_epoch, max(0, int(time.time() * 1000)), secrets.randbits(64))
    answers = [struct.unpack("<QQQ", one) for one in group.gather(mine, "agreeing on the epoch")]
    clocks = {node.node_id: answers[node.ranks[0]][1] for node in topology.nodes}
    highest = max(one[0] for one in answers)
    epoch = agree_epoch(highest, clocks)
    if topology.rank == 0 and epoch - max(clocks.values()) > MAX_CLOCK_DIFFERENCE_MS:
        log.warning(
            "the job has been launched with a clock that was ahead: its epoch stands at %s, the clocks at %s. The job "
            "goes on above it, but a launch on nodes that have never heard of it would count as older",
            _date(epoch),
            _date(max(clocks.values())),
        )
    return Launch(epoch=epoch, nonce=answers[0][2])


def agree_epoch(highest: int, clocks: Mapping[str, int]) -> int:
    """One above the highest epoch that was seen, but not below the clocks (milliseconds since 1970, by node). Pure.

    ConfigError where a clock is so wrong that its epoch would stay far ahead of the job for good: all that is launched
    afterwards has to be above it.
    """
    _refuse_wrong_clocks(clocks)
    # Not the latest one: what is ahead counts for all launches to come, what is behind for none.
    epoch = max(1 + highest, sorted(clocks.values())[(len(clocks) - 1) // 2])
    if epoch > LAST_EPOCH:
        raise ConfigError(
            f"epoch of the launch: expected at most {LAST_EPOCH}, found {epoch}: no launch could be above it",
            hint="give the job another name, and load its step with initial_load_path or from persist_dir",
        )
    return epoch


def _refuse_wrong_clocks(clocks: Mapping[str, int]) -> None:
    late = {node: clock for node, clock in clocks.items() if clock > LATEST_CLOCK_MS}
    usual = sorted(clocks.values())[(len(clocks) - 1) // 2]
    apart = {node: clock for node, clock in clocks.items() if abs(clock - usual) > MAX_CLOCK_DIFFERENCE_MS}
    if not late and not apart:
        return
    # Of two clocks nobody knows which one is wrong.
    named = late or (dict(clocks) if len(clocks) == 2 else apart)
    found = ", ".join(f"{_date(clock)} on node {node!r}" for node, clock in sorted(named.items()))
    others = "" if len(named) == len(clocks) else f", the others say {_date(usual)}"
    raise ConfigError(
        f"clocks of the nodes: expected them within {MAX_CLOCK_DIFFERENCE_MS // 3_600_000} h of each other and before "
        f"{_date(LATEST_CLOCK_MS)}, found {found}{others}",
        hint="set the clock (chronyc makestep, timedatectl) and launch again; nothing was changed",
        nodes=tuple(sorted(named)),
    )


def _date(milliseconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(milliseconds / 1000))
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms after 1970"
