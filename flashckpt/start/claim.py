"""Refuse to take a job over from trainers that are alive: all ranks ask their nodes' agents, and decide alike."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashckpt.errors import FlashError, OtherRankError
from flashckpt.ranks.group import PrivateGroup
from flashckpt.ranks.topology import Node, Topology
from flashckpt.start.claimants import ClaimAnswer, Trainer, decide, live_job, others
from flashckpt.store.owner import Owner
from flashckpt.types import Claimant, Launch

if TYPE_CHECKING:
    from flashckpt.save.own_slots import Slots

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.25  # between two requests to the agents


def refuse_beside_live(group: PrivateGroup, topology: Topology, slots: Slots, job: str) -> None:
    """Return once no trainer of another launch is alive on any node of this one. Collective.

    Raises LiveJobError, on all ranks alike, if some are still alive after a grace period.
    """
    asked, said = 0, ""
    while True:
        found, processes = _ask(group, topology, slots)
        strangers = others(found, processes, slots.launch)
        # Counted, not measured: all ranks have to decide alike.
        answer, reason = decide(strangers, asked * _PAUSE_SECONDS)
        if answer is ClaimAnswer.TAKE:
            return
        if answer is ClaimAnswer.REFUSE:
            raise live_job(job, strangers)
        if reason != said and topology.is_leader:
            log.warning("job %r is held by another launch; waiting a moment for it to end: %s", job, reason)
            said = reason
        asked += 1
        time.sleep(_PAUSE_SECONDS)


def refuse_beside_live_here(topology: Topology, slots: Slots, job: str) -> None:
    """Do the same for this rank and its node alone. Local."""
    alone = Topology(0, 1, (Node(topology.node.node_id, "", (0,)),), (0,))
    refuse_beside_live(PrivateGroup.alone(), alone, slots, job)


def _ask(group: PrivateGroup, topology: Topology, slots: Slots) -> tuple[list[Trainer], set[str]]:
    """Return the claimants on all nodes, and the processes of the ranks that ask. Collective."""
    error: FlashError | None = None
    message: list[object] = ["", []]
    try:
        message[0] = Owner.current().identity
        if topology.is_leader:
            message[1] = [asdict(one) for one in slots.claimants()]
    except FlashError as raised:
        error = raised
        message.append(f"{type(raised).__name__}: {raised.message}")
    answers = [json.loads(one) for one in group.gather(json.dumps(message).encode(), "asking who holds the job")]
    if error is not None:
        raise error
    problems = {rank: one[2] for rank, one in enumerate(answers) if len(one) > 2}
    if problems:
        who = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise OtherRankError(f"asking who holds the job: failed on {who}", ranks=sorted(problems))
    nodes = {rank: node.node_id for node in topology.nodes for rank in node.ranks}
    found = [Trainer(nodes[rank], _decode(one)) for rank, (_, claimants) in enumerate(answers) for one in claimants]
    return found, {one[0] for one in answers}


def _decode(found: dict[str, Any]) -> Claimant:
    return Claimant(**found | {"launch": Launch(**found["launch"])})
