"""Decides when a generation is committed, and when it is void. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.protocol.wire import Announce, GiveUp, Report
from flashckpt.types import Record, age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from flashckpt.protocol.copying import Copying
    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.flush import Flushing
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.members import Neighbours
    from flashckpt.protocol.outbox import Outbox
    from flashckpt.protocol.releasing import Releasing
    from flashckpt.protocol.wire import Lost
    from flashckpt.types import Generation, Held, ShardId


# Decisions of the commit protocol. Each takes what is known and returns an answer with its reason.


def keeps(
    generation: Generation, count: int, record: Record | None, line: Line | None, base: Generation | None
) -> tuple[Generation, ...]:
    """Return the newest `count` - 1 older generations that the line does not abandon: they stay when this one is
    committed. Newest first.

    The list goes into the record, so that all nodes keep the same generations even if they have missed some records.
    """
    older = (record.generation, *record.keeps) if record is not None else () if base is None else (base,)
    good = [
        one for one in older if age_order(one) < age_order(generation) and not (line is not None and line.kills(one))
    ]
    return tuple(good[: max(0, count - 1)])


def missing_ranks(reported: Set[int] | Mapping[int, object], world: int) -> list[int]:
    return [rank for rank in range(world) if rank not in reported]


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest generation that a rank is known to have sealed."""

    generation: Generation  # of the present launch, whose generations are in order
    heard_at: float  # when its node last reported it


def abandoned_by(
    generation: Generation, sealed: Mapping[int, float], reached: Mapping[int, Reached], patience: float
) -> int | None:
    """Return a rank that has sealed a newer generation than this one without having sealed this one. It never will.

    A rank's node reports what the rank has sealed at every beat. So a shard that is no longer reported, although it
    once was, is found here too.
    """
    for rank, further in reached.items():
        if further.generation > generation:
            said_at = sealed.get(rank)
            if said_at is None or further.heard_at - said_at > patience:
                return rank
    return None


# The coordinator's count: which rank's shard lies where, and how far each rank has got. No I/O, no decisions.


@dataclass(slots=True)
class Tally:
    """What the coordinator knows of one generation."""

    reports: dict[int, Report] = field(default_factory=dict)  # rank → its node's report, if enough others hold it
    sealed: dict[int, float] = field(default_factory=dict)  # rank → when its node last reported that it has the shard


class ReportCount:
    """Counts reports. Only the last report of a rank counts; one with fewer holders takes the earlier one back."""

    def __init__(self) -> None:
        self.generations: dict[Generation, Tally] = {}
        self.reached: dict[int, Reached] = {}  # how far each rank has got

    def take(self, report: Report, now: float, *, enough: bool) -> Tally:
        """Count a report. `enough`: as many other nodes hold the shard as are asked for."""
        view = self.generations.setdefault(report.shard.generation, Tally())
        view.sealed[report.shard.rank] = now
        if enough:
            view.reports[report.shard.rank] = report
        else:
            view.reports.pop(report.shard.rank, None)
        return view

    def take_back(self, shard: ShardId) -> None:
        """Forget the report of a shard that its owner has lost."""
        view = self.generations.get(shard.generation)
        if view is not None:
            view.reports.pop(shard.rank, None)
            view.sealed.pop(shard.rank, None)

    def note_reached(self, shard: ShardId, now: float) -> None:
        known = self.reached.get(shard.rank)
        if known is None or known.generation <= shard.generation:
            self.reached[shard.rank] = Reached(shard.generation, now)

    def forget(self, which: Callable[[Generation], bool]) -> None:
        self.generations = {g: view for g, view in self.generations.items() if not which(g)}

    def reports(self, generation: Generation) -> dict[int, Report]:
        view = self.generations.get(generation)
        return dict(view.reports) if view is not None else {}


# Takes a generation to its record, or makes it void. No I/O.
#
# Owners report to the coordinator. The coordinator counts, decides once, and announces the decision.


class Committing:
    """One node's part in the commit: reports as an owner; counts and decides as the coordinator."""

    def __init__(
        self,
        current: CurrentLaunch,
        ledger: Ledger,
        holdings: Holdings,
        peers: Neighbours,
        flushing: Flushing,
        releasing: Releasing,
        copying: Copying,
        outbox: Outbox,
        *,
        patience: float,
        wall_offset: float,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._holdings = holdings
        self._peers = peers
        self._flushing = flushing
        self._releasing = releasing
        self._copying = copying
        self._outbox = outbox
        self._patience = patience
        self._wall_offset = wall_offset  # wall clock minus `now`, for times shown to people
        self.counted = ReportCount()

    def enter(self) -> None:
        """Start with an empty count for another launch."""
        self.counted = ReportCount()

    def stop(self) -> None:
        """Forget the count: the launch is over, and nothing is committed any more."""
        self.counted.generations.clear()

    # --- as an owner ----------------------------------------------------------------------------------------

    def report_of(self, held: Held) -> Report:
        """Return the report of an own shard: where it lies now, whether that is enough or not."""
        return Report(held.shard, held.digest, tuple(sorted(self._holdings.acks.get(held.shard, ()))))

    def report(self, held: Held, now: float) -> None:
        if not self._ledger.is_overtaken(held.shard.generation):
            self.tell(self.report_of(held), now)

    def tell(self, body: Report | Lost, now: float) -> None:
        """Send the coordinator a message about an own shard."""
        current = self._current
        if current.session is None or current.is_fenced:
            return
        if not current.is_coordinator:
            self._outbox.send(current.session.coordinator, body, now)
        elif isinstance(body, Report):
            self.take_report(current.node_id, body, now)
        else:
            self.take_back(body.shard, now)

    def give_up(self, generation: Generation, reason: str, now: float) -> None:
        """Void a generation of which a rank of this node can't deliver its shard."""
        current, ledger = self._current, self._ledger
        if current.session is None or not current.is_of_this_launch(generation) or ledger.is_settled(generation):
            return
        # IMPORTANT: void here before the coordinator has decided. This is safe only because the rank's shard is not
        # reported and never will be: without it nothing can be committed.
        ledger.note_given_up(generation)
        self._void(generation, reason)
        self._releasing.collect()
        if current.is_coordinator:
            self.announce(now)
        else:
            self._outbox.send(current.session.coordinator, GiveUp(generation), now)

    def ask_to_give_up(self, generation: Generation, now: float) -> None:
        """Ask the coordinator to void a generation of which an own shard is lost that may have been reported.

        IMPORTANT: nothing is released before the coordinator has decided. It may have counted an earlier report, and
        have committed without this node having heard of it.
        """
        current = self._current
        if current.session is None or self._ledger.is_settled(generation):
            return
        self._ledger.note_given_up(generation)
        if current.is_coordinator:
            self.take_give_up(generation, current.node_id, now)
        else:
            self._outbox.send(current.session.coordinator, GiveUp(generation), now)

    def take_news(self, record: Record | None, voids: tuple[Generation, ...]) -> None:
        """Apply the coordinator's decisions."""
        for generation in voids:
            if self._current.is_of_this_launch(generation) and not self._ledger.is_settled(generation):
                self._void(generation, "a rank gave it up")
        if record is not None:
            self._take_record(record)

    # --- as the coordinator ---------------------------------------------------------------------------------

    def take_report(self, sender: str, report: Report, now: float) -> None:
        """Count a report, and commit once every rank's shard has its copies."""
        current, generation = self._current, report.shard.generation
        member = current.member(sender)
        if current.session is None or member is None or report.shard.rank not in member.ranks:
            return
        if not current.is_of_this_launch(generation) or report.shard.world != current.session.world:
            return
        self.counted.note_reached(report.shard, now)
        if not self._ledger.is_settled(generation):
            others = {node for node in report.holders if node != sender and current.member(node) is not None}
            view = self.counted.take(report, now, enough=len(others) >= current.replicas)
            if not missing_ranks(view.reports, current.session.world):
                self._commit(generation, current.session.world, current.session.keep_memory, now)
        self._void_what_cannot_complete(now)

    def take_back(self, shard: ShardId, now: float) -> None:
        """Stop counting a shard that its owner has lost or given up."""
        self.counted.note_reached(shard, now)
        self.counted.take_back(shard)
        self._void_what_cannot_complete(now)

    def take_give_up(self, generation: Generation, sender: str, now: float) -> None:
        """Void a generation at its owner's request, unless it is committed: commit or void, never both."""
        if self._ledger.is_settled(generation):
            return
        self._void(generation, f"a rank of {sender} gave it up")
        self._releasing.collect()
        self.announce(now)

    def announce(self, now: float) -> None:
        """Send new decisions to all members, once and at once.

        A member that misses them finds them in the answer to its next beat. A node that gives flush orders announces
        those in the same way.
        """
        ledger, flushing = self._ledger, self._flushing
        decided = (ledger.threshold, tuple(ledger.voids)) if self._current.is_coordinator else (None, ())
        news = Announce(*decided, flushing.order, flushing.persisted, flushing.failure)
        for node_id in self._peers:
            self._outbox.send(node_id, news, now)

    def _commit(self, generation: Generation, world: int, count: int, now: float) -> None:
        ledger, current = self._ledger, self._current
        stay = keeps(generation, count, ledger.threshold, current.line, ledger.base)
        reports = self.counted.reports(generation)
        self._take_record(Record(generation, world, current.replicas, now + self._wall_offset, stay))
        self._copying.note_commit(generation, reports, now)
        self.announce(now)
        self._releasing.collect()

    def _void_what_cannot_complete(self, now: float) -> None:
        """Void generations older than one that the same rank has delivered: the rank will never deliver them.

        IMPORTANT: here and wherever the coordinator voids a generation, its own shards are released before any other
        node hears of it. Voids are not kept on disk: without its own shards a restarted coordinator can't commit what
        others have released since.
        """
        reached, news = self.counted.reached, False
        for generation, view in list(self.counted.generations.items()):
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
            self._holdings.forget_wanted(self._ledger.is_beside)
            self.counted.forget(self._ledger.is_overtaken)

    def _void(self, generation: Generation, reason: str) -> None:
        effects = self._ledger.void(generation, reason)
        if effects:
            self._flushing.lost(generation)
            self.counted.generations.pop(generation, None)
            self._outbox.add(*effects)
