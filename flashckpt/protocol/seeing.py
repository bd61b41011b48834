"""Collects what this agent itself sees of the other members and of the kept generation, as input for the verdict. No
I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashckpt.protocol.commit import missing_ranks
from flashckpt.protocol.verdict import Change, ChangeKind, Peer, PeerState, View, in_words, judge, why_doubtful
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.verdict import Verdict
    from flashckpt.types import Generation

_AWAY = (PeerState.UNREACHABLE, PeerState.DOWN, PeerState.MISSED)
_LATE_SECONDS = 5.0  # after so long a rank that has not saved a generation may never save it
_SHOWN = 4  # number of nodes listed in a reason


def peers_of(core: AgentCore, now: float) -> dict[str, Peer]:
    """Return the state of every other member, by node id."""
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
    """Return how the kept generation stands, with the source of the verdict; None if nothing is kept."""
    kept = core.kept
    return None if kept is None else judge(_view(core, kept, _seen(core, now)), now)


def waiting_of(core: AgentCore) -> set[Generation]:
    """Return the generations that ranks of this node have sealed and that may still be replicated."""
    if core.session is None or core.is_fenced or not core.replicas:
        return set()
    return {
        shard.generation
        for shard in core.held
        if core.owns(shard)
        and core.current.is_of_this_launch(shard.generation)
        and not core.is_settled(shard.generation)
    }


def lag_of(
    core: AgentCore, since: Mapping[Generation, float], peers: Mapping[str, Peer], now: float
) -> tuple[Change, str] | None:
    """Return why the oldest waiting generation is not replicated, and the same text without the parts that vary from
    attempt to attempt; None if no generation waits.

    `since` says when each was first seen to wait, `peers` how this node sees the others.
    """
    if not since:
        return None
    generation = min(since, key=age_order)
    pushes = [one for one in core.pushing.transfers.values() if one.held.shard.generation == generation]
    wrong = {
        n: ("does not answer", peer.problem or "nothing was heard of it")
        for n, peer in peers.items()
        if peer.state in _AWAY
    }
    for one in pushes:
        if one.problem:
            how = f"does not take the copy of shard {one.held.shard.rank}" if one.refused else "does not answer"
            wrong.setdefault(one.node_id, (how, one.problem))
    if wrong:
        nodes = sorted(wrong)[:_SHOWN]
        more = f" and {len(wrong) - _SHOWN} more nodes" if len(wrong) > _SHOWN else ""
        reason = "; ".join(f"{n} {wrong[n][0]}: {wrong[n][1]}" for n in nodes) + more
        return Change(ChangeKind.LAGGING, generation, reason), "; ".join(f"{n} {wrong[n][0]}" for n in sorted(wrong))
    kind = ChangeKind.WAITING
    unsaved, uncopied = _missing(core, generation)
    if unsaved:
        reason = f"rank {in_words(tuple(unsaved[:_SHOWN]), len(unsaved))} has not saved it"
        kind = ChangeKind.LAGGING if now - since[generation] > _LATE_SECONDS else kind
    elif pushes:
        reason = f"copies to {', '.join(sorted({one.node_id for one in pushes})[:_SHOWN])} are under way"
    elif uncopied:
        reason = f"shard {in_words(tuple(uncopied[:_SHOWN]), len(uncopied))} is still copied to other nodes"
    else:
        reason = f"this node's copies are made; {core.coordinator} still waits for those of other nodes"
    return Change(kind, generation, reason), reason


def _missing(core: AgentCore, generation: Generation) -> tuple[list[int], list[int]]:
    """Return the ranks that have not sealed the generation, and those whose copies are not made; nothing on a node that
    is not the coordinator."""
    if core.session is None or not core.is_coordinator:
        return [], []
    tally = core.committing.counted.generations.get(generation)
    sealed, reports = (tally.sealed, tally.reports) if tally is not None else ({}, {})
    return missing_ranks(sealed, core.session.world), missing_ranks(reports, core.session.world)


def _seen(core: AgentCore, now: float) -> dict[str, Peer]:
    """Return the members as this node alone sees them. A node that this one never speaks to counts as up."""
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
    # A launch that was overtaken neither receives nor sends anything any more.
    return replace(view, word=None, holdings={}) if core.is_fenced else view
