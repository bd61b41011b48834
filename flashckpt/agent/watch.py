"""Tells people what changes: one WARNING in the agent's log for each change of how the kept generation stands and of
who answers, and the list of lost generations that `ls` and `status` read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError
from flashckpt.protocol.seeing import peers_of, verdict_of
from flashckpt.protocol.verdict import Noted, Safety, in_words, news
from flashckpt.types import Loss

if TYPE_CHECKING:
    from flashckpt.protocol.core import AgentCore
    from flashckpt.protocol.verdict import Verdict
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Launch

_log = logging.getLogger(__name__)


class Watch:
    """Of one agent. One call at a time."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._noted = Noted()
        self._launch: Launch | None = None
        self._verdict: Verdict | None = None
        self._held: frozenset[Generation] = frozenset()

    def look(self, core: AgentCore, now: float) -> list[str]:
        """What has changed since the last look, a line each. Under the lock that guards the core: it does no I/O."""
        launch = core.session.launch if core.session is not None else None
        if launch != self._launch:  # with other members; what is lost stays lost
            self._launch, self._noted = launch, Noted(frozenset(), self._noted.safety, self._noted.lost)
        found = verdict_of(core, now)
        self._verdict = None if found is None else found[0]
        self._held = frozenset(shard.generation for shard in core.held)
        peers = {} if core.is_fenced else peers_of(core, now)
        self._noted, lines = news(self._noted, peers, self._verdict)
        return lines

    def keep_losses(self) -> None:
        """Brings the list of lost generations up to date with the last look."""
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
