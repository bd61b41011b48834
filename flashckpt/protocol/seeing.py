"""What this agent itself sees of the other members and of the kept generation: what the verdict is made of. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashckpt.protocol.verdict import Peer, PeerState, View, judge, why_doubtful

if TYPE_CHECKING:
    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.verdict import Verdict
    from flashckpt.types import Generation


def peers_of(core: AgentCore, now: float) -> dict[str, Peer]:
    """Every other member, by node id."""
    seen = _seen(core, now)
    word = core.health
    doubted = core.kept is None or word is None or bool(why_doubtful(_view(core, core.kept, seen), now))
    missed = {} if doubted or word is None or word.speaker == core.node_id else dict.fromkeys(word.health.missing)
    patience = core.limits.peer_timeout
    for node_id, peer in core.peers.items():
        if seen[node_id].state is not PeerState.UP:
            continue
        if word is not None and node_id in missed:
            seen[node_id] = Peer(PeerState.MISSED, f"{word.speaker} does not hear from it")
        elif doubted and peer.asked_at is None and now - peer.heard_at > patience:
            seen[node_id] = Peer(PeerState.UNKNOWN, "this node does not speak to it")
    return seen


def verdict_of(core: AgentCore, now: float) -> tuple[Verdict, str] | None:
    """How the kept generation stands, and why it is this that is said; None where nothing is kept."""
    kept = core.kept
    return None if kept is None else judge(_view(core, kept, _seen(core, now)), now)


def _seen(core: AgentCore, now: float) -> dict[str, Peer]:
    """Without what others say. A node that this one never speaks to counts as up."""
    silent = core.silent(now)
    found = {}
    for node_id, peer in core.peers.items():
        if node_id in silent:
            found[node_id] = Peer(PeerState.DOWN, silent[node_id][1])
        elif peer.is_unreachable:
            found[node_id] = Peer(PeerState.UNREACHABLE, peer.problem)
        else:
            found[node_id] = Peer(PeerState.UP, peer.problem)
    return found


def _view(core: AgentCore, kept: Generation, peers: dict[str, Peer]) -> View:
    session = core.session
    members = session.members if session is not None else ()
    worlds = {shard.world for shard in core.held if shard.generation == kept}
    record = next((one for one in core.records if one.generation == kept), None)
    view = View(
        node_id=core.node_id,
        kept=kept,
        committed=record is not None,
        wanted=min(session.replicas, len(members) - 1) + 1 if session is not None else 1,
        world=max(worlds, default=0) if record is None else record.world,
        domains={member.node_id: member.domain for member in members},
        peers=peers,
        holdings=core.copying.holdings(kept),
        word=core.health,
        patience=core.limits.peer_timeout,
    )
    # A launch that was overtaken hears and says nothing any more.
    return replace(view, word=None, holdings={}) if core.is_fenced else view
