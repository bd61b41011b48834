"""Describes an agent's state as plain values that JSON can hold. Pure."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from flashckpt import __version__
from flashckpt.protocol.commit import missing_ranks
from flashckpt.protocol.line import describe as describe_line
from flashckpt.protocol.line import launch_of
from flashckpt.protocol.seeing import peers_of, verdict_of
from flashckpt.protocol.survival import words
from flashckpt.types import Level, age_order

if TYPE_CHECKING:
    from flashckpt.agent.process import Options
    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.verdict import Verdict
    from flashckpt.protocol.wire import Health
    from flashckpt.store.audit import StoreStatus
    from flashckpt.types import Generation, Held, Launch


def describe(
    core: AgentCore,
    now: float,
    *,
    options: Options,
    store: StoreStatus,
    uptime: float,
    leases: list[dict[str, int]],
    address: str,
    scrubbed: tuple[int, int],
    draining: bool,
    flushed_bytes: int,
) -> dict[str, Any]:
    """Return the status of this moment."""
    session = core.session
    return {
        "version": __version__,
        "pid": os.getpid(),
        "job": options.job,
        "node": options.node_id,
        "address": address,
        "encrypts_data": bool(options.encrypt_data),
        "uptime_seconds": round(uptime, 3),
        "draining": draining,
        "launch": _launch(session.launch if session else None),
        "fenced": core.is_fenced,
        "line": None if core.line is None else describe_line(core.line),
        "coordinator": session.coordinator if session else None,
        "world": session.world if session else None,
        "replicas": {"asked": session.replicas if session else 0, "effective": core.replicas},
        "placement": core.placement.reason if core.placement else "",
        "trainers": leases,
        "peers": describe_peers(core, now),
        "kept": _kept(core, now),
        "generations": [_generation(core, generation, now) for generation in _generations(core)],
        "backlog": [
            {
                "step": held.shard.generation.step,
                "rank": held.shard.rank,
                "to": node_id,
                "size_bytes": held.size_bytes,
                "running": running,
                "problem": problem,
            }
            for held, node_id, running, problem in core.backlog()
        ],
        "persist": _persist(core, now, flushed_bytes),
        "scrub": {"passes": scrubbed[0], "found": scrubbed[1]},
        "memory": dataclasses.asdict(store),
    }


def _persist(core: AgentCore, now: float, flushed_bytes: int) -> dict[str, Any] | None:
    """Describe the persistent tier. None: memory only."""
    if core.session is None or core.session.persist is None:
        return None
    flushing = core.flushing
    order, persisted = flushing.order, flushing.persisted
    orderer, why = core.orderer(now)
    return {
        "directory": core.session.persist.directory,
        "step": persisted.step if persisted is not None else None,
        "orderer": orderer,
        "orderer_reason": why,
        "flushing": order.generation.step if order is not None else None,
        "reason": order.reason if order is not None else "",
        "flushed_bytes": flushed_bytes if order is not None else 0,
        "wanted": flushing.wanted.generation.step if flushing.wanted is not None else None,
        "flushes": flushing.counts["done"],
        "failures": flushing.counts["failed"],
        "problem": flushing.problem,
        "retry_seconds": round(max(0.0, flushing.retry_at - now), 3) if flushing.problem else None,
    }


def _kept(core: AgentCore, now: float) -> dict[str, Any] | None:
    """Describe the kept generation, and how it stands as far as this node can know."""
    found = verdict_of(core, now)
    if found is None:
        return None
    verdict, reason = found
    last = verdict.last
    return {
        **_name(verdict.generation),
        "this_launch": core.session is not None and launch_of(verdict.generation) == core.session.launch,
        "healer": core.healer(now),
        "verdict": {
            "safety": verdict.safety.value,
            "words": verdict.words,
            "source": verdict.source or None,
            "age_seconds": round(verdict.age_seconds, 3) if verdict.source else None,
            "reason": reason,
            "last_word": None
            if last is None
            else {
                "node": last.speaker,
                "age_seconds": round(now - last.heard_at, 3),
                "step": last.health.generation.step,
                "words": words(last.health.survival, last.health.lost, last.health.lost_count),
            },
        },
        "health": None if verdict.health is None else _health(verdict.health, verdict),
    }


def _health(found: Health, verdict: Verdict) -> dict[str, Any]:
    survived = dataclasses.asdict(found.survival)
    return {
        "age_seconds": round(verdict.age_seconds, 3),
        "of": _name(found.generation),
        "is_current": found.generation == verdict.generation,
        "level": (Level.REPLICATED if found.committed and found.wanted > 1 else Level.SEALED).name.lower(),
        "world": found.world,
        "copies": {"fewest": found.copies, "wanted": found.wanted},
        "at_risk": {"shards": found.at_risk_count, "ranks": list(found.at_risk)},
        "lost": {"shards": found.lost_count, "ranks": list(found.lost)},
        "healing": {
            "copies": found.left_copies,
            "size_bytes": found.left_bytes,
            "running": [{"rank": one.rank, "source": one.source, "target": one.target} for one in found.running],
            "reason": found.reason,
        },
        "missing_nodes": list(found.missing),
        "survives": {**survived, "words": verdict.words},
    }


def _name(generation: Generation) -> dict[str, Any]:
    return {
        "step": generation.step,
        "epoch": generation.epoch,
        "nonce": f"{generation.nonce:016x}",
        "seq": generation.seq,
    }


def _generations(core: AgentCore) -> list[Generation]:
    known = {shard.generation for shard in core.held} | {record.generation for record in core.records}
    return sorted(known, key=age_order, reverse=True)


def _generation(core: AgentCore, generation: Generation, now: float) -> dict[str, Any]:
    held = sorted((one for shard, one in core.held.items() if shard.generation == generation), key=_rank)
    record = next((one for one in core.records if one.generation == generation), None)
    reported = core.reported(generation) if core.is_coordinator else {}
    persisted = core.flushing.persisted
    level = Level.REPLICATED if record is not None and record.replicas else Level.SEALED if held else Level.NONE
    level = Level.PERSISTED if persisted == generation else level
    found: dict[str, Any] = {
        **_name(generation),
        "this_launch": core.session is not None and launch_of(generation) == core.session.launch,
        "level": level.name.lower(),
        "committed_at": record.committed_at if record else None,
        "replicas": record.replicas if record else None,
        "shards": [_shard(core, one) for one in held],
    }
    if core.is_coordinator and core.session is not None and record is None and found["this_launch"]:
        found["waiting_for_ranks"] = missing_ranks(reported, core.session.world)
    if generation in core.voids:
        found["given_up"] = core.voids[generation]
    return found


def _shard(core: AgentCore, held: Held) -> dict[str, Any]:
    holders = sorted(core.acks.get(held.shard, ()))
    return {
        "rank": held.shard.rank,
        "world": held.shard.world,
        "size_bytes": held.size_bytes,
        "digest": held.digest.hex(),
        "own": core.owns(held.shard),
        "holders": holders,
    }


def describe_peers(core: AgentCore, now: float) -> list[dict[str, Any]]:
    silent = core.silent(now)
    members = {member.node_id: member for member in core.session.members} if core.session else {}
    rows = []
    for node_id, seen in sorted(peers_of(core, now).items()):
        peer = core.peers[node_id]
        since = silent[node_id][0] if node_id in silent else peer.asked_at if peer.is_unreachable else None
        rows.append(
            {
                "node": node_id,
                "address": peer.address,
                "domain": members[node_id].domain if node_id in members else "",
                "state": seen.state.value,
                "silent_seconds": None if since is None else round(now - since, 3),
                "problem": seen.problem,
            }
        )
    return rows


def _launch(launch: Launch | None) -> dict[str, Any] | None:
    return None if launch is None else {"epoch": launch.epoch, "nonce": f"{launch.nonce:016x}"}


def _rank(held: Held) -> int:
    return held.shard.rank
