"""Remembers every promise that trainers were given, and judges what a later load returns. No I/O.

The *line* is the job's history as its operators made it: each state follows from the one that its launch loaded. A
promise binds until a newer state of its line is promised, or until an operator goes back behind it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ROOT_MARK = "0" * 16


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
    generation: tuple


@dataclass(frozen=True)
class Facts:
    """What the campaign knows when a launch begins."""

    within_budget: bool  # not more faults than copies since the promise, and nobody who holds something stays away
    complete: frozenset  # generations that lie there as a whole, undamaged, on nodes of the launch
    anything: bool  # whether any node of the launch has a shard, or persist_dir a step


class Oracle:
    """Of one job."""

    def __init__(self):
        self.states = {}
        self.abandoned = set()  # marks that an operator, or a load that found no more, has gone back behind
        self.head = ROOT_MARK  # the newest state that the job goes on from
        self.required = None  # the state that a load has to return, or a newer one of its line
        self.persisted = None  # the same, where memory is lost

    def saved(self, mark, parent, step, launch, generation):
        state = State(mark, parent, step, launch, tuple(generation))
        known = self.states.setdefault(mark, state)
        return [] if known == state else [f"two states have the mark {mark}: {known} and {state}"]

    def promised(self, generation, level):
        """A trainer was told so."""
        state = self._of(generation)
        if state is None or state.mark in self.abandoned or not self.is_on_line(state.mark, self.head):
            return False
        newer = self.required is None or self._is_newer(state, self.required)
        if level in ("replicated", "persisted") and newer:
            self.required = state
        if level == "persisted" and (self.persisted is None or self._is_newer(state, self.persisted)):
            self.persisted = state
        return newer

    def went_on(self, mark):
        """The running launch has reached this state."""
        if self.head == ROOT_MARK or self.is_ancestor(self.head, mark):
            self.head = mark

    # --- what a load may return

    def judge(self, mark, facts, *, code=None, step=None):
        """Violations of a load that returned `mark` (None: nothing was there) or was refused with `code`."""
        wanted = self.required
        is_there = wanted is not None and any(self.is_ancestor(wanted.mark, one.mark) for one in self._there(facts))
        is_bound = wanted is not None and (facts.within_budget or is_there)
        problems = []
        if facts.within_budget and wanted is not None and not is_there:
            problems.append(f"step {wanted.step} was promised, and is not whole any more: {wanted}")
        if code is not None:
            if is_bound:
                problems.append(f"step {wanted.step} was promised and is there; the load was refused with {code}")
            elif self.persisted is not None:
                problems.append(f"step {self.persisted.step} is persisted; the load was refused with {code}")
            elif wanted is None and not facts.anything:
                problems.append(f"nothing was ever saved; the load was refused with {code}")
            return problems
        if mark is None:
            if self.persisted is not None or is_bound or (facts.anything and wanted is not None):
                problems.append(f"the load found nothing; promised: {wanted}, persisted: {self.persisted}")
            return problems
        found = self.states.get(mark)
        if found is None:
            return [*problems, f"the load returned a state that nobody saved: {mark}"]
        if step is not None:
            return problems if found.step == step else [*problems, f"asked for step {step}, got {found}"]
        least = wanted if is_bound else self.persisted
        if least is not None and not self.is_ancestor(least.mark, mark):
            problems.append(f"expected {least} or a newer state of its line, found {found}")
        if mark in self.abandoned or not self.is_on_line(mark, self.head):
            problems.append(f"found {found}, which an operator had gone back behind, or of another line")
        return problems

    def loaded(self, mark):
        """A launch that takes the job over goes on from here: everything else of the line is abandoned."""
        if mark is None:
            self.abandoned |= self.states.keys()
            self.head, self.required, self.persisted = ROOT_MARK, None, None
            return
        self.head = mark
        self.abandoned |= self.states.keys() - set(self._ancestors(mark))
        self.required = self.states[mark]
        if self.persisted is not None and not self.is_ancestor(self.persisted.mark, mark):
            self.persisted = None

    def candidates(self, complete):
        """Steps of the line, older than its head, that lie there as a whole: where an operator may go back to."""
        line = set(self._ancestors(self.head)) - {self.head}
        return sorted({s.step for s in self.states.values() if s.mark in line and s.generation in complete})

    # --- lines

    def is_ancestor(self, older, newer):
        return older in self._ancestors(newer)

    def is_on_line(self, mark, head):
        """Before or after `head` without a fork."""
        return self.is_ancestor(mark, head) or self.is_ancestor(head, mark)

    def _ancestors(self, mark):
        """`mark` itself first."""
        while mark != ROOT_MARK and mark in self.states:
            yield mark
            mark = self.states[mark].parent
        yield ROOT_MARK

    def _there(self, facts):
        """States of the living line that lie there as a whole."""
        return [s for s in self.states.values() if s.generation in facts.complete and s.mark not in self.abandoned]

    def _is_newer(self, state, than):
        return state.mark != than.mark and self.is_ancestor(than.mark, state.mark)

    def _of(self, generation):
        return next((one for one in self.states.values() if one.generation == tuple(generation)), None)
