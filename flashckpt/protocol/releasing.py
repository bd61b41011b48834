"""Releases shards that nobody needs any more. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Notify, Release
from flashckpt.types import Level

if TYPE_CHECKING:
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.flush import Flushing
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.replicate import PushQueue
    from flashckpt.types import Generation


class Releasing:
    """Releases shards. A copy that was acknowledged is released only when its generation is abandoned, void, or
    followed by a record of the same launch (protocol/commit.py), and no flush needs it."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        transfers: PushQueue,
        flushing: Flushing,
        outbox: Outbox,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._transfers = transfers
        self._flushing = flushing
        self._outbox = outbox

    def collect(self) -> None:
        holdings = self._holdings
        known = {shard.generation for shard in (*holdings.held, *holdings.acks, *holdings.wanted)}
        known.update(shard.generation for shard, _ in self._transfers)
        verdicts = {g: self._ledger.why_droppable(g) for g in known}
        reasons = {g: why for g, why in verdicts.items() if why and not self.is_only_flushed(g)}
        if not reasons:
            return
        self._outbox.add(*(Release(shard, reasons[shard.generation]) for shard in holdings.drop(reasons)))
        self._transfers.drop_generations(reasons)
        committed = self._ledger.committed
        for generation, why in reasons.items():
            if generation not in committed and self._current.is_of_this_launch(generation):
                # Trainers may wait for a level that this generation will never reach.
                self._outbox.add(Notify(generation, Level.NONE, why))

    def is_only_flushed(self, generation: Generation) -> bool:
        """Return True if only the flush still needs the generation in memory."""
        if not self._flushing.needs(generation) or generation in self._ledger.voids:
            return False
        return not self._current.is_killed(generation) and bool(self._ledger.why_droppable(generation))
