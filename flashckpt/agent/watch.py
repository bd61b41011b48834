"""Tells people and trainers what changes.

One WARNING in the agent's log for each change of how the kept generation stands and of which nodes answer; news to this
node's trainers on how it stands, and why what they have saved is not replicated; and the list of lost generations that
`ls` and `status` read.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError
from flashckpt.protocol.seeing import lag_of, peers_of, verdict_of, waiting_of
from flashckpt.protocol.verdict import Change, ChangeKind, Noted, Safety, in_words, news
from flashckpt.types import Loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.verdict import Peer, Verdict
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Launch

_log = logging.getLogger(__name__)


class Watch:
    """The watch of one agent. One call at a time."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._noted = Noted()
        self._launch: Launch | None = None
        self._verdict: Verdict | None = None
        self._held: frozenset[Generation] = frozenset()
        self._waiting: dict[Generation, float] = {}  # not replicated yet, and since when that is known
        self._lag: Change | None = None  # as told to the trainers
        self._warned = ""  # why generations lag, without the parts that vary from attempt to attempt
        self._kept_state: Change | None = None  # how the kept generation stands, if it is not well

    def look(self, core: AgentCore, now: float) -> tuple[list[str], list[Change]]:
        """Return what has changed since the last look: one log line per change, and the news for trainers.

        The caller holds the core's lock: there is no I/O here.
        """
        launch = core.session.launch if core.session is not None else None
        if launch != self._launch:  # another launch has other members; what is lost stays lost
            self._launch, self._noted = launch, Noted(frozenset(), self._noted.safety, self._noted.lost)
            self._waiting.clear()
        found = verdict_of(core, now)
        self._verdict = None if found is None else found[0]
        self._held = frozenset(shard.generation for shard in core.held)
        peers = {} if core.is_fenced else peers_of(core, now)
        self._noted, lines, changes = news(self._noted, peers, self._verdict)
        for change in changes:
            self._kept_state = None if change.kind is ChangeKind.HEALED else change
        return [*lines, *map(str, changes)], [*changes, *self._look_for_lag(core, peers, now)]

    def _look_for_lag(self, core: AgentCore, peers: Mapping[str, Peer], now: float) -> list[Change]:
        """Report only what was already waiting at the last look: most generations are replicated between two looks."""
        before, waiting = self._waiting, waiting_of(core)
        self._waiting = {generation: before.get(generation, now) for generation in waiting}
        found = lag_of(core, {g: since for g, since in self._waiting.items() if g in before}, peers, now)
        told = self._lag
        if found is None:
            self._lag, self._warned = None, ""
            return [] if told is None else [Change(ChangeKind.GOING_ON, told.generation, "")]
        self._lag, gist = found
        if told is not None and (told.kind, told.reason) == (self._lag.kind, self._lag.reason):
            return []
        if self._lag.kind is ChangeKind.LAGGING:
            if gist == self._warned:  # the reason has changed, but only in a way that needs no warning
                return [self._lag._replace(kind=ChangeKind.WAITING)]
            self._warned = gist
        return [self._lag]

    @property
    def current(self) -> list[Change]:
        """Return the news for a trainer that begins to watch. The caller holds the core's lock."""
        return [change for change in (self._kept_state, self._lag) if change is not None]

    def keep_losses(self) -> None:
        """Update the list of lost generations to the last look."""
        verdict = self._verdict
        known = self._store.read_losses()
        kept = [one for one in known if one.generation in self._held]
        if verdict is not None and verdict.health is not None:
            before = next((one for one in kept if one.generation == verdict.generation), None)
            kept = [one for one in kept if one.generation != verdict.generation]
            if verdict.safety is Safety.LOST:
                ranks = verdict.health.lost
                reason = f"no node that answers has shard {in_words(ranks, verdict.health.lost_count)}"
                kept.append(before if before and before.ranks == ranks else Loss(verdict.generation, ranks, reason))
        if kept == list(known):
            return
        try:
            self._store.write_losses(kept)
        except (FlashError, OSError) as error:
            _log.warning("the list of lost generations could not be written: %s", error)
