"""What is decided of the generations that this node knows: committed, given up, loaded. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import KeepRecord, KeepSession, Notify
from flashckpt.protocol.line import launch_of
from flashckpt.types import Launch, Level, age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.events import Effect
    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation, Record, Session

_KEPT_RECORDS = 4
_KEPT_VOIDS = 64


class Ledger:
    """Commit or void, never both: the coordinator decides, once, and every node writes down what it hears."""

    def __init__(self, current: CurrentLaunch) -> None:
        self._current = current
        self.records: tuple[Record, ...] = ()  # newest last
        self.base: Generation | None = None  # what the present launch has loaded
        self.voids: dict[Generation, str] = {}  # never to be committed, with the reason
        self.own_voids: dict[Generation, None] = {}  # given up here; the coordinator has to hear of it
        self.hearsay: Generation | None = None  # other members have a record of it
        # The last answer, with what it was the answer to.
        self._threshold: tuple[tuple[Record, ...], Session | None, Line | None, Record | None] = ((), None, None, None)

    def start(self, records: Iterable[Record]) -> None:
        """With what lies in the directory."""
        self.records = _newest_records(records)

    def enter(self, base: Generation | None) -> None:
        """Another launch."""
        self.base = base
        self.hearsay = None
        self.voids.clear()
        self.own_voids.clear()

    # --- questions ------------------------------------------------------------------------------------------

    @property
    def threshold(self) -> Record | None:
        """The record that older generations may go for."""
        # Asked many times an event, and changes rarely.
        records, session, line, answer = self._threshold
        current = self._current
        if records is not self.records or session is not current.session or line is not current.line:
            answer = threshold(self.records, current.session, current.line)
            self._threshold = (self.records, current.session, current.line, answer)
        return answer

    @property
    def kept(self) -> Generation | None:
        """What must not be lost: the newest committed generation of this launch, or before there is one what was
        loaded. Of which every shard is to have its copies at all times."""
        record, base, current = self.threshold, self.base, self._current
        if current.session is None or current.member(current.node_id) is None:
            return None
        # What this launch itself has saved counts once it is committed.
        if base is not None and (not launch_of(base).is_older_than(current.session.launch) or current.is_killed(base)):
            base = None
        known = (base, self.hearsay, record.generation if record is not None else None)
        return max((one for one in known if one is not None), key=age_order, default=None)

    @property
    def committed(self) -> set[Generation]:
        """Those that a record is left of."""
        return {record.generation for record in self.records}

    def is_settled(self, generation: Generation) -> bool:
        """Committed, overtaken by a commit, or never to be committed."""
        return generation in self.voids or self.is_overtaken(generation)

    def is_overtaken(self, generation: Generation) -> bool:
        record = self.threshold
        return record is not None and age_order(generation) <= age_order(record.generation)

    def is_beside(self, generation: Generation) -> bool:
        """An older one that stays for now. Copies that it loses are not brought back: a newer one is safe."""
        return self.threshold is not None and generation in self.threshold.keeps

    def why_droppable(self, generation: Generation) -> str:
        """Why shards of this generation may go; "" = they stay."""
        current = self._current
        root = current.root_of(launch_of(generation))
        return droppable(generation, self.threshold, current.line, self.voids, self.base, root)

    # --- changes --------------------------------------------------------------------------------------------

    def take(self, record: Record) -> list[Effect]:
        """Adopts a record of the present launch, which only its coordinator makes; nothing where it is not to be."""
        if not self._current.is_of_this_launch(record.generation):
            return []
        if self.is_overtaken(record.generation) or self._current.is_killed(record.generation):
            return []
        kept = [one for one in self.records if one.generation != record.generation]
        self.records = _newest_records((*kept, record))
        self.voids = {g: reason for g, reason in self.voids.items() if not self.is_overtaken(g)}
        self.own_voids = {g: None for g in self.own_voids if not self.is_overtaken(g)}
        if record.replicas == 0:
            return [KeepRecord(record)]
        # What it keeps was committed before: whoever missed that record hears of it now.
        heard = {g for one in kept for g in (one.generation, *one.keeps)}
        missed = [g for g in reversed(record.keeps) if self._current.is_of_this_launch(g) and g not in heard]
        return [KeepRecord(record), *(Notify(g, Level.REPLICATED) for g in (*missed, record.generation))]

    def void(self, generation: Generation, reason: str) -> list[Effect]:
        """It is never to be committed; nothing where that is known."""
        if generation in self.voids:
            return []
        self.voids[generation] = reason
        while len(self.voids) > _KEPT_VOIDS:
            oldest = min(self.voids, key=age_order)
            del self.voids[oldest]
            self.own_voids.pop(oldest, None)
        return [Notify(generation, Level.NONE, reason)]

    def note_given_up(self, generation: Generation) -> None:
        """By a rank of this node: the coordinator hears of it until it says that it has."""
        self.own_voids[generation] = None

    def note_heard(self, voids: tuple[Generation, ...]) -> None:
        """The coordinator knows of these."""
        self.own_voids = {g: None for g in self.own_voids if g not in voids}

    def keep_base(self, base: Generation | None) -> list[Effect]:
        if base == self.base:
            return []
        self.base = base
        session = self._current.session
        return [KeepSession(session, base)] if session is not None else []

    def hear_base(self, base: Generation | None) -> list[Effect]:
        """From another member: an agent that came back blank has nobody else to tell it what was loaded."""
        session, line = self._current.session, self._current.line
        if base is None or session is None or line is None or self.kept is not None:
            return []
        # The answer may be late, to a question of the launch before: its base is another one.
        is_this_base = line.head == session.launch and line.cut(launch_of(base)) == base.step
        return self.keep_base(base) if is_this_base else []

    def hear_kept(self, generation: Generation) -> None:
        """A member says that it is committed, where the coordinator can't tell."""
        if self._current.is_of_this_launch(generation) and not self.is_settled(generation):
            known = self.hearsay
            self.hearsay = generation if known is None else max(known, generation, key=age_order)

    def forget_hearsay(self) -> None:
        """The coordinator can tell again."""
        self.hearsay = None


def _newest_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """The newest ones, newest last, by launch first: after a step back the records of the launch before have higher
    steps, and must not push the present one's out."""
    return tuple(sorted(records, key=lambda record: record.generation)[-_KEPT_RECORDS:])


def threshold(records: Iterable[Record], session: Session | None, line: Line | None) -> Record | None:
    """The record that older generations may go for: the newest one of the present launch.

    Records of earlier launches license nothing: a node that was away may bring one of a past that was
    abandoned below the step that was loaded, and what it would bury is what the job stands on.
    """
    if session is None:
        return None
    mine = [
        record
        for record in records
        if launch_of(record.generation) == session.launch and not (line is not None and line.kills(record.generation))
    ]
    return max(mine, key=lambda record: age_order(record.generation), default=None)


def droppable(
    generation: Generation,
    record: Record | None,
    line: Line | None,
    voids: Collection[Generation],
    base: Generation | None,
    root: Launch | None = None,
) -> str:
    """Why shards of this generation may go; "" = they stay. `root` is that of its launch's line, if that is known.

    Shortage of memory is no reason: a replica that was acknowledged counts in somebody's commit. Nor is a record for
    what its line does not know: that is a history of its own.
    """
    abandoned = "" if line is None else line.why_killed(generation, root)
    if abandoned:
        return abandoned
    if generation == base and (record is None or age_order(record.generation) <= age_order(generation)):
        return ""
    if generation in voids:
        return "a rank gave it up"
    launch = launch_of(generation)
    is_known = line is not None and line.cut(launch, root) is not None
    if record is None or not (is_known or launch == launch_of(record.generation)):
        return ""
    if age_order(generation) < age_order(record.generation) and generation not in record.keeps:
        return f"step {record.generation.step} is committed"
    return ""
