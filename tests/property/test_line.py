"""Lines of random trees of launches, compared with a dict of what each head went on from, kept beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flashckpt.protocol.line import NOTHING, Ancestor, Line, begun, by_head, decode, encode, merged, newer, order
from flashckpt.types import Generation, Launch

MOST = 5  # launches that a compacted line lists here
STEPS = range(9)


def at(launch, step):
    return Generation(launch.epoch, launch.nonce, step, 1)


@dataclass
class Tree:
    """Launches in order of time, each with its line and with what is right by hand."""

    lines: dict[Launch, Line] = field(default_factory=dict)
    alive: dict[Launch, set[tuple[Launch, int]]] = field(default_factory=dict)
    """head → the generations of older launches that it goes on from."""
    known: dict[Launch, set[Launch]] = field(default_factory=dict)
    """head → the launches that it or one it went on from knew of."""
    roots: dict[Launch, Launch] = field(default_factory=dict)

    def begin(self, head):
        self.lines[head], self.alive[head], self.known[head] = begun(head), set(), set()
        self.roots[head] = head

    def go_on(self, head, reader, parent, step, given_up=()):
        """`head` reads by the line of `reader`, and loads `step` of `parent`, which is on it."""
        self.alive[head] = self.alive[parent] | {(parent, other) for other in STEPS if other <= step}
        self.known[head] = self.known[reader] | {reader} | set(given_up)
        self.lines[head] = self.lines[reader].continued(head, at(parent, step), given_up)
        self.roots[head] = self.roots[reader]

    def on_line(self, head):
        """What a load by this head's line may choose."""
        older = sorted(self.alive[head], key=lambda one: (*order(one[0]), one[1]))
        return [*older, *((head, step) for step in STEPS)]


@st.composite
def trees(draw, most=14):
    """Launches that load what some earlier one would, from random steps; some begin anew or give others up."""
    tree = Tree()
    launches = [Launch(number + 1, draw(st.integers(0, 3))) for number in range(draw(st.integers(1, most)))]
    for number, head in enumerate(launches):
        before = launches[:number]
        if not before or draw(st.integers(0, 9)) == 0:
            tree.begin(head)
            continue
        reader = draw(st.sampled_from(before[-3:] if draw(st.booleans()) else before))
        parent, step = draw(st.sampled_from(tree.on_line(reader)))
        strangers = [one for one in before if one != reader and one not in tree.known[reader]]
        given_up = draw(st.sets(st.sampled_from(strangers))) if strangers and draw(st.booleans()) else ()
        tree.go_on(head, reader, parent, step, given_up)
    return tree


@given(trees())
def test_what_is_held_killed_and_unknown(tree):
    for head, line in tree.lines.items():
        assert line.root == tree.roots[head]
        for launch in tree.lines:
            for step in STEPS:
                generation = at(launch, step)
                held = launch == head or (launch, step) in tree.alive[head]
                known = launch == head or launch in tree.known[head]
                assert line.holds(generation) == held
                assert line.kills(generation) == (known and not held)
                assert bool(line.why_killed(generation)) == line.kills(generation)
                assert (line.cut(launch) is None) == (not known)
            assert line.supersedes(tree.lines[launch]) == (launch in tree.known[head])


@given(trees(), st.data())
def test_compacting_never_revives(tree, data):
    """What a compacted line holds, or does not know, the full one held or did not know; what is present, and of the
    same root, has the same fate in both."""
    for head, line in tree.lines.items():
        present = data.draw(st.sets(st.sampled_from(sorted(tree.lines, key=order)))) if data.draw(st.booleans()) else ()
        small = line.compacted(present, MOST)
        assert len(small.listed) <= MOST + len(present)
        for launch in tree.lines:
            for step in STEPS:
                generation, root = at(launch, step), tree.roots[launch]
                if line.kills(generation, root):
                    # Unless it was given up, and is of another root: then it is a stranger again.
                    assert not small.holds(generation, root)
                    assert small.kills(generation, root) or root != line.root
                if small.holds(generation, root):
                    assert line.holds(generation, root)
                if launch in present or launch == head:
                    assert small.holds(generation, root) == line.holds(generation, root)
                    if launch in tree.known[head]:
                        assert small.kills(generation, root) == line.kills(generation, root)
        for launch, root in tree.roots.items():
            if root != line.root and launch not in tree.known[head] and launch not in present:
                assert small.cut(launch, root) is None, "an unrelated history is never older than the floor"


@given(trees(most=20))
def test_lines_that_are_compacted_at_every_launch_revive_nothing(tree):
    """Each launch reads the compacted line of the one before. Nothing is left of what was folded."""
    head = max(tree.lines, key=order)
    small, trunk = begun(tree.roots[head]), [tree.roots[head]]
    ancestors = [one for one in tree.lines if one in tree.known[head] and tree.roots[one] == tree.roots[head]]
    for one in [*sorted(ancestors, key=order), head]:
        if one == trunk[-1]:
            continue
        parent = trunk[-1]
        small = small.continued(one, at(parent, 5)).compacted((), MOST)
        trunk.append(one)
        held = dict.fromkeys(trunk[:-1][-MOST:], 5)
        for launch in trunk[:-1]:
            assert small.cut(launch, tree.roots[head]) == held.get(launch, NOTHING)


@given(trees(), st.data())
def test_what_disk_remembers_comes_back_and_nothing_else(tree, data):
    """A compacted line completed by the full one of its own head, or of one that it went on from."""
    for line in tree.lines.values():
        small = line.compacted((), MOST)
        assert small.with_older(line) == line
        other = data.draw(st.sampled_from(sorted(tree.lines, key=order)))
        completed = small.with_older(tree.lines[other])
        for launch in tree.lines:
            for step in STEPS:
                generation, root = at(launch, step), tree.roots[launch]
                if completed.holds(generation, root):
                    assert line.holds(generation, root)


@given(trees())
def test_bytes_round_trip(tree):
    for line in tree.lines.values():
        for one in (line, line.compacted((), MOST), line.compacted((), 0)):
            assert decode(encode(one)) == one


@given(st.binary(max_size=200))
def test_bytes_that_are_decoded_are_encoded_the_same(data):
    line = decode(data)
    assert line is None or encode(line) == data


@given(trees(most=5), st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_makes_another_line_or_none(tree, position, byte):
    data = bytearray(encode(next(reversed(tree.lines.values()))))
    data[position % len(data)] = byte
    line = decode(bytes(data))
    assert line is None or encode(line) == bytes(data)


@st.composite
def told(draw):
    """What several nodes say of one launch."""
    head = Launch(10, 0)
    launches = st.builds(Launch, st.integers(1, 9), st.just(0))
    listed = st.dictionaries(launches, st.integers(NOTHING, 9), max_size=4)
    lines = []
    for _ in range(3):
        steps = draw(listed)
        ancestors = tuple(Ancestor(one, steps[one]) for one in sorted(steps, key=order))
        floor = draw(st.none() | st.builds(Ancestor, launches, st.integers(NOTHING, 9)))
        lines.append(Line(head, draw(st.sampled_from([Launch(0, 0), Launch(1, 0), head])), ancestors, floor))
    return lines


@given(told())
def test_what_nodes_say_is_joined_alike_in_any_order(lines):
    one, other, third = lines
    assert merged(one, one) == one
    assert newer(one, other) == newer(other, one)
    assert newer(newer(one, other), third) == newer(one, newer(other, third))
    (joined,) = by_head(lines).values()
    assert joined == by_head(reversed(lines))[one.head]
    for line in lines:
        for ancestor in line.listed:
            assert joined.holds(at(ancestor.launch, ancestor.step)) or ancestor.step == NOTHING


@given(trees(), st.lists(st.tuples(st.integers(0, 13), st.sampled_from(STEPS)), max_size=8))
def test_a_save_without_a_load_holds_what_was_there_and_revives_nothing(tree, picked):
    older = next(reversed(tree.lines.values()))
    launches = list(tree.lines)
    present = [at(launches[number % len(launches)], step) for number, step in picked]
    head = Launch(1000, 1)
    line = begun(head).including(older, present)
    for generation in present:
        assert line.kills(generation) == older.kills(generation)
    for launch in launches:
        for step in STEPS:
            if older.kills(at(launch, step)) and all((one.epoch, one.nonce) != order(launch) for one in present):
                assert line.kills(at(launch, step))
