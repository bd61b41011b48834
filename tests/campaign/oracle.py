"""Remembers every promise that trainers were given, and judges what a later load returns. No I/O.

States form a tree: each follows from the one that its launch had before. A *history* is a path in that tree with the
launches that made it: what the job's operators see as the job. There is one, unless a stray launch has begun another,
or two launches that knew nothing of each other went on from the same state. A promise binds within its history until a
newer state of it is promised, or until an operator goes back behind it. If something is whole of two histories, a load
has to be refused until a person chooses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

ROOT_MARK = "0" * 16
AMBIGUOUS = "FC-LOAD-003"


def next_mark(mark, launch, step):
    """The name of the state that a launch trains from the one before."""
    return hashlib.blake2b(f"{mark} {launch} {step}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class State:
    """One saved state."""

    mark: str
    parent: str
    step: int
    launch: int
    generation: tuple  # (): the rank that saved it did not live to tell


@dataclass(frozen=True)
class Facts:
    """What the campaign knows when a launch begins."""

    within_budget: bool  # not more faults than copies since the promise, and nobody who holds something stays away
    complete: frozenset  # generations that lie there as a whole, undamaged, on nodes of the launch or on disk
    anything: bool  # whether any node of the launch has a shard, or persist_dir a step
    known: frozenset = frozenset()  # names of launches that a line or a shard there speaks of
    rotten: frozenset = frozenset()  # generations that would be whole if nothing were damaged
    on_disk: frozenset | None = (
        None  # generations that lie in persist_dir as a whole; None: the launch does not look there
    )


@dataclass(eq=False, repr=False)
class History:
    """What one job has become."""

    launches: list = field(default_factory=list)  # in order
    head: str = ROOT_MARK  # the newest state that it goes on from
    required: State | None = None  # the state that a load has to return, or a newer one of the history
    flushed: set = field(default_factory=set)  # marks of what was persisted
    abandoned: set = field(default_factory=set)  # marks that a rollback, or a load that found no more, left behind

    def __repr__(self):
        return f"launches {self.launches}, head {self.head}, promised {self.required}, on disk {sorted(self.flushed)}"

    def copy(self):
        return History(list(self.launches), self.head, self.required, set(self.flushed), set(self.abandoned))


class Oracle:
    """Of one job."""

    def __init__(self):
        self.states = {}
        self.main = History()  # the one that the operators believe to be the job
        self.rivals = []
        self.names = {}  # launch → its name
        self._history_of = {}  # launch → its history
        self._empty_handed = {}  # launch that has loaded nothing, and saved nothing yet → what its first save makes

    @property
    def head(self):
        return self.main.head

    @property
    def required(self):
        return self.main.required

    @property
    def persisted(self):
        return self.newest_flushed(self.main)

    @property
    def histories(self):
        return [self.main, *self.rivals]

    def newest_flushed(self, history):
        """What has to come back from disk where memory is lost."""
        alive = [self.states[mark] for mark in history.flushed if mark not in history.abandoned]
        return max(alive, key=lambda one: len(list(self._ancestors(one.mark))), default=None)

    # --- what trainers say

    def named(self, launch, name):
        self.names[launch] = name

    def saved(self, mark, parent, step, launch, generation=()):
        """A state is about to be saved, or was."""
        if launch in self._empty_handed:
            self._begin(launch)
        state, known = State(mark, parent, step, launch, tuple(generation)), self.states.get(mark)
        if known is None or known == State(mark, parent, step, launch, ()):
            self.states[mark] = state
        elif generation and known != state:
            return [f"two states have the mark {mark}: {known} and {state}"]
        if generation:
            self.names[launch] = f"{generation[1]:016x}"
        return []

    def promised(self, generation, level):
        """A trainer was told so. The history that it was promised to, None if it binds nobody."""
        state = self._of(generation)
        history = None if state is None else self._history_of.get(state.launch, self.main)
        if history is None or not self.is_alive(history, state.mark):
            return None
        newer = history.required is None or self._is_newer(state, history.required)
        if newer:
            history.required = state
        if level == "persisted":
            history.flushed.add(state.mark)
        if self.is_ancestor(history.head, state.mark):
            history.head = state.mark
        return history if newer else None

    # --- what a load may return

    def visible(self, complete, step=None):
        """Histories that have something whole, and that no other one has all of."""
        held = {
            id(one): frozenset(s.mark for s in self.alive(one) if s.generation in complete and step in (None, s.step))
            for one in self.histories
        }
        found, seen = [], set()
        for one in self.histories:
            mine = held[id(one)]
            if mine and mine not in seen and not any(mine < other for other in held.values()):
                found.append(one)
                seen.add(mine)
        return found

    def judge(self, mark, facts, *, code=None, step=None, history=None, names=()):
        """Violations of a load that returned `mark` (None: nothing was there) or was refused with `code`.

        `history`: the one that was asked for; `names`: those that the refusal names.
        """
        rivals = self.visible(facts.complete, step) if history is None else [history]
        problems = self._judge_disk(facts)
        if code == AMBIGUOUS:
            return problems + self._judge_ambiguous(rivals, facts, step, names)
        if len(rivals) > 1:
            told = [f"{self._names(one)} at {one.required}" for one in rivals]
            outcome = code or self.states.get(mark, mark)
            return [*problems, f"{len(rivals)} histories are there: {told}; the load came to {outcome}"]
        judged = rivals[0] if rivals else self.main
        wanted, flushed = judged.required, self.newest_flushed(judged)
        within_budget = facts.within_budget and judged is self.main
        there = [s for s in self.alive(judged) if s.generation in facts.complete]
        is_there = wanted is not None and any(self.is_ancestor(wanted.mark, one.mark) for one in there)
        is_bound = wanted is not None and (within_budget or is_there)
        if within_budget and wanted is not None and not is_there:
            problems.append(f"step {wanted.step} was promised, and is not whole any more: {wanted}")
        if code is not None:
            if step is not None and not any(one.step == step for one in there):
                return problems
            if is_bound:
                problems.append(f"step {wanted.step} was promised and is there; the load was refused with {code}")
            elif flushed is not None and flushed in there:
                problems.append(f"step {flushed.step} is persisted; the load was refused with {code}")
            elif wanted is None and not facts.anything:
                problems.append(f"nothing was ever saved; the load was refused with {code}")
            return problems
        if mark is None:
            if is_bound or facts.complete or (facts.anything and wanted is not None):
                problems.append(f"the load found nothing; promised: {wanted}, persisted: {flushed}")
            return problems
        found = self.states.get(mark)
        if found is None:
            return [*problems, f"the load returned a state that nobody saved: {mark}"]
        if not self.is_alive(judged, mark):
            problems.append(f"found {found}, which an operator had gone back behind, or of another history")
        if step is not None:
            return problems if found.step == step else [*problems, f"asked for step {step}, got {found}"]
        least = wanted if is_bound else flushed if flushed in there else None
        if least is not None and not self.is_ancestor(least.mark, mark):
            problems.append(f"expected {least} or a newer state of its history, found {found}")
        return problems

    def _judge_disk(self, facts):
        """Nothing that was persisted goes from disk, but what was abandoned."""
        newest = [] if facts.on_disk is None else filter(None, map(self.newest_flushed, self.histories))
        gone = [one for one in newest if one.generation not in facts.on_disk]
        return [f"step {one.step} was persisted, and is not whole on disk any more: {one}" for one in gone]

    def _judge_ambiguous(self, rivals, facts, step, names):
        if len(rivals) < 2 and len(self.visible(facts.complete | facts.rotten, step)) < 2:
            return [f"there is one history, {[self._names(one) for one in rivals]}; the load was refused for {names}"]
        unnamed = [self._names(one) for one in rivals if not self._names(one) & set(names)]
        unknown = set(names) - {name for one in rivals for name in self._names(one)}
        problems = [f"the refusal names {names}, and not the history of {one}" for one in unnamed]
        return problems + [f"the refusal names {one}, of which nothing is there" for one in sorted(unknown)]

    # --- what follows from a load

    def loaded(self, mark, launch=0, facts=None, *, chosen=False, stray=False):
        """A launch that takes the job over goes on from here.

        `chosen`: an operator named the step or the history. `stray`: nobody meant it to be the job.
        """
        known = frozenset() if facts is None else facts.known
        if mark is None:
            self._empty_handed[launch] = (stray, frozenset())
            return
        history = next((one for one in self._by_choice(facts) if self.is_alive(one, mark)), self.main)
        newest = history.launches[-1] if history.launches else None
        if newest is not None and newest != self.states[mark].launch and self.names.get(newest) not in known:
            self.rivals.append(history.copy())  # which this launch has not heard of
            self._adopt(self.rivals[-1])
            history.launches = [one for one in history.launches if self.names.get(one) in known]
        if chosen:
            self._give_up(known, history)
        history.launches.append(launch)
        history.head = mark
        history.abandoned |= self.states.keys() - set(self._ancestors(mark))
        history.flushed &= set(self._ancestors(mark))
        history.required = self.states[mark]
        self._make_main(history)
        self._adopt(history)

    def started_fresh(self, launch, facts):
        """An operator gave up what was known."""
        self._empty_handed[launch] = (False, facts.known)
        self._begin(launch)

    def _begin(self, launch):
        """A launch that has loaded nothing saves something: a history of its own."""
        stray, given_up = self._empty_handed.pop(launch)
        new = History([launch])
        self._give_up(given_up, new)
        if stray:
            self.rivals.append(new)
        else:
            self._make_main(new)
        self._adopt(new)

    def _by_choice(self, facts):
        """Visible ones first: an invisible one may have the state too, as one of its past."""
        seen = [] if facts is None else self.visible(facts.complete)
        return [*seen, *(one for one in self.histories if one not in seen)]

    def _make_main(self, history):
        others = [one for one in self.histories if one is not history]
        self.main, self.rivals = history, [one for one in others if one.launches]

    def _give_up(self, known, but):
        gone = [one for one in self.histories if one is not but and self._newest_name(one) in known]
        self.rivals = [one for one in self.rivals if not any(one is other for other in gone)]
        if any(one is self.main for one in gone):
            self.main = History()

    def _newest_name(self, history):
        return self.names.get(history.launches[-1]) if history.launches else None

    def _adopt(self, history):
        """Its newest launch goes on in it."""
        self._history_of[history.launches[-1]] = history

    def forget(self):
        """Nothing is left of the job anywhere."""
        self.main, self.rivals = History(), []

    def candidates(self, complete):
        """Steps of the job, older than its head, that lie there as a whole: where an operator may go back to."""
        line = set(self._ancestors(self.head)) - {self.head}
        return sorted({s.step for s in self.states.values() if s.mark in line and s.generation in complete})

    # --- lines

    def is_alive(self, history, mark):
        """Whether a state is on the line of the history, or may still become its newest."""
        if mark in history.abandoned or mark not in self.states:
            return False
        is_newer = self.is_ancestor(history.head, mark) and self.states[mark].launch in history.launches
        return is_newer or self.is_ancestor(mark, history.head)

    def is_ancestor(self, older, newer):
        return older in self._ancestors(newer)

    def alive(self, history):
        """All states for which `is_alive` is true, in one pass."""
        line, newer, found = set(self._ancestors(history.head)), {history.head}, []
        for state in self.states.values():  # each after its parent
            if state.parent in newer and state.launch in history.launches:
                newer.add(state.mark)
            if (state.mark in line or state.mark in newer) and state.mark not in history.abandoned:
                found.append(state)
        return found

    def _names(self, history):
        return {self.names[one] for one in history.launches if one in self.names}

    def _ancestors(self, mark):
        """`mark` itself first."""
        while mark != ROOT_MARK and mark in self.states:
            yield mark
            mark = self.states[mark].parent
        yield ROOT_MARK

    def _is_newer(self, state, than):
        return state.mark != than.mark and self.is_ancestor(than.mark, state.mark)

    def _of(self, generation):
        return next((one for one in self.states.values() if one.generation == tuple(generation)), None)
