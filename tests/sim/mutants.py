"""Mutants: the real core with one rule taken out, each of which the simulator must notice.

They are made here, by a subclass of the core or of one of its parts, or by replacing one pure function; the product has
no switch for them. Some take back what the simulator itself has found once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.load.histories import pick
from flashckpt.protocol import commit as committing
from flashckpt.protocol import copying, core, ledger
from flashckpt.protocol.commit import Committing, abandoned_by
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.current_launch import CurrentLaunch
from flashckpt.protocol.events import (
    Decline,
    Grant,
    KeepLine,
    KeepRecord,
    KeepSession,
    LinePut,
    Pushed,
    PushEnd,
    PutAsked,
    RefuseBusy,
    Release,
    Started,
)
from flashckpt.protocol.granting import Granting
from flashckpt.protocol.heal import Healing
from flashckpt.protocol.ledger import Ledger, droppable
from flashckpt.protocol.line import KEPT, NOTHING, Ancestor, Line, launch_of
from flashckpt.protocol.members import Duties
from flashckpt.protocol.releasing import Releasing
from flashckpt.protocol.replicate import Pushing, Replicating
from flashckpt.protocol.talking import Talking
from flashckpt.protocol.wire import Lost, PutHave, Report
from flashckpt.types import Launch, age_order
from tests.sim import job
from tests.sim.swarm import Outcome, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from flashckpt.protocol.events import Effect, Event
    from tests.sim.world import World


_cut, _continued, _compacted, _with_older = Line.cut, Line.continued, Line.compacted, Line.with_older


@dataclass(frozen=True, slots=True)
class Mutant:
    """`seed` is a history that notices it, and that the real core passes."""

    core: type[AgentCore] = AgentCore
    part: type | None = None  # a subclass that takes the place of one of the core's parts
    replace: tuple[tuple[ModuleType | type, str, Any], ...] = ()
    adjust: Callable[[World], None] | None = None
    seed: int = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        changes = [*self.replace]
        if self.part is not None:
            changes.append((core, self.part.__base__.__name__, self.part))
        kept = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, value in changes:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in kept:
                setattr(module, name, value)

    def run(self, seed: int, trace: bool = False) -> Outcome:
        with self.applied():
            return run(seed, self.core, trace, self.adjust)


class _EarlyGc(Releasing):
    """Frees older generations as soon as a newer one is sealed here."""

    def collect(self) -> None:
        super().collect()
        held = self._holdings.held
        mine = [age_order(s.generation) for s in held if self._current.owns(s)]
        for shard in [s for s in held if mine and age_order(s.generation) < max(mine)]:
            del held[shard]
            self._outbox.add(Release(shard, "a newer one is sealed"))


class _CommitBeforeAck(Committing):
    """Takes a seal for a replica."""

    def take_report(self, sender: str, report: Report, now: float) -> None:
        everybody = (*self._peers, self._current.node_id)
        super().take_report(sender, Report(report.shard, report.digest, everybody), now)


class _ZombieAccepted(CurrentLaunch):
    """Does not tell older launches from newer ones."""

    def is_older(self, launch: Launch) -> bool:
        return False


class _NoLine(AgentCore):
    """Neither keeps nor adopts lines."""

    def _learn(self, launch, line) -> None:
        super()._learn(launch, None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [effect for effect in super().handle(event, now) if not isinstance(effect, KeepLine)]


class _DropsAcked(AgentCore):
    """Makes room for a replica by dropping an older one that was acknowledged."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, PutAsked) and not any(isinstance(effect, Decline) for effect in effects):
            rank = event.put.shard.rank
            older = [s for s in self.held if s.rank == rank and s.generation < event.put.shard.generation]
            for shard in older:
                if not self.owns(shard) and launch_of(shard.generation) == event.put.launch:
                    del self.held[shard]
                    effects.append(Release(shard, "room"))
        return effects


class _AnnounceFirst(AgentCore):
    """Tells of a record before it is durable."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        records = [effect for effect in effects if isinstance(effect, KeepRecord)]
        return [effect for effect in effects if not isinstance(effect, KeepRecord)] + records


class _BaseLicensesGc(AgentCore):
    """Takes what was loaded for a commit."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, LinePut) and self.base is not None and self.base == event.base:
            for shard in [s for s in self.held if age_order(s.generation) < age_order(self.base)]:
                del self.held[shard]
                effects.append(Release(shard, "older than what was loaded"))
        return effects


class _VoidAfterReport(Replicating):
    """Gives up by itself what it may have reported, when its own copy is bad and it knows of no other."""

    def lost(self, held, now: float) -> None:
        if self._current.owns(held.shard) and not self._holdings.acks.get(held.shard):
            self._committing.give_up(held.shard.generation, "the only copy", now)
        else:
            super().lost(held, now)


class _ForgetsRecords(AgentCore):
    """A restarted agent does not know what is committed."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Started):
            event = Started(event.held, event.lines, (), event.session)
        return super().handle(event, now)


class _ForgetsSession(AgentCore):
    """A restarted agent does not know its launch."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [effect for effect in super().handle(event, now) if not isinstance(effect, KeepSession)]


class _AllCoordinate(CurrentLaunch):
    """Every node makes records."""

    @property
    def is_coordinator(self) -> bool:
        return self.session is not None


class _DeafToLoss(Talking):
    """An owner goes on counting a copy that its holder has lost."""

    def take(self, sender, body, now: float) -> None:
        if not isinstance(body, Lost):
            super().take(sender, body, now)


class _NeverTiresOfWaiting(Granting):
    """A request for a slot has no deadline."""

    def decide(self, request, now: float):
        return super().decide(request, min(now, request.deadline - 1) if request.may_wait else now)


class _UnboundedSlots(Granting):
    """Grants as many slots as are asked for."""

    def decide(self, request, now: float):
        answer = super().decide(request, now)
        return Grant(request.request_id) if isinstance(answer, RefuseBusy) else answer


class _PushesOnce(Pushing):
    """A push that failed is not tried again."""

    def start(self, now: float) -> None:
        for key in [key for key, one in self.transfers.items() if one.failures]:
            del self.transfers[key]
        super().start(now)


class _HasEverything(AgentCore):
    """Acknowledges what it does not hold."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, PutAsked):
            answer = Decline(PutHave(event.put.digest))
            return [answer if type(effect).__name__ == "Accept" else effect for effect in effects]
        return effects


class _CommitsAgainstVoid(Committing):
    """The coordinator gives up what it has committed."""

    def take_give_up(self, generation, sender, now: float) -> None:
        self._void(generation, "a rank gave it up")
        self._releasing.collect()
        self.announce(now)


class _AcksOfDeadLaunches(CurrentLaunch):
    """A replica that comes in after a newer launch was seen is acknowledged."""

    @property
    def is_fenced(self) -> bool:
        return False


class _LateLine(CurrentLaunch):
    """Adopts lines of launches that have been overtaken."""

    def learn(self, launch, line) -> list[Effect]:
        effects = super().learn(launch, line)
        if line is not None and (self.line is None or self.line.head.is_older_than(line.head)):
            self.line = self._lines[line.head] = line
            effects.append(KeepLine(line))
        return effects


class _LearnsNoLine(AgentCore):
    """Takes lines from its own trainers only: a node that was away does not hear what was abandoned."""

    def _learn(self, launch, line) -> None:
        mine = self.session is not None and line is not None and line.head == self.session.launch
        super()._learn(launch, line if mine else None)


class _KeepsOneLine(CurrentLaunch):
    """Forgets the line of another history when it gets one."""

    def learn(self, launch, line) -> list[Effect]:
        effects = super().learn(launch, line)
        self._lines = {} if self.line is None else {self.line.head: self.line}
        return effects


class _ForgetsWantedSlot(Granting):
    """Gives away the slot of a shard that is on its way back."""

    def decide(self, request, now: float):
        wanted, self._holdings.wanted = self._holdings.wanted, {}
        try:
            return super().decide(request, now)
        finally:
            self._holdings.wanted = wanted


class _ReportsWhatIsGone(Committing):
    """Says of a shard that it lies on no other node, where it lies nowhere."""

    def tell(self, body, now: float) -> None:
        super().tell(Report(body.shard, b"gone", ()) if isinstance(body, Lost) else body, now)


class _BlindToSplitsAtStart(AgentCore):
    """Looks only at what is sealed while it runs."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, Started):
            return super().handle(event, now)
        self.holdings.is_split = lambda held: False
        try:
            return super().handle(event, now)
        finally:
            del self.holdings.is_split


class _MovesWhatItHeals(AgentCore):
    """A copy that was made to heal makes room here."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        one = self.pushing.transfers.get((event.shard, event.node_id)) if isinstance(event, Pushed) else None
        effects = super().handle(event, now)
        if one is not None and one.heals and event.end is PushEnd.ACKED and event.shard in self.held:
            del self.held[event.shard]
            effects.append(Release(event.shard, "it lies elsewhere"))
        return effects


class _KeepsTheDead(Ledger):
    """Keeps the newest generation that the node has of an earlier launch, whatever was loaded."""

    core: AgentCore

    @property
    def kept(self):
        session = self._current.session
        older = [s.generation for s in self.core.held if session and launch_of(s.generation) != session.launch]
        return max(older, key=age_order, default=None) or super().kept


class _HealsTheDead(AgentCore):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.ledger.core = self


class _OnlyTheCoordinatorHeals(Duties):
    """Where it is gone, nobody does."""

    def healer(self, now: float) -> str:
        session = self._current.session
        return session.coordinator if session is not None else self._current.node_id


class _CountsTheSilent(Healing):
    """Believes for ever what a node said once."""

    def look(self, mine, now: float) -> None:
        self._said = {node: (holds, now) for node, (holds, _) in self._said.items()}
        super().look(mine, now)


def _trusts_for_ever(generation, sealed, reached, patience):
    return abandoned_by(generation, sealed, reached, 1e9)


def _any_record(records, session, line):
    alive = [r for r in records if not (line is not None and line.kills(r.generation))]
    return max(alive, key=lambda record: age_order(record.generation), default=None) if session is not None else None


def _records_by_step(records):
    return tuple(sorted(records, key=lambda record: age_order(record.generation))[-4:])


def _without_one(reported, world):
    return [] if len(reported) >= max(1, world - 1) else [0]


def _frees_others(generation, record, line, voids, base, root=None):
    """A record frees whatever is older."""
    why = droppable(generation, record, line, voids, base, root)
    is_older = record is not None and age_order(generation) < age_order(record.generation)
    return why or ("older" if is_older and generation not in record.keeps and generation != base else "")


def _kills_unknown(line, launch, root=None):
    """What a line does not list is abandoned where it is older, as by a fence."""
    known = _cut(line, launch, root)
    return NOTHING if known is None and launch.is_older_than(line.head) else known


def _floor_ignores_root(line, launch, root=None):
    return _cut(line, launch, None)


def _only_newest_cut(line, head, base, given_up=(), others=()):
    """Lists only the launch that was loaded."""
    return Line(head, line.root, (Ancestor(launch_of(base), base.step),), None)


def _forgets_given_up(line, head, base, given_up=(), others=()):
    return _continued(line, head, base)


def _folds_others(line, present=(), most=KEPT):
    """The roots of histories that were given up are folded like others."""
    plain = tuple(Ancestor(one.launch, max(one.step, NOTHING)) for one in line.listed)
    return _compacted(replace(line, listed=plain), present, most)


def _loses_floor(line, other):
    """Takes the floor of any line that it goes on from."""
    found = _with_older(line, other)
    return found if found is line else replace(found, floor=other.floor)


def _newest_wins(lines, whole, known=(), *, step=None, history=None):
    """Two histories: the newest is taken, and nobody is asked."""
    try:
        return pick(lines, whole, known, step=step, history=history)
    except AmbiguousHistoryError as error:
        return pick(lines, whole, known, history=error.fields["histories"][-1])


def _stray_claims(world: World) -> None:
    world.job.stray_claims = True


def _line_on_one_node(world: World) -> None:
    world.job.claims_once = True


def _reader_claims(world: World) -> None:
    world.job.reader_claims = True


def _no_nonce(world: World) -> None:
    world.job.nonce_of = lambda: 7
    world.job.has_clock = False


def _epoch_reused(world: World) -> None:
    world.job.has_clock = False


def _lease_ends_first(world: World) -> None:
    world.swarm.scans_first = False


MUTANTS: dict[str, Mutant] = {
    "all_coordinate": Mutant(part=_AllCoordinate, seed=285),
    "announce_before_record": Mutant(_AnnounceFirst, seed=0),
    "base_licenses_gc": Mutant(_BaseLicensesGc, seed=36),
    "commit_before_ack": Mutant(part=_CommitBeforeAck, seed=0),
    "commit_without_one_rank": Mutant(replace=((committing, "missing_ranks", _without_one),), seed=0),
    "deaf_to_loss": Mutant(part=_DeafToLoss, seed=635),
    "drop_acked_replica": Mutant(_DropsAcked, seed=0),
    "counts_the_silent": Mutant(replace=((copying, "Healing", _CountsTheSilent),), seed=204),
    "early_gc": Mutant(part=_EarlyGc, seed=0),
    "heals_the_dead": Mutant(_HealsTheDead, _KeepsTheDead, seed=1069),
    "moves_what_it_heals": Mutant(_MovesWhatItHeals, seed=17),
    "only_the_coordinator_heals": Mutant(part=_OnlyTheCoordinatorHeals, seed=506),
    "fenced_goes_on": Mutant(part=_AcksOfDeadLaunches, seed=84),
    "forgets_records": Mutant(_ForgetsRecords, seed=119),
    "forgets_session": Mutant(_ForgetsSession, seed=5),
    "has_everything": Mutant(_HasEverything, seed=0),
    "late_line": Mutant(part=_LateLine, seed=74),
    "no_line": Mutant(_NoLine, seed=1),
    "a_stray_launch_claims": Mutant(adjust=_stray_claims, seed=0),
    "a_reader_claims": Mutant(adjust=_reader_claims, seed=1),
    "keeps_one_line": Mutant(part=_KeepsOneLine, seed=232),
    "a_record_frees_others": Mutant(replace=((ledger, "droppable", _frees_others),), seed=26),
    "kills_the_unknown": Mutant(replace=((Line, "cut", _kills_unknown),), seed=0),
    "floor_ignores_root": Mutant(replace=((Line, "cut", _floor_ignores_root),), seed=21),
    "only_the_newest_cut": Mutant(replace=((Line, "continued", _only_newest_cut),), seed=1),
    "forgets_who_was_given_up": Mutant(replace=((Line, "continued", _forgets_given_up),), seed=74),
    "folds_other_roots": Mutant(replace=((Line, "compacted", _folds_others),), seed=8),
    "loses_the_floor": Mutant(replace=((Line, "with_older", _loses_floor),), seed=272),
    "newest_history_wins": Mutant(replace=((job, "pick", _newest_wins),), seed=98),
    "no_nonce": Mutant(adjust=_no_nonce, seed=16),
    "nobody_goes_on": Mutant(
        replace=((committing, "abandoned_by", lambda generation, sealed, reached, patience: None),), seed=341
    ),
    "pushes_once": Mutant(part=_PushesOnce, seed=9),
    "records_by_step": Mutant(replace=((ledger, "_newest_records", _records_by_step),), seed=883),
    "reports_what_is_gone": Mutant(part=_ReportsWhatIsGone, seed=12173),
    "unbounded_slots": Mutant(part=_UnboundedSlots, seed=1),
    "void_after_commit": Mutant(part=_CommitsAgainstVoid, seed=3717),
    "void_after_report": Mutant(part=_VoidAfterReport, seed=12609),
    "waits_for_ever": Mutant(part=_NeverTiresOfWaiting, seed=9),
    "zombie_accepted": Mutant(part=_ZombieAccepted, seed=6),
}

# Not counted, with the reason.
SURVIVORS: dict[str, tuple[Mutant, str]] = {
    "epoch_reused": (
        Mutant(adjust=_epoch_reused),
        "too rare since lines and ages compare nonces too, which decides every second case rightly by chance; the "
        "exhaustive model kills it (spec/)",
    ),
    "line_on_one_node": (
        Mutant(adjust=_line_on_one_node),
        "too rare: nodes adopt the line from the first message of their session; the node that has it would have to be "
        "lost before it has said anything",
    ),
    "learns_no_line": (
        Mutant(_LearnsNoLine),
        "equivalent: the launch that takes a node in puts its line there, whatever the node missed; until then it only "
        "keeps longer what it might free",
    ),
    "blind_to_splits_at_start": (
        Mutant(_BlindToSplitsAtStart),
        "too rare: one history in ten has ranks that disagree, and an agent has to die just then; a unit test holds it",
    ),
    "trusts_for_ever": (
        Mutant(replace=((committing, "abandoned_by", _trusts_for_ever),)),
        "too rare: a shard has to be lost while its agent is down, of the last generation that was not committed yet; "
        "a unit test holds it",
    ),
    "forgets_wanted_slot": (
        Mutant(part=_ForgetsWantedSlot),
        "too rare: a save has to ask in the moment in which a lost shard comes back; a unit test holds it",
    ),
    "old_records_license_gc": (
        Mutant(replace=((ledger, "threshold", _any_record),)),
        "equivalent: what a record of an earlier launch would bury, its own node dropped when it took the record; and "
        "the line kills records above what is loaded before anything newer can lie beside them",
    ),
    "lease_ends_before_the_look": (
        Mutant(adjust=_lease_ends_first),
        "too rare: besides the trainer's death between seal and word, the agent has to die before its word is out, "
        "and the others to commit before the next launch; 4,000 histories do not reach it",
    ),
}
