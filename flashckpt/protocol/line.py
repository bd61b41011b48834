"""A line: which launch a job's head continued, from which step, back to the root. Pure.

    launch a ──10──20──30        abandoned above 10
              └─ launch b ──11──25──40        abandoned above 25
                             └─ launch c ──26──27   (the head)

    The line of c: a up to step 10, b up to step 25, all of c.

A generation is alive for a head if it lies on the head's line. What else is known of a listed launch is abandoned, on
every tier and on every node, whenever it turns up. A launch that the line does not list is unknown to it: a history of
its own, which nobody has given up, and which survives until a person chooses.

What bounds a line: it lists the launches of which something is left on the nodes that took part in a load, and of the
others the newest `KEPT`. Older ones are folded into the floor, where all that is not listed is abandoned. So a line
takes less than 1 KiB after 10,000 restarts (`tests/unit/test_line.py`). The floor speaks for launches of the same root
only: an unrelated history is never older than the floor, whatever its date. It also speaks for the launches of a
history that a person gave up: the root of such a history stays listed.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashckpt.types import Launch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashckpt.types import Generation

KEPT = 24  # least number of launches that a line lists, if there are as many
MAX_LISTED = 4096  # in a line that comes from elsewhere
MAX_ENCODED_BYTES = 1 << 17
NOTHING = -1  # the step of a launch of which nothing is on the line
GIVEN_UP = -2  # the same, for the root of another history that a person gave up: always listed
EVERYTHING = (1 << 63) - 1  # the step of a launch of which everything is on the line
_UNKNOWN = Launch(0, 0)  # epoch 0 is never a launch's

_HEAD = struct.Struct("<BQQQQQQqI")  # version, head, root, floor and its step, number of ancestors
_ANCESTOR = struct.Struct("<QQq")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A launch older than the head: its generations up to `step` are on the line."""

    launch: Launch
    step: int  # NOTHING or GIVEN_UP: none of them, the job went on without this launch


@dataclass(frozen=True, slots=True)
class Line:
    """The ancestry of one launch."""

    head: Launch
    root: Launch  # the launch that began with nothing; epoch 0: not known
    listed: tuple[Ancestor, ...] = ()  # oldest first
    floor: Ancestor | None = None  # stands for the launches up to this one that are not listed

    def cut(self, launch: Launch, root: Launch | None = None) -> int | None:
        """Return the highest step of a launch that is on the line; None if this line does not know the launch.

        `root` is that of the launch's own line; None if its line is not known.
        """
        if launch == self.head:
            return EVERYTHING
        for one in self.listed:
            if one.launch == launch:
                return one.step
        if launch == _UNKNOWN:
            return EVERYTHING  # of no launch: a person put it into persist_dir
        floor = self.floor
        if floor is None or order(launch) > order(floor.launch) or not self._floor_speaks_for(root):
            return None
        return floor.step

    def _floor_speaks_for(self, root: Launch | None) -> bool:
        if root is None or root == self.root or _UNKNOWN in (root, self.root):
            return True
        return any(one.launch == root and one.step == GIVEN_UP for one in self.listed)

    def holds(self, generation: Generation, root: Launch | None = None) -> bool:
        """Return True if the generation is on the line."""
        cut = self.cut(launch_of(generation), root)
        return cut is not None and generation.step <= cut

    def kills(self, generation: Generation, root: Launch | None = None) -> bool:
        """Return True if the generation is abandoned: its launch is known, and it is not on the line."""
        cut = self.cut(launch_of(generation), root)
        return cut is not None and generation.step > cut

    def why_killed(self, generation: Generation, root: Launch | None = None) -> str:
        """Return why a generation is abandoned; "" = it is not."""
        launch = launch_of(generation)
        cut = self.cut(launch, root)
        if cut is None or generation.step <= cut:
            return ""
        if cut <= NOTHING:
            return f"abandoned: the job went on without launch {name_of(launch)}"
        return f"abandoned: the job went on from step {cut} of launch {name_of(launch)}"

    def supersedes(self, other: Line) -> bool:
        """Return True if this line was made by a launch that knew of the other one's head."""
        return self.head != other.head and self.cut(other.head, other.root) is not None

    # --- lines to come ------------------------------------------------------------------------------------------

    def continued(
        self, head: Launch, base: Generation, given_up: Iterable[Launch] = (), others: Iterable[Launch] = ()
    ) -> Line:
        """Return the line of a launch that has loaded `base`, and that continues without the launches `given_up`.

        `others` are the roots of those of other histories.
        """
        parent = launch_of(base)
        steps = {one.launch: one.step for one in self.listed} | {self.head: NOTHING}
        steps = {one: min(step, NOTHING) if order(one) > order(parent) else step for one, step in steps.items()}
        steps = dict.fromkeys(given_up, NOTHING) | steps | dict.fromkeys(others, GIVEN_UP) | {parent: base.step}
        floor = self.floor
        if floor is not None and order(floor.launch) > order(parent):
            floor = replace(floor, step=min(floor.step, base.step))
        return Line(head, self.root, _in_order(steps, head), floor)

    def chosen(self, head: Launch, given_up: Iterable[Launch] = (), others: Iterable[Launch] = ()) -> Line:
        """Return the line by which a person says that the job continues with this one, and without `given_up`.

        `others`: as in `continued`.
        """
        listed = {one.launch: one.step for one in self.listed}
        steps = dict.fromkeys(given_up, NOTHING) | listed | dict.fromkeys(others, GIVEN_UP) | {self.head: EVERYTHING}
        return Line(head, self.root, _in_order(steps, head), self.floor)

    def including(self, older: Line | None, present: Collection[Generation]) -> Line:
        """Return the line of a launch that saves without a load: it continues from all that is left of older launches.

        IMPORTANT: without a limit for launches that the line before it does not list. What is `present` on this node is
        no measure of what others have of the same launch, and they adopt this line.
        """
        left = {launch_of(one) for one in present}
        steps = dict.fromkeys(left, EVERYTHING)
        if older is None:
            return Line(self.head, self.root, _in_order(steps, self.head), self.floor)
        steps |= {older.head: EVERYTHING}
        steps |= {one: cut for one in left if one != older.head and (cut := older.cut(one)) is not None}
        steps |= {one.launch: one.step for one in older.listed}
        return Line(self.head, older.root, _in_order(steps, self.head), older.floor).compacted(left)

    def compacted(self, present: Collection[Launch] = (), most: int = KEPT) -> Line:
        """Fold the oldest launches into the floor, except those of which something is left (`present`), and the roots
        of histories that a person gave up."""
        left = len(self.listed) - most
        if left <= 0:
            return self
        folded = [one for one in self.listed[:left] if one.launch not in present and one.step != GIVEN_UP]
        if not folded:
            return self
        kept = tuple(one for one in self.listed if one not in folded)
        launch = max((one.launch for one in (*folded, *([self.floor] if self.floor else []))), key=order)
        return Line(self.head, self.root, kept, Ancestor(launch, NOTHING))

    def with_older(self, other: Line) -> Line:
        """Return this line with the launches below its floor that a longer line, which this one continues, lists."""
        if self.floor is None or not (other.head == self.head or self.supersedes(other)):
            return self
        known = {one.launch for one in self.listed} | {self.head}
        # A line that was given up itself vouches for nothing that is not listed here.
        cut = self.cut(other.head, other.root)
        is_vouched = other.head == self.head or (cut is not None and cut > NOTHING)
        older = [
            one if is_vouched else Ancestor(one.launch, NOTHING)
            for one in other.listed
            if one.launch not in known and order(one.launch) <= order(self.floor.launch)
        ]
        listed = tuple(sorted((*older, *self.listed), key=lambda one: order(one.launch)))
        # Only a line of the same head knows of all that was folded into the floor.
        return Line(self.head, self.root, listed, other.floor if other.head == self.head else self.floor)


def order(launch: Launch) -> tuple[int, int]:
    """Sort key: newest last."""
    return launch.epoch, launch.nonce


def launch_of(generation: Generation) -> Launch:
    return Launch(generation.epoch, generation.nonce)


def name_of(launch: Launch) -> str:
    """Return the name by which people know a launch, and the history of which it is the head."""
    return f"{launch.nonce:016x}"


def begun(head: Launch, given_up: Iterable[Launch] = (), others: Iterable[Launch] = ()) -> Line:
    """Return the line of a launch that begins with nothing, and continues without the launches `given_up`.

    `others` are the roots of those.
    """
    return Line(head, head, _in_order(dict.fromkeys(given_up, NOTHING) | dict.fromkeys(others, GIVEN_UP), head))


def from_fence(step: int, epoch: int, nonce: int) -> Line:
    """Return the line for a fence, which earlier versions wrote: only that the launch kept older generations up to
    `step`."""
    head = Launch(epoch, nonce)
    below = Launch(epoch, nonce - 1) if nonce else Launch(epoch - 1, (1 << 64) - 1)
    return Line(head, _UNKNOWN, (), Ancestor(below, step))


def merged(one: Line, other: Line) -> Line:
    """Join what two nodes say of the same launch. Saves without a load make each node say what it has itself."""
    steps = {a.launch: a.step for a in one.listed}
    for a in other.listed:
        steps[a.launch] = max(a.step, steps.get(a.launch, a.step))
    floors = [line.floor for line in (one, other) if line.floor is not None]
    floor = max(floors, key=lambda a: (*order(a.launch), a.step), default=None)
    known = [line.root for line in (one, other) if line.root != _UNKNOWN]
    return Line(one.head, min(known, key=order, default=_UNKNOWN), _in_order(steps, one.head), floor)


def newer(one: Line | None, other: Line | None) -> Line | None:
    """Return the one that is in force if both are known."""
    if one is None or other is None:
        return other if one is None else one
    if one.head == other.head:
        return one if one == other else merged(one, other)
    return max(one, other, key=lambda line: order(line.head))


def by_head(lines: Iterable[Line]) -> dict[Launch, Line]:
    """Return each head's line, oldest first, joined from what different nodes say of it."""
    found: dict[Launch, Line] = {}
    for line in lines:
        before = found.get(line.head)
        found[line.head] = line if before is None else merged(before, line)
    return {head: found[head] for head in sorted(found, key=order)}


def _in_order(steps: dict[Launch, int], head: Launch) -> tuple[Ancestor, ...]:
    """Return the launches in order, without those that are not older than the head: it can't have continued those."""
    older = sorted((launch for launch in steps if order(launch) < order(head)), key=order)
    return tuple(Ancestor(launch, steps[launch]) for launch in older)


def describe(line: Line) -> dict[str, Any]:
    """Describe a line for people: the name of the history, and what its launch continued from."""
    base = next((one for one in reversed(line.listed) if NOTHING < one.step < EVERYTHING), None)
    return {
        "history": name_of(line.head),
        "root": name_of(line.root),
        "from_step": None if base is None else base.step,
        "from_launch": None if base is None else name_of(base.launch),
    }


# --- as bytes -----------------------------------------------------------------------------------------------------


def encode(line: Line) -> bytes:
    floor = line.floor or Ancestor(_UNKNOWN, NOTHING)
    fixed = (*order(line.head), *order(line.root), *order(floor.launch), floor.step, len(line.listed))
    return _HEAD.pack(_VERSION, *fixed) + b"".join(_ANCESTOR.pack(*order(a.launch), a.step) for a in line.listed)


def decode(data: bytes) -> Line | None:
    """Decode a line. None if the bytes are not exactly what `encode` makes of some line."""
    if not _HEAD.size <= len(data) <= MAX_ENCODED_BYTES:
        return None
    version, *fields, step, count = _HEAD.unpack_from(data)
    if version != _VERSION or count > MAX_LISTED or len(data) != _HEAD.size + count * _ANCESTOR.size:
        return None
    head, root, below = Launch(*fields[:2]), Launch(*fields[2:4]), Launch(*fields[4:])
    listed = tuple(Ancestor(Launch(e, n), s) for e, n, s in _ANCESTOR.iter_unpack(data[_HEAD.size :]))
    orders = [order(a.launch) for a in listed]
    is_sorted = all(a < b for a, b in itertools.pairwise(orders))
    is_older = all(known < order(head) for known in (*orders[-1:], order(below)))
    in_range = step >= NOTHING and min((a.step for a in listed), default=NOTHING) >= GIVEN_UP
    if head.epoch == 0 or not is_sorted or not is_older or not in_range or (below == _UNKNOWN and step != NOTHING):
        return None
    return Line(head, root, listed, None if below == _UNKNOWN else Ancestor(below, step))
