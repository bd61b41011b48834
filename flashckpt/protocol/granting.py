"""Decides which trainers of this node get a slot, and which wait for one. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Grant, RefuseBusy, RefuseFenced
from flashckpt.protocol.line import launch_of
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import SlotWanted
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.releasing import Releasing
    from flashckpt.protocol.replicate import PushQueue
    from flashckpt.types import Generation, ShardId


# Usually a receiver lacks room only for a moment: it has not yet released what the previous commit made needless.
_SHORT_SECONDS = 5.0


class Granting:
    """Grants slots. A rank may have `slots_per_rank` shards in memory; further requests wait or are refused."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        transfers: PushQueue,
        releasing: Releasing,
        outbox: Outbox,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._transfers = transfers
        self._releasing = releasing
        self._outbox = outbox
        self.granted: dict[ShardId, SlotWanted] = {}
        self.waiting: dict[int, SlotWanted] = {}

    # --- what trainers do -----------------------------------------------------------------------------------

    def ask(self, request: SlotWanted) -> list[ShardId]:
        """Queue a request until there is a slot. Return the shards that the trainer gave up by asking."""
        self.waiting[request.request_id] = request
        # A trainer writes one shard at a time. If it was granted an earlier one and neither sealed it nor gave it up,
        # its message was lost (this agent may have been paused). Without this the slot would be lost until the trainer
        # exits.
        return self._take_away(request.lease_id, before=request.shard.generation)

    def drop(self, request_id: int) -> None:
        """Drop a request: its trainer waits no longer, or the granted slot could not be provided."""
        self.waiting.pop(request_id, None)
        self.granted = {s: one for s, one in self.granted.items() if one.request_id != request_id}

    def sealed(self, shard: ShardId) -> None:
        self.granted.pop(shard, None)

    def gave_up(self, generation: Generation, rank: int) -> None:
        self.granted = {s: one for s, one in self.granted.items() if (s.generation, s.rank) != (generation, rank)}

    def end(self, lease_id: int) -> list[ShardId]:
        """Take back the slots of a trainer that is gone. Return the shards that it was writing."""
        self.waiting = {i: one for i, one in self.waiting.items() if one.lease_id != lease_id}
        return self._take_away(lease_id)

    def _take_away(self, lease_id: int, before: Generation | None = None) -> list[ShardId]:
        found = [
            shard
            for shard, one in self.granted.items()
            if one.lease_id == lease_id and (before is None or shard.generation < before)
        ]
        for shard in found:
            del self.granted[shard]
        return found

    # --- answers --------------------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Answer every request that can be answered now."""
        for request in list(self.waiting.values()):
            answer = self.decide(request, now)
            if answer is not None:
                del self.waiting[request.request_id]
                self._outbox.add(answer)
                if isinstance(answer, Grant):
                    self.granted[request.shard] = request

    def decide(self, request: SlotWanted, now: float) -> Grant | RefuseBusy | RefuseFenced | None:
        """Return the answer to a request; None: it has to wait."""
        shard, session = request.shard, self._current.session
        launch = launch_of(shard.generation)
        if session is None or session.launch != launch or self._current.is_fenced:
            return RefuseFenced(request.request_id, self._current.why_fenced(launch))
        # A shard that is wanted back will need its slot again.
        known = (*self._holdings.held, *self.granted, *self._holdings.wanted)
        used = {s for s in known if s.rank == shard.rank and launch_of(s.generation) == launch}
        used -= {s for s in used if self._releasing.is_only_flushed(s.generation)}
        if len(used - {shard}) < session.slots_per_rank:
            return Grant(request.request_id)
        given_up = self._ledger.voids.get(shard.generation)
        in_vain = bool(given_up) or self._is_short(used, now)
        if request.may_wait and now < request.deadline and not in_vain:
            return None
        waits = "; ".join(self._why_pending(s) for s in sorted(used, key=lambda s: age_order(s.generation)))
        why = f"{shard}: all {session.slots_per_rank} slots are needed: {waits}"
        if given_up:
            why += f"; and this generation was given up: {given_up}"
        return RefuseBusy(request.request_id, why, in_vain)

    def _is_short(self, used: Collection[ShardId], now: float) -> bool:
        """Return True if a slot is held by a shard that another node has had no room for, for so long that waiting does
        not help."""
        since = [one.short_since for shard in used for one in self._transfers.of(shard)]
        return any(one is not None and now - one > _SHORT_SECONDS for one in since)

    def _why_pending(self, shard: ShardId) -> str:
        record = self._ledger.threshold
        step = shard.generation.step
        if shard in self.granted:
            return f"step {step} is being written"
        if record is not None and record.generation == shard.generation:
            return f"step {step} is the newest committed one"
        if record is not None and shard.generation in record.keeps:
            return f"step {step} is one of those that keep_memory keeps"
        lacking = self._transfers.of(shard)
        if lacking:
            return f"step {step} is not on " + ", ".join(
                f"{one.node_id}{f' ({one.problem})' if one.problem else ''}" for one in lacking
            )
        return f"step {step} waits for other ranks"
