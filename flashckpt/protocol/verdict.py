"""Decides how the kept generation stands, as far as this node can know, and which changes are worth a log line. Pure.

The healer's word counts while it is fresh and nothing contradicts it. Otherwise this node judges by itself, if it knows
of every member what it holds or that it does not answer. Otherwise the verdict is UNKNOWN.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from flashckpt.protocol.survival import survival, words
from flashckpt.protocol.wire import Health

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.types import Generation

_SHOWN = 16  # number of entries that a summary lists


class PeerState(enum.Enum):
    """How this node sees another member."""

    UP = "up"
    UNREACHABLE = "unreachable"  # the last try failed, less than `peer_timeout` ago
    DOWN = "down"  # silent for `peer_timeout`
    MISSED = "missed"  # the healer does not hear from it; this node does not speak to it
    UNKNOWN = "unknown"  # this node does not speak to it, and no current healer's word tells


class Safety(enum.Enum):
    """How the kept generation stands."""

    SAFE = "safe"  # every shard has as many copies as are wanted
    AT_RISK = "at_risk"  # it can be loaded; some shard has fewer copies than are wanted
    LOST = "lost"  # no member that answers has some shard
    UNKNOWN = "unknown"


class ChangeKind(enum.Enum):
    """What has changed in how the shards of this node's ranks are replicated."""

    WAITING = (
        "waiting"  # a generation is not replicated yet: it takes its time, or was told to lag and the reason changed
    )
    LAGGING = "lagging"  # it is not replicated yet, because something went wrong
    GOING_ON = "going_on"  # no longer waiting or lagging
    AT_RISK = "at_risk"  # the kept generation: Safety.AT_RISK
    LOST = "lost"  # Safety.LOST
    HEALED = "healed"  # Safety.SAFE again


class Change(NamedTuple):
    """A change of the replication, as trainers are told."""

    kind: ChangeKind
    generation: Generation
    reason: str

    def __str__(self) -> str:
        return f"step {self.generation.step}: {self.reason}"


class HealerWord(NamedTuple):
    """What a healer said of the kept generation."""

    health: Health
    heard_at: float
    speaker: str  # node id of the healer; may be this node


@dataclass(frozen=True, slots=True)
class Peer:
    """Another member, as this node sees it."""

    state: PeerState  # UP also if this node has never spoken to it
    problem: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """All that the verdict is based on."""

    node_id: str
    kept: Generation
    committed: bool
    wanted: int  # copies of every shard
    world: int  # ranks of the kept generation; 0: not known here
    domains: Mapping[str, str]  # of every member, this node among them
    peers: Mapping[str, Peer]
    holdings: Mapping[str, frozenset[int]]  # members whose shards of it are known first hand, this node included
    word: HealerWord | None
    patience: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a generation stands, who says so, and since when."""

    safety: Safety
    generation: Generation
    words: str  # the answer to "what may be lost now?"
    source: str  # the node that says so; "" if none knows
    age_seconds: float
    health: Health | None  # the figures; None if none knows
    last: HealerWord | None  # the last word of a healer, whether it counts or not


def judge(view: View, now: float) -> tuple[Verdict, str]:
    """Return how the kept generation stands, and the source of the verdict."""
    doubt = why_doubtful(view, now)
    word = view.word
    if word is not None and not doubt:
        return _verdict(view, word.health, word.speaker, now - word.heard_at), f"{word.speaker} said so"
    down = {node for node, peer in view.peers.items() if peer.state is PeerState.DOWN}
    unheard = sorted(view.domains.keys() - view.holdings.keys() - down)
    unsure = [node for node, peer in sorted(view.peers.items()) if peer.state is PeerState.UNREACHABLE]
    world = view.world or (word.health.world if word is not None and word.health.generation == view.kept else 0)
    if world and not unheard and not unsure:
        health = _count(view, world, down)
        return _verdict(view, health, view.node_id, 0.0), f"counted by {view.node_id}: {doubt}"
    said = "nobody has said yet" if word is None else _last_word(view, word, now)
    unknown = Verdict(Safety.UNKNOWN, view.kept, f"unknown ({said})", "", 0.0, None, word)
    return unknown, doubt


def why_doubtful(view: View, now: float) -> str:
    """Return why the healer's last word does not count; "" = it does."""
    word = view.word
    if word is None:
        return "no healer has said yet how it stands"
    if word.health.generation != view.kept and not _is_followed(view, word.health):
        return f"the last word of {word.speaker} is about step {word.health.generation.step}"
    if now - word.heard_at > view.patience:
        return f"the last word of {word.speaker} is {now - word.heard_at:.0f} s old"
    missing = set(word.health.missing)
    for node, peer in sorted(view.peers.items()):
        silent = peer.state in (PeerState.UNREACHABLE, PeerState.DOWN)
        if silent and node not in missing and (node == word.speaker or len(missing) < _SHOWN):
            return f"{node} does not answer{f': {peer.problem}' if peer.problem else ''}"
    return ""


def _is_followed(view: View, health: Health) -> bool:
    """Return True if a word on the previous generation also covers the kept one.

    Where commits come faster than words, every word is about an earlier generation. A commit has all its copies, so the
    figures are at worst too low.
    """
    before = health.generation
    same_launch = (before.epoch, before.nonce) == (view.kept.epoch, view.kept.nonce)
    return view.committed and same_launch and before < view.kept and not health.lost_count


def _last_word(view: View, word: HealerWord, now: float) -> str:
    about = "" if word.health.generation == view.kept else f", about step {word.health.generation.step}"
    return f"last word of {word.speaker}, {now - word.heard_at:.0f} s ago{about}"


def _verdict(view: View, health: Health, source: str, age: float) -> Verdict:
    if health.lost_count:
        safety = Safety.LOST
    else:
        safety = Safety.AT_RISK if health.at_risk_count else Safety.SAFE
    said = words(health.survival, health.lost, health.lost_count)
    return Verdict(safety, view.kept, said, source, age, health, view.word)


def _count(view: View, world: int, down: set[str]) -> Health:
    """Return the figures, counted from what the members that answer are known to hold."""
    live = {node: ranks for node, ranks in view.holdings.items() if node not in down}
    holders: dict[int, set[str]] = {}
    for node, ranks in live.items():
        for rank in ranks:
            holders.setdefault(rank, set()).add(node)
    lost = [rank for rank in range(world) if rank not in holders]
    at_risk = [rank for rank in sorted(holders) if len(holders[rank]) < view.wanted]
    known = view.word.health if view.word is not None and view.word.health.generation == view.kept else None
    counted = Health(
        generation=view.kept,
        world=world,
        committed=view.committed or (known is not None and known.committed),
        wanted=view.wanted,
        copies=0 if lost else min(map(len, holders.values()), default=0),
        lost=tuple(islice(lost, _SHOWN)),
        lost_count=len(lost),
        at_risk=tuple(at_risk[:_SHOWN]),
        at_risk_count=len(at_risk),
        left_copies=0,
        left_bytes=0,
        running=(),
        missing=tuple(sorted(down))[:_SHOWN],
        survival=survival(holders, world, {node: view.domains[node] for node in live}),
        reason="",
    )
    if known is None or view.word is None or view.word.speaker != view.node_id:
        return counted
    return replace(
        counted,
        left_copies=known.left_copies,
        left_bytes=known.left_bytes,
        running=known.running,
        reason=known.reason,
    )


# Changes that are worth a log line.


@dataclass(frozen=True, slots=True)
class Noted:
    """What the log has said so far."""

    absent: frozenset[str] = frozenset()
    safety: Safety | None = None  # the last one that was known
    lost: tuple[int, ...] = ()


def news(noted: Noted, peers: Mapping[str, Peer], verdict: Verdict | None) -> tuple[Noted, list[str], list[Change]]:
    """Compare with what was `noted`. Return what is noted now, one log line per change of a node, and the changes of
    the kept generation."""
    away = {n: p for n, p in peers.items() if p.state in (PeerState.DOWN, PeerState.MISSED)}
    # A node whose state is uncertain at the moment keeps its last one.
    unsure = {n for n, p in peers.items() if p.state in (PeerState.UNREACHABLE, PeerState.UNKNOWN)}
    absent = frozenset(away) | (noted.absent & unsure)
    lines = [f"node {n} is lost: {away[n].problem or 'no answer'}" for n in sorted(absent - noted.absent)]
    lines += [f"node {n} is back" for n in sorted((noted.absent & peers.keys()) - absent)]
    safety, lost, changes = noted.safety, noted.lost, []
    health = verdict.health if verdict is not None else None
    if verdict is not None and health is not None:
        if (verdict.safety, health.lost) != (safety, lost):
            changes = _news_of(verdict, health, safety)
        safety, lost = verdict.safety, health.lost
    return Noted(absent, safety, lost), lines, changes


def _news_of(verdict: Verdict, health: Health, before: Safety | None) -> list[Change]:
    kept = verdict.generation
    match verdict.safety:
        case Safety.LOST:
            ranks = in_words(health.lost, health.lost_count)
            said = f"no node that answers has shard {ranks}: it can't be loaded until one that has it is back"
            return [Change(ChangeKind.LOST, kept, said)]
        case Safety.AT_RISK:
            ranks = in_words(health.at_risk, health.at_risk_count)
            again = "shards are there again that were lost; " if before is Safety.LOST else ""
            fewer = f"{again}shard {ranks}: fewer than {health.wanted} copies; survives the loss of: {verdict.words}"
            return [Change(ChangeKind.AT_RISK, kept, fewer)]
        case _ if before in (Safety.LOST, Safety.AT_RISK):
            enough = f"healed: every shard has {health.wanted} copies; survives the loss of: {verdict.words}"
            return [Change(ChangeKind.HEALED, kept, enough)]
        case _:
            return []


def in_words(ranks: tuple[int, ...], count: int) -> str:
    """List the first ranks, and say how many more there are."""
    return ", ".join(map(str, ranks)) + (f" and {count - len(ranks)} more" if count > len(ranks) else "")
