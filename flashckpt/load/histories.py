"""Picks the history that a load goes on with. A pure function of lines and generations that every rank computes alike.

A history is a line that no other line knows of, with a complete generation on it that no other such line has. A job
that was never split has one. Two are never mixed, and neither is preferred: a person chooses, by `history=` or `step=`.
Parameters named `complete` are the complete generations, in memory and on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flashckpt.errors import AmbiguousHistoryError, InternalError, NotFoundError
from flashckpt.protocol.line import GIVEN_UP, NOTHING, Line, begun, by_head, launch_of, name_of, order
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flashckpt.types import Generation, Launch


_ELSEWHERE = (
    "run this on a node where `flashckpt histories` shows both; if there is none, choose on all nodes when the "
    "training "
    "starts: load(history=…)"
)


@dataclass(frozen=True, slots=True)
class Pick:
    """The line that a load goes on with, and the launches that it goes on without."""

    line: Line | None  # None: no generation is complete and no line is known
    roots: Mapping[Launch, Launch]  # head → root, of all known lines
    given_up: tuple[Launch, ...] = ()  # a person chose: the job goes on without these launches
    others: tuple[Launch, ...] = ()  # roots of the given-up launches that belong to other histories

    def why_not(self, generation: Generation) -> str:
        """Return why a generation is not of the picked history; "" = it is."""
        if self.line is None:
            return ""
        launch = launch_of(generation)
        root = self.roots.get(launch)
        abandoned = self.line.why_killed(generation, root)
        if abandoned or self.line.holds(generation, root):
            return abandoned
        return f"it belongs to another history, {name_of(launch)}, which the picked one does not know of"

    def line_for(self, head: Launch, base: Generation | None) -> Line:
        """Return the line of a launch that has loaded `base`, with all that is known of older launches."""
        if base is None:
            return begun(head, self.given_up, self.others)
        line = self.line or begun(launch_of(base))
        return line.continued(head, base, self.given_up, self.others)


def pick(
    lines: Iterable[Line],
    complete: Collection[Generation],
    known: Iterable[Launch] = (),
    *,
    step: int | None = None,
    history: str | None = None,
) -> Pick:
    """Return the only history with a complete generation; with `step`, the only one with that step.

    `known` are the launches of which any shard or step is left. Raises AmbiguousHistoryError if there are several
    histories, and NotFoundError if there is none of the name `history`.
    """
    all_lines = _with_unknown(by_head(lines), complete)
    roots = {head: line.root for head, line in all_lines.items()}
    if history is not None:
        line = _with_longer_lines(_named(history, all_lines, complete), all_lines)
        return _without_others(line, all_lines, known, roots)
    wanted = complete if step is None else [one for one in complete if one.step == step]
    found = _histories(all_lines, wanted, roots)
    if len(found) > 1:
        raise _ambiguous(found, roots, step)
    if not found:
        newest = max((line for head, line in all_lines.items() if head.epoch), key=_head_order, default=None)
        return Pick(None if newest is None else _with_longer_lines(newest, all_lines), roots)
    (line,) = (_with_longer_lines(line, all_lines) for line in found)
    return Pick(line, roots) if step is None else _without_others(line, all_lines, known, roots)


def chosen(
    lines: Iterable[Line],
    complete: Collection[Generation],
    known: Iterable[Launch],
    head: Launch,
    *,
    history: str,
    abandon: bool = False,
) -> Line:
    """Return the line by which a person chooses a history, or abandons it for the only other one.

    Raises NotFoundError if there is no history of that name, if the choice would abandon nothing, or if `abandon` does
    not leave exactly one other history.
    """
    known, lines = tuple(known), tuple(lines)
    picked = pick(lines, complete, known, history=history)
    if picked.line is None:
        raise InternalError(f"history {history!r} was found without a line")
    if not abandon and not picked.given_up:
        raise NotFoundError(
            f"history {history!r}: expected another history that the choice would abandon, found none on this node",
            hint=_ELSEWHERE,
        )
    if not abandon:
        return picked.line.chosen(head, picked.given_up, picked.others)
    all_lines = _with_unknown(by_head(lines), complete)
    roots = {one: line.root for one, line in all_lines.items()}
    # Only lines that do not know of the abandoned one count: what it went on from is no other history.
    doomed, root = picked.line.head, roots[picked.line.head]
    rest = {line.head: line for line in _ends(all_lines) if line.cut(doomed, root) in (None, NOTHING, GIVEN_UP)}
    found = _histories(rest, complete, roots)
    if len(found) != 1:
        names = ", ".join(name_of(line.head) for line in found) or "none"
        raise NotFoundError(
            f"history {history!r}: expected one other history to go on with, found {names}",
            hint=f"{_ELSEWHERE}; to begin anew without any of them: Checkpointer.start_fresh()"
            if not found
            else "choose one of them with `flashckpt histories choose NAME`",
        )
    (line,) = found
    rest_picked = _without_others(line, all_lines, known, roots)
    return line.chosen(head, rest_picked.given_up, rest_picked.others)


def ends(lines: Iterable[Line], complete: Collection[Generation]) -> list[Line]:
    """Return the histories that have a complete generation, oldest first; else the newest line, if there is any."""
    all_lines = _with_unknown(by_head(lines), complete)
    found = list(_histories(all_lines, complete, {head: line.root for head, line in all_lines.items()}))
    return found or list(all_lines.values())[-1:]


def anew(lines: Iterable[Line], known: Iterable[Launch]) -> Pick:
    """Return the pick of a job that a person starts anew: it gives up all known launches."""
    all_lines = by_head(lines)
    launches = {*all_lines, *(one.launch for line in all_lines.values() for one in line.listed), *known}
    given_up = tuple(sorted(launches, key=order))
    return Pick(None, {}, given_up, _roots_of(given_up, all_lines))


def _with_unknown(lines: dict[Launch, Line], complete: Iterable[Generation]) -> dict[Launch, Line]:
    """Add a line for each launch that no line knows of: its generations are a history of their own."""
    for launch in sorted({launch_of(one) for one in complete}, key=order):
        if all(line.cut(launch) is None for line in lines.values()):
            lines[launch] = begun(launch)
    return lines


def _with_longer_lines(line: Line, lines: Mapping[Launch, Line]) -> Line:
    """Return the line with the launches below its floor that longer lines know, like those in persist_dir."""
    for other in lines.values():
        line = line.with_older(other)
    return line


def _histories(
    lines: Mapping[Launch, Line], complete: Iterable[Generation], roots: Mapping[Launch, Launch]
) -> dict[Line, frozenset[Generation]]:
    """Return the lines that no other one knows of, newest last, each with the complete generations on it."""
    ends = _ends(lines)
    held = {line: frozenset(g for g in complete if line.holds(g, roots.get(launch_of(g)))) for line in ends}
    found: dict[Line, frozenset[Generation]] = {}
    for line in sorted(ends, key=_head_order, reverse=True):
        # A line whose generations all lie on another line, too, is no history of its own.
        rivals = [held[other] for other in ends if other != line]
        if held[line] and not any(held[line] < other for other in rivals) and held[line] not in found.values():
            found[line] = held[line]
    return dict(reversed(found.items()))


def _ends(lines: Mapping[Launch, Line]) -> list[Line]:
    return [line for line in lines.values() if not any(other.supersedes(line) for other in lines.values())]


def _without_others(
    line: Line, lines: Mapping[Launch, Line], known: Iterable[Launch], roots: Mapping[Launch, Launch]
) -> Pick:
    """Return the pick of a line that a person chose, with all launches that it gives up."""
    given_up = _others(line, lines, known, roots)
    others = tuple(one for one in _roots_of(given_up, lines) if one != line.root)
    return Pick(line, roots, given_up, others)


def _roots_of(launches: Iterable[Launch], lines: Mapping[Launch, Line]) -> tuple[Launch, ...]:
    """Return the roots of these launches. A launch whose root no line names is its own root."""
    roots = {one.launch: line.root for line in lines.values() for one in line.listed if one.step != GIVEN_UP}
    roots |= {head: line.root for head, line in lines.items()}
    found = {roots.get(launch, launch) for launch in launches}
    return tuple(sorted((one for one in found if one.epoch), key=order))


def _others(
    line: Line, lines: Mapping[Launch, Line], known: Iterable[Launch], roots: Mapping[Launch, Launch]
) -> tuple[Launch, ...]:
    """Return the known launches that a line does not know of."""
    listed = {one.launch for other in lines.values() for one in other.listed}
    launches = {*lines, *listed, *known}
    return tuple(sorted((one for one in launches if line.cut(one, roots.get(one)) is None), key=order))


def _named(history: str, lines: Mapping[Launch, Line], complete: Iterable[Generation]) -> Line:
    name = history.lower().removeprefix("0x")
    lines = _with_left_behind(lines, complete)
    found = [line for head, line in lines.items() if name and name_of(head).startswith(name)]
    if len(found) == 1:
        return found[0]
    newest = [max((g for g in complete if line.holds(g)), key=age_order, default=None) for line in lines.values()]
    names = [
        f"{name_of(line.head)} ({'nothing complete' if one is None else f'newest step {one.step}'})"
        for line, one in zip(lines.values(), newest, strict=True)
    ]
    raise NotFoundError(
        f"history {history!r}: expected the name of one history, or its first letters, found "
        f"{len(found) or 'none'} among {', '.join(names) or 'none'}",
        hint="`flashckpt histories` lists them",
    )


def _with_left_behind(lines: Mapping[Launch, Line], complete: Iterable[Generation]) -> dict[Launch, Line]:
    """Add a line for each launch that has a complete generation and no line of its own any more.

    persist_dir keeps only lines that no other one knows of. The added line has the older launches of the newest line
    that lists the launch.
    """
    found = dict(lines)
    for launch in {launch_of(one) for one in complete} - set(lines):
        listing = [line for line in lines.values() if line.cut(launch) is not None and launch.epoch]
        if listing:
            line = max(listing, key=_head_order)
            older = tuple(one for one in line.listed if order(one.launch) < order(launch))
            floor = line.floor if line.floor is not None and order(line.floor.launch) < order(launch) else None
            found[launch] = Line(launch, line.root, older, floor)
    return found


def _ambiguous(
    found: Mapping[Line, frozenset[Generation]], roots: Mapping[Launch, Launch], step: int | None
) -> AmbiguousHistoryError:
    told = [_describe(line, complete) for line, complete in found.items()]
    newest = [max(complete, key=age_order) for complete in found.values()]
    what = "histories" if step is None else f"histories with step {step}"
    names = [name_of(line.head) for line in found]
    return AmbiguousHistoryError(
        f"expected one history, found {len(found)} {what}, of which none goes on from another:"
        + "".join(f"\n  - {one}" for one in told),
        hint=f"nothing was changed; choose one with load(history={names[-1]!r}); the job then goes on without the "
        "others. `flashckpt histories` shows them",
        steps=tuple(one.step for one in newest),
        histories=tuple(names),
    )


def _describe(line: Line, complete: Iterable[Generation]) -> str:
    newest = max(complete, key=age_order)
    base = next((one for one in reversed(line.listed) if one.step >= 0), None)
    origin = "began with nothing" if base is None else f"went on from step {base.step} of {name_of(base.launch)}"
    return f"history {name_of(line.head)}: newest {newest}, launched {date_of(line.head)}, {origin}"


def date_of(launch: Launch) -> str:
    """Return for people when a launch began: its epoch is a date unless clocks were wrong."""
    try:
        return datetime.fromtimestamp(launch.epoch / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"in epoch {launch.epoch}"


def _head_order(line: Line) -> tuple[int, int]:
    return order(line.head)
