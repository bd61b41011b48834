"""Keeps what is decided on the generations that this node knows: committed, void, loaded. No I/O."""

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
    """What is decided. Commit or void, never both: the coordinator decides once, and every node notes what it hears."""

    def __init__(self, current: CurrentLaunch) -> None:
        self._current = current
        self.records: tuple[Record, ...] = ()  # newest last
        self.base: Generation | None = None  # what the present launch has loaded
        self.voids: dict[Generation, str] = {}  # never to be committed, with the reason
        self.own_voids: dict[Generation, None] = {}  # given up here; the coordinator has to be told
        self.hearsay: Generation | None = None  # other members have a record of it
        # The last answer of `threshold`, with the values it was computed from.
        self._threshold: tuple[tuple[Record, ...], Session | None, Line | None, Record | None] = ((), None, None, None)

    def start(self, records: Iterable[Record]) -> None:
        """Adopt the records found in the directory."""
        self.records = _newest_records(records)

    def enter(self, base: Generation | None) -> None:
        """Enter another launch."""
        self.base = base
        self.hearsay = None
        self.voids.clear()
        self.own_voids.clear()

    # --- questions ------------------------------------------------------------------------------------------

    @property
    def threshold(self) -> Record | None:
        """The record that licenses the release of older generations."""
        # Cached: asked many times per event, and changes rarely.
        records, session, line, answer = self._threshold
        current = self._current
        if records is not self.records or session is not current.session or line is not current.line:
            answer = threshold(self.records, current.session, current.line)
            self._threshold = (self.records, current.session, current.line, answer)
        return answer

    @property
    def kept(self) -> Generation | None:
        """The generation that must not be lost: the newest committed one of this launch, or before there is one the
        base.

        Every shard of it is to have its copies at all times.
        """
        record, base, current = self.threshold, self.base, self._current
        if current.session is None or current.member(current.node_id) is None:
            return None
        # A base that this launch itself has saved counts only once it is committed.
        if base is not None and (not launch_of(base).is_older_than(current.session.launch) or current.is_killed(base)):
            base = None
        known = (base, self.hearsay, record.generation if record is not None else None)
        return max((one for one in known if one is not None), key=age_order, default=None)

    @property
    def committed(self) -> set[Generation]:
        """The generations of which a record is left."""
        return {record.generation for record in self.records}

    def is_settled(self, generation: Generation) -> bool:
        """Return True if the generation is committed, overtaken by a commit, or void."""
        return generation in self.voids or self.is_overtaken(generation)

    def is_overtaken(self, generation: Generation) -> bool:
        record = self.threshold
        return record is not None and age_order(generation) <= age_order(record.generation)

    def is_beside(self, generation: Generation) -> bool:
        """Return True for an older generation that `keep_memory` keeps. Its lost copies are not brought back: a newer
        one is safe."""
        return self.threshold is not None and generation in self.threshold.keeps

    def why_droppable(self, generation: Generation) -> str:
        """Return why shards of this generation may be released; "" = they stay."""
        current = self._current
        root = current.root_of(launch_of(generation))
        return droppable(generation, self.threshold, current.line, self.voids, self.base, root)

    # --- changes --------------------------------------------------------------------------------------------

    def take(self, record: Record) -> list[Effect]:
        """Adopt a record of the present launch, which only its coordinator makes; return nothing if it is not
        adopted."""
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
        # The generations that it keeps were committed before. A node that missed their records hears of them now.
        heard = {g for one in kept for g in (one.generation, *one.keeps)}
        missed = [g for g in reversed(record.keeps) if self._current.is_of_this_launch(g) and g not in heard]
        return [KeepRecord(record), *(Notify(g, Level.REPLICATED) for g in (*missed, record.generation))]

    def void(self, generation: Generation, reason: str) -> list[Effect]:
        """Void a generation; return nothing if it is void already."""
        if generation in self.voids:
            return []
        self.voids[generation] = reason
        while len(self.voids) > _KEPT_VOIDS:
            oldest = min(self.voids, key=age_order)
            del self.voids[oldest]
            self.own_voids.pop(oldest, None)
        return [Notify(generation, Level.NONE, reason)]

    def note_given_up(self, generation: Generation) -> None:
        """Note that a rank of this node gave a generation up. The coordinator is told until it confirms."""
        self.own_voids[generation] = None

    def note_heard(self, voids: tuple[Generation, ...]) -> None:
        """Note that the coordinator has confirmed these voids."""
        self.own_voids = {g: None for g in self.own_voids if g not in voids}

    def keep_base(self, base: Generation | None) -> list[Effect]:
        if base == self.base:
            return []
        self.base = base
        session = self._current.session
        return [KeepSession(session, base)] if session is not None else []

    def hear_base(self, base: Generation | None) -> list[Effect]:
        """Adopt the base that another member names: an agent without its memory has no other way to learn it."""
        session, line = self._current.session, self._current.line
        if base is None or session is None or line is None or self.kept is not None:
            return []
        # The answer may belong to a question of an earlier launch: its base is another one.
        is_this_base = line.head == session.launch and line.cut(launch_of(base)) == base.step
        return self.keep_base(base) if is_this_base else []

    def hear_kept(self, generation: Generation) -> None:
        """Note a generation that a member says is committed, if the coordinator can't tell."""
        if self._current.is_of_this_launch(generation) and not self.is_settled(generation):
            known = self.hearsay
            self.hearsay = generation if known is None else max(known, generation, key=age_order)

    def forget_hearsay(self) -> None:
        """Forget what members said: the coordinator can tell again."""
        self.hearsay = None


def _newest_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the newest records, newest last, ordered by launch first.

    After a step back the records of the previous launch have higher steps, and must not displace those of the present
    one.
    """
    return tuple(sorted(records, key=lambda record: record.generation)[-_KEPT_RECORDS:])


def threshold(records: Iterable[Record], session: Session | None, line: Line | None) -> Record | None:
    """Return the record that licenses the release of older generations: the newest one of the present launch.

    Records of earlier launches license nothing: a node that was away may bring one from a history that was abandoned
    below the step that was loaded, and would release the very generation that the job continues from.
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
    """Return why shards of this generation may be released; "" = they stay. `root` is that of its launch's line, if
    that is known.

    Shortage of memory is no reason: a replica that was acknowledged counts in some rank's commit. Nor is a record for a
    generation that its line does not know: that is a history of its own.
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
