"""The way of a generation to its record, or to being given up. No I/O.

Owners report to the coordinator; the coordinator counts, decides once, and announces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.agent.ballot import Ballot
from flashckpt.agent.commit import abandoned_by, keeps, missing_ranks
from flashckpt.types import Record
from flashckpt.wire import Announce, GiveUp, Report

if TYPE_CHECKING:
    from flashckpt.agent.copying import Copying
    from flashckpt.agent.custody import Custody
    from flashckpt.agent.flushing import Flushing
    from flashckpt.agent.ledger import Ledger
    from flashckpt.agent.neighbours import Neighbours
    from flashckpt.agent.outbox import Outbox
    from flashckpt.agent.releasing import Releasing
    from flashckpt.agent.standing import Standing
    from flashckpt.types import Generation, Held, ShardId
    from flashckpt.wire import Lost


class Committing:
    """One node's part in it; the count is the coordinator's."""

    def __init__(
        self,
        standing: Standing,
        ledger: Ledger,
        custody: Custody,
        peers: Neighbours,
        flushing: Flushing,
        releasing: Releasing,
        copying: Copying,
        outbox: Outbox,
        *,
        patience: float,
        wall_offset: float,
    ) -> None:
        self._standing = standing
        self._ledger = ledger
        self._custody = custody
        self._peers = peers
        self._flushing = flushing
        self._releasing = releasing
        self._copying = copying
        self._outbox = outbox
        self._patience = patience
        self._wall_offset = wall_offset  # of the wall clock against `now`, for people
        self.ballot = Ballot()

    def enter(self) -> None:
        """Another launch."""
        self.ballot = Ballot()

    def stop(self) -> None:
        """The launch is over: nothing is committed any more."""
        self.ballot.generations.clear()

    # --- as an owner ----------------------------------------------------------------------------------------

    def report_of(self, held: Held) -> Report:
        """What to tell the coordinator of an own shard: where it lies now, be that enough or not."""
        return Report(held.shard, held.digest, tuple(sorted(self._custody.acks.get(held.shard, ()))))

    def report(self, held: Held, now: float) -> None:
        if not self._ledger.is_overtaken(held.shard.generation):
            self.tell(self.report_of(held), now)

    def tell(self, body: Report | Lost, now: float) -> None:
        """The coordinator, of an own shard."""
        standing = self._standing
        if standing.session is None or standing.is_fenced:
            return
        if not standing.is_coordinator:
            self._outbox.send(standing.session.coordinator, body, now)
        elif isinstance(body, Report):
            self.take_report(standing.node_id, body, now)
        else:
            self.take_back(body.shard, now)

    def give_up(self, generation: Generation, reason: str, now: float) -> None:
        """A rank of this node can't deliver its shard."""
        standing, ledger = self._standing, self._ledger
        if standing.session is None or not standing.is_of_this_launch(generation) or ledger.is_settled(generation):
            return
        # IMPORTANT: void here before the coordinator has said so, which is safe only because the rank's shard is
        # not reported and never will be: without it nothing can be committed.
        ledger.note_given_up(generation)
        self._void(generation, reason)
        self._releasing.collect()
        if standing.is_coordinator:
            self.announce(now)
        else:
            self._outbox.send(standing.session.coordinator, GiveUp(generation), now)

    def ask_to_give_up(self, generation: Generation, now: float) -> None:
        """An own shard may have been reported and is not to be had any more.

        IMPORTANT: nothing is dropped before the coordinator has decided. It may have counted an earlier report, and
        have committed without this node having heard of it.
        """
        standing = self._standing
        if standing.session is None or self._ledger.is_settled(generation):
            return
        self._ledger.note_given_up(generation)
        if standing.is_coordinator:
            self.take_give_up(generation, standing.node_id, now)
        else:
            self._outbox.send(standing.session.coordinator, GiveUp(generation), now)

    def take_news(self, record: Record | None, voids: tuple[Generation, ...]) -> None:
        """What the coordinator decided."""
        for generation in voids:
            if self._standing.is_of_this_launch(generation) and not self._ledger.is_settled(generation):
                self._void(generation, "a rank gave it up")
        if record is not None:
            self._take_record(record)

    # --- as the coordinator ---------------------------------------------------------------------------------

    def take_report(self, sender: str, report: Report, now: float) -> None:
        """Commits once every rank's shard is where it should be."""
        standing, generation = self._standing, report.shard.generation
        member = standing.member(sender)
        if standing.session is None or member is None or report.shard.rank not in member.ranks:
            return
        if not standing.is_of_this_launch(generation) or report.shard.world != standing.session.world:
            return
        self.ballot.note_reached(report.shard, now)
        if not self._ledger.is_settled(generation):
            others = {node for node in report.holders if node != sender and standing.member(node) is not None}
            view = self.ballot.take(report, now, enough=len(others) >= standing.replicas)
            if not missing_ranks(view.reports, standing.session.world):
                self._commit(generation, standing.session.world, standing.session.keep_memory, now)
        self._void_what_cannot_complete(now)

    def take_back(self, shard: ShardId, now: float) -> None:
        """The owner of a shard does not have it any more, or has given it up."""
        self.ballot.note_reached(shard, now)
        self.ballot.take_back(shard)
        self._void_what_cannot_complete(now)

    def take_give_up(self, generation: Generation, sender: str, now: float) -> None:
        """Commit or void, never both."""
        if self._ledger.is_settled(generation):
            return
        self._void(generation, f"a rank of {sender} gave it up")
        self._releasing.collect()
        self.announce(now)

    def announce(self, now: float) -> None:
        """Once, at once; whoever misses it finds the same in the answer to its next beat. Also of orders, by whoever
        gives them."""
        ledger, flushing = self._ledger, self._flushing
        decided = (ledger.threshold, tuple(ledger.voids)) if self._standing.is_coordinator else (None, ())
        news = Announce(*decided, flushing.order, flushing.persisted, flushing.failure)
        for node_id in self._peers:
            self._outbox.send(node_id, news, now)

    def _commit(self, generation: Generation, world: int, count: int, now: float) -> None:
        ledger, standing = self._ledger, self._standing
        stay = keeps(generation, count, ledger.threshold, standing.line, ledger.base)
        reports = self.ballot.reports(generation)
        self._take_record(Record(generation, world, standing.replicas, now + self._wall_offset, stay))
        self._copying.note_commit(generation, reports, now)
        self.announce(now)
        self._releasing.collect()

    def _void_what_cannot_complete(self, now: float) -> None:
        """A rank that delivered a later generation without an earlier one never will: others must not wait for it.

        IMPORTANT: here and wherever the coordinator gives a generation up, its own shards go before anybody hears of
        it. Voids are not kept on disk: without its own shards a coordinator that was restarted can't commit any more
        what others have dropped since.
        """
        reached, news = self.ballot.reached, False
        for generation, view in list(self.ballot.generations.items()):
            found = abandoned_by(generation, view.sealed, reached, self._patience)
            if found is not None:
                self._void(generation, f"rank {found} went on to step {reached[found].generation.step} without it")
                news = True
        if news:
            self._releasing.collect()
            self.announce(now)

    # --- on every node --------------------------------------------------------------------------------------

    def _take_record(self, record: Record) -> None:
        effects = self._ledger.take(record)
        if effects:
            self._outbox.add(*effects)
            self._custody.forget_wanted(self._ledger.is_beside)
            self.ballot.forget(self._ledger.is_overtaken)

    def _void(self, generation: Generation, reason: str) -> None:
        effects = self._ledger.void(generation, reason)
        if effects:
            self._flushing.lost(generation)
            self.ballot.generations.pop(generation, None)
            self._outbox.add(*effects)
