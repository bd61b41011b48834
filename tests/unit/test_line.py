"""A line: what is on it, what it abandons, and that it stays small."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from flashckpt.protocol.line import (
    EVERYTHING,
    KEPT,
    MAX_ENCODED_BYTES,
    MAX_LISTED,
    NOTHING,
    Ancestor,
    Line,
    begun,
    by_head,
    decode,
    describe,
    encode,
    from_fence,
    launch_of,
    merged,
    name_of,
    newer,
    order,
)
from flashckpt.types import Generation, Launch

A, B, C, D, E = (Launch(10 * number, number) for number in range(1, 6))
STRANGER = Launch(15, 99)
ALL = (1 << 63) - 1


def at(launch, step, seq=1):
    return Generation(launch.epoch, launch.nonce, step, seq)


def chain(*steps, given_up=()):
    """The line of the launch after `steps`: each loaded the one before it at that step."""
    launches = [A, B, C, D, E]
    line = begun(A)
    for parent, head, step in zip(launches, launches[1:], steps, strict=False):
        line = line.continued(head, at(parent, step), given_up)
    return line


A10_B25_C = chain(10, 25)
"""The one that the module's docstring draws."""


@pytest.mark.parametrize(
    ("launch", "cut"),
    [(A, 10), (B, 25), (C, ALL), (STRANGER, None), (D, None), (Launch(0, 0), ALL)],
    ids=["root", "parent", "head", "stranger", "later", "nobody"],
)
def test_cut_is_the_highest_step_on_the_line(launch, cut):
    assert A10_B25_C.cut(launch) == cut
    assert A10_B25_C.cut(launch, root=A) == cut, "without a floor the root says nothing"


@pytest.mark.parametrize(
    ("launch", "step", "fate"),
    [
        (A, 0, "held"),
        (A, 10, "held"),
        (A, 11, "killed"),
        (B, 25, "held"),
        (B, 26, "killed"),
        (C, 0, "held"),
        (C, 10**12, "held"),
        (STRANGER, 0, "unknown"),
        (STRANGER, 10**12, "unknown"),
        (D, 5, "unknown"),
    ],
)
def test_a_generation_is_held_or_killed_or_unknown(launch, step, fate):
    generation = at(launch, step)
    assert (A10_B25_C.holds(generation), A10_B25_C.kills(generation)) == (fate == "held", fate == "killed")
    assert bool(A10_B25_C.why_killed(generation)) == (fate == "killed")


def test_the_reason_names_the_launch_and_where_the_job_left_it():
    line = chain(10, 25, given_up=[STRANGER])
    assert line.why_killed(at(A, 11)) == f"abandoned: the job went on from step 10 of launch {name_of(A)}"
    assert line.why_killed(at(STRANGER, 3)) == f"abandoned: the job went on without launch {name_of(STRANGER)}"


def test_step_0_is_a_step_like_others():
    line = chain(0)
    assert line.holds(at(A, 0))
    assert line.kills(at(A, 1))


@pytest.mark.parametrize(
    ("one", "other", "does"),
    [
        (chain(10), begun(A), True),
        (chain(10, 25), begun(A), True),
        (chain(10, 25), chain(10), True),
        (begun(A), begun(A), False),
        (begun(A), chain(10), False),
        (begun(B), begun(A), False),
        (begun(B, [A]), begun(A), True),
        (from_fence(3, 20, 2), begun(A), True),
        (from_fence(3, 20, 2), begun(C), False),
        (begun(C), from_fence(3, 20, 2), False),
    ],
)
def test_supersedes_what_it_knew_of(one, other, does):
    assert one.supersedes(other) is does


def test_a_load_from_the_parent_keeps_what_is_older():
    assert chain(10).listed == (Ancestor(A, 10),)
    assert A10_B25_C.listed == (Ancestor(A, 10), Ancestor(B, 25))
    assert A10_B25_C.root == A
    assert A10_B25_C.head == C


def test_a_load_from_an_older_launch_abandons_those_between():
    line = A10_B25_C.continued(D, at(A, 7))
    assert line.listed == (Ancestor(A, 7), Ancestor(B, NOTHING), Ancestor(C, NOTHING))
    assert line.root == A
    assert line.kills(at(B, 0))
    assert line.kills(at(C, 0))


def test_what_was_given_up_is_dead_whatever_its_step():
    line = A10_B25_C.continued(D, at(C, 30), [STRANGER])
    assert line.kills(at(STRANGER, 0))
    assert line.holds(at(C, 30))
    assert line.listed == (Ancestor(A, 10), Ancestor(STRANGER, NOTHING), Ancestor(B, 25), Ancestor(C, 30))


def test_giving_up_a_launch_does_not_take_it_off_the_line():
    """Whoever names one too many must not bury what was loaded."""
    line = chain(10).continued(C, at(B, 25), [A, B])
    assert line.holds(at(A, 10))
    assert line.holds(at(B, 25))


def test_nobody_can_have_continued_a_launch_that_is_not_older():
    assert chain(10).continued(C, at(B, 25), [D, E]).listed == (Ancestor(A, 10), Ancestor(B, 25))
    assert begun(B, [A, B, C]).listed == (Ancestor(A, NOTHING),)


def test_a_fence_is_a_line_that_knows_only_a_step():
    line = from_fence(20, C.epoch, C.nonce)
    assert line.holds(at(A, 20))
    assert line.kills(at(A, 21))
    assert line.kills(at(Launch(C.epoch, C.nonce - 1), 21))
    assert line.holds(at(C, 10**6))
    assert not line.kills(at(Launch(C.epoch, C.nonce + 1), 21))
    assert from_fence(-1, 7, 0).kills(at(Launch(6, (1 << 64) - 1), 0)), "the newest launch of the epoch before"


@pytest.mark.parametrize(
    ("base", "held", "killed"),
    [
        (at(C, 30), [at(A, 20), at(B, 20), at(C, 30)], [at(A, 21), at(C, 31)]),
        (at(A, 7), [at(A, 7), at(B, 7)], [at(A, 8), at(B, 8), at(C, 0)]),
    ],
    ids=["above the floor", "below it"],
)
def test_what_follows_a_fence_keeps_its_floor(base, held, killed):
    line = from_fence(20, C.epoch, C.nonce).continued(D, base)
    assert [one for one in held if not line.holds(one)] == []
    assert [one for one in killed if not line.kills(one)] == []


def test_the_floor_speaks_for_its_own_root_only():
    line = Line(C, A, (), Ancestor(B, NOTHING))
    assert line.cut(A) == NOTHING, "whose root is not known"
    assert line.cut(A, root=A) == NOTHING
    assert line.cut(STRANGER, root=A) == NOTHING
    assert line.cut(STRANGER, root=STRANGER) is None
    assert line.cut(STRANGER, root=Launch(0, 0)) == NOTHING
    assert line.cut(D, root=A) is None, "above it"
    assert not line.kills(at(STRANGER, 5), root=STRANGER)
    assert not line.supersedes(begun(STRANGER))
    assert line.supersedes(Line(STRANGER, A))


# --- saves without a load ---------------------------------------------------------------------------------------


def test_a_save_without_a_load_goes_on_from_all_that_lies_there():
    line = begun(C).including(None, [at(A, 5), at(A, 10), at(A, 7), at(B, 3)])
    # Also of what lies elsewhere: nodes adopt each other's lines.
    assert line == Line(C, C, (Ancestor(A, EVERYTHING), Ancestor(B, EVERYTHING)))


def test_a_save_without_a_load_revives_nothing():
    before = begun(A).continued(B, at(A, 10))
    line = begun(C).including(before, [at(A, 12), at(A, 9), at(B, 13), at(STRANGER, 4)])
    assert line.root == A
    assert line.listed == (Ancestor(A, 10), Ancestor(STRANGER, EVERYTHING), Ancestor(B, EVERYTHING))


def test_a_save_without_a_load_gives_up_nothing_that_may_lie_elsewhere():
    assert begun(C).including(begun(B), []).listed == (Ancestor(B, EVERYTHING),)
    assert begun(C).including(None, []) == begun(C)


def test_a_save_without_a_load_keeps_the_floor_of_a_fence():
    line = begun(D).including(from_fence(20, C.epoch, C.nonce), [at(A, 21), at(B, 20), at(C, 33)])
    assert line.kills(at(A, 21))
    assert line.holds(at(B, 20))
    assert line.holds(at(C, 33))


# --- what bounds it ---------------------------------------------------------------------------------------------


def many(count, step=1000):
    line = begun(Launch(1, 1))
    for number in range(1, count):
        line = line.continued(Launch(number + 1, number + 1), at(Launch(number, number), step + number))
    return line


@pytest.mark.parametrize("launches", [1, 2, KEPT, KEPT + 1])
def test_a_short_line_is_not_compacted(launches):
    line = many(launches)
    assert len(line.listed) == launches - 1
    assert line.compacted() == line


def test_the_oldest_launches_are_folded_and_abandoned():
    line = many(KEPT + 4).compacted()
    assert len(line.listed) == KEPT
    assert line.listed == many(KEPT + 4).listed[-KEPT:]
    assert line.floor == Ancestor(Launch(3, 3), NOTHING)
    assert line.kills(at(Launch(2, 2), 0), root=Launch(1, 1))


def test_launches_of_which_something_is_left_stay_listed():
    whole = many(KEPT + 10)
    line = whole.compacted({Launch(2, 2), Launch(5, 5), Launch(7000, 1)})
    assert line.listed[:2] == (whole.listed[1], whole.listed[4])
    assert line.listed[2:] == whole.listed[-KEPT:]
    assert line.floor == Ancestor(Launch(9, 9), NOTHING)
    assert line.holds(at(Launch(2, 2), 1002), root=Launch(1, 1))
    assert whole.compacted([one.launch for one in whole.listed]) == whole


def test_compacting_twice_is_compacting_once():
    line = many(60).compacted({Launch(4, 4)})
    assert line.compacted({Launch(4, 4)}) == line
    assert line.compacted().floor == Ancestor(Launch(35, 35), NOTHING), "it never sinks"


def test_a_longer_line_gives_back_what_was_folded():
    whole = many(60)
    assert whole.compacted().with_older(whole) == whole
    later = whole.compacted().continued(Launch(61, 61), at(Launch(60, 60), 1060))
    # All but the floor: what launches in between have folded, only a line of the same head knows.
    expected = whole.continued(Launch(61, 61), at(Launch(60, 60), 1060))
    assert later.with_older(whole) == replace(expected, floor=whole.compacted().floor)


def test_a_longer_line_that_was_abandoned_gives_back_nothing():
    """It names the launches, so that what they saved is known to be dead."""
    trunk = many(60)
    branch = trunk.continued(Launch(61, 7), at(Launch(60, 60), 1060))
    other = trunk.compacted().continued(Launch(62, 62), at(Launch(60, 60), 1060), [Launch(61, 7)])
    line = other.with_older(branch)
    assert line.floor == other.floor
    assert all(one.step == NOTHING for one in line.listed if order(one.launch) <= order(other.floor.launch))
    assert [one for one in line.listed if order(one.launch) > order(other.floor.launch)] == list(other.listed)


def test_a_longer_line_that_was_left_at_step_0_is_on_the_line():
    trunk = many(60)
    line = trunk.compacted().continued(Launch(61, 61), at(Launch(60, 60), 0)).with_older(trunk)
    assert line.holds(at(Launch(1, 1), 1001))


def test_lines_of_others_give_back_nothing():
    line = many(60).compacted()
    stranger = Line(Launch(10, 99), STRANGER, (Ancestor(Launch(9, 98), 5),))
    assert line.with_older(stranger) == line
    assert begun(A).with_older(many(60)) == begun(A), "it has no floor"


def test_10000_restarts_take_less_than_1_kib():
    draw = random.Random(7)
    line, last = begun(Launch(1, draw.getrandbits(64))), 0
    began = line.root
    recent: list[tuple[Launch, int]] = []  # on the line, with the newest step
    abandoned: list[Generation] = []
    longest = 0
    for epoch in range(2, 10_002):
        last += draw.randrange(1, 20)
        recent = [*recent, (line.head, last)][-8:]
        if draw.random() < 0.1:  # a rollback
            turn = draw.randrange(len(recent))
            launch, newest = recent[turn]
            base = at(launch, newest - draw.randrange(3))
            abandoned += [at(other, step) for other, step in recent[turn + 1 :]]
            abandoned += [at(launch, newest)] if newest > base.step else []
            recent = recent[:turn]
            last = base.step
        else:
            base = at(*recent[-1])
        head = Launch(epoch, draw.getrandbits(64))
        line = line.continued(head, base).compacted({launch for launch, _ in recent})
        recent = [(launch, step) for launch, step in recent if launch != launch_of(base)] + [(launch_of(base), last)]
        longest = max(longest, len(encode(line)))
        assert line.holds(base, began)
        assert all(line.holds(at(*one), began) for one in recent)
    assert longest < 1024
    assert len(abandoned) > 1000
    assert [one for one in abandoned if not line.kills(one, began)] == []
    assert line.root == began
    assert line.floor is not None
    unrelated = Launch(line.floor.launch.epoch - 5, 3)
    assert not line.kills(at(unrelated, 10), root=unrelated), "the floor speaks for its own root only"
    assert line.kills(at(unrelated, 10), root=began)


# --- several ----------------------------------------------------------------------------------------------------


LINES = [
    begun(A),
    chain(10),
    Line(B, A, (Ancestor(A, 11), Ancestor(STRANGER, NOTHING))),
    Line(B, Launch(0, 0), (), Ancestor(A, 5)),
    Line(B, A, (), Ancestor(A, 6)),
    A10_B25_C,
]


def test_the_line_in_force_has_the_newest_head():
    assert newer(None, None) is None
    assert newer(LINES[0], None) == newer(None, LINES[0]) == LINES[0]
    assert newer(begun(A), A10_B25_C) == newer(A10_B25_C, begun(A)) == A10_B25_C


@pytest.mark.parametrize("one", LINES)
@pytest.mark.parametrize("other", LINES)
def test_joining_does_not_depend_on_the_order(one, other):
    assert newer(one, other) == newer(other, one)
    for third in LINES:
        assert newer(newer(one, other), third) == newer(one, newer(other, third))


def test_nodes_that_say_different_things_of_a_launch_are_both_believed():
    one = Line(C, C, (Ancestor(A, 10), Ancestor(B, 3)))
    other = Line(C, A, (Ancestor(A, 12), Ancestor(STRANGER, 1)), Ancestor(Launch(2, 2), NOTHING))
    assert merged(one, other) == Line(
        C, A, (Ancestor(A, 12), Ancestor(STRANGER, 1), Ancestor(B, 3)), Ancestor(Launch(2, 2), NOTHING)
    )
    assert merged(one, one) == one


def test_lines_by_head_are_in_order_and_joined():
    found = by_head([A10_B25_C, chain(12), begun(A), chain(10)])
    assert list(found) == [A, B, C]
    assert found[B] == chain(12)


def test_a_person_reads_where_a_launch_went_on_from():
    assert describe(A10_B25_C) == {
        "history": name_of(C),
        "root": name_of(A),
        "from_step": 25,
        "from_launch": name_of(B),
    }
    fresh = describe(begun(B, [A]))
    assert fresh["from_step"] is fresh["from_launch"] is None
    assert describe(chain(0))["from_step"] == 0


# --- as bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [*LINES, from_fence(-1, 5, 6), from_fence(3, 4, 0), many(60).compacted(), begun(Launch(1, (1 << 64) - 1), [])],
)
def test_bytes_round_trip(line):
    assert decode(encode(line)) == line


def test_bytes_of_any_other_length_are_refused():
    data = encode(A10_B25_C)
    assert all(decode(data[:length]) is None for length in range(len(data)))
    assert decode(data + b"\0") is None
    assert decode(data + data[-24:]) is None


@pytest.mark.parametrize(
    "line",
    [
        Line(Launch(0, 0), A),
        Line(B, A, (Ancestor(B, 1),)),
        Line(B, A, (Ancestor(C, 1),)),
        Line(C, A, (Ancestor(B, 1), Ancestor(A, 1))),
        Line(C, A, (Ancestor(A, 1), Ancestor(A, 1))),
        Line(C, A, (Ancestor(A, -3),)),
        Line(C, A, (), Ancestor(A, -2)),
        Line(B, A, (), Ancestor(B, 1)),
        Line(B, A, (), Ancestor(C, 1)),
        Line(B, A, (), Ancestor(Launch(0, 0), 5)),
    ],
    ids=[
        "no head",
        "goes on from itself",
        "goes on from a later one",
        "not sorted",
        "twice",
        "step",
        "step of the floor",
        "floor at the head",
        "floor above the head",
        "step without a floor",
    ],
)
def test_bytes_that_say_what_cannot_be_are_refused(line):
    assert decode(encode(line)) is None


def test_other_versions_and_false_counts_are_refused():
    data = bytearray(encode(A10_B25_C))
    data[0] = 2
    assert decode(bytes(data)) is None
    data = bytearray(encode(A10_B25_C))
    data[-2 * 24 - 4 : -2 * 24] = struct.pack("<I", 3)
    assert decode(bytes(data)) is None


def test_more_ancestors_than_anybody_has_are_refused():
    most = begun(Launch(MAX_LISTED + 2, 0), [Launch(number + 1, 0) for number in range(MAX_LISTED)])
    assert len(encode(most)) <= MAX_ENCODED_BYTES
    assert decode(encode(most)) == most
    more = begun(Launch(MAX_LISTED + 2, 0), [Launch(number + 1, 0) for number in range(MAX_LISTED + 1)])
    assert decode(encode(more)) is None
