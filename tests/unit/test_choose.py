from __future__ import annotations

import pytest

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.load.choose import choose, explain
from flashckpt.load.inventory import encode, merge
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.types import Generation, Held, Launch, Level, Member, Session, ShardId


def whole(*generations, world=2):
    return [ShardId(g, rank, world) for g in generations for rank in range(world)]


def held(shard, content=0):
    return Holding(Held(shard, bytes([content] * 16), 4096, 0), Level.SEALED, verified=False)


def inventory(shards, line, *others):
    """What the first node holds, and what the others do."""
    lines = () if line is None else (line,)
    nodes = [[held(shard) for shard in shards], *others]
    names = [f"node{number}" for number in range(len(nodes))]
    found = [NodeInventory(n, tuple(holdings), lines, 0, (), ()) for n, holdings in zip(names, nodes, strict=True)]
    return merge(names, map(encode, found))


OLD, NEW = Generation(1, 10, 8, 3), Generation(2, 20, 5, 1)


def test_newest_step_first():
    other = Generation(1, 10, 9, 4)
    assert choose(inventory(whole(OLD, other), None), None).candidates == (other, OLD)


def test_a_line_abandons_what_lies_above_it():
    choice = choose(inventory(whole(OLD, NEW), from_fence(step=4, epoch=2, nonce=20)), None)
    assert choice.candidates == (NEW,)
    assert choice.passed_over == ((OLD, "abandoned: the job went on from step 4 of launch 000000000000000a"),)


def test_two_histories_that_know_nothing_of_each_other_are_refused_by_name():
    with pytest.raises(AmbiguousHistoryError, match=r"(?s)step 8 .*step 5") as caught:
        choose(inventory(whole(OLD, NEW), None), None)
    assert caught.value.steps == (8, 5)


def test_an_explicit_step_decides_between_them():
    assert choose(inventory(whole(OLD, NEW), None), 5).candidates == (NEW,)


def test_incomplete_ones_are_passed_over_with_the_missing_ranks():
    shards = whole(OLD)[:1]
    choice = choose(inventory(shards, None), None)
    assert choice.candidates == ()
    assert choice.passed_over == ((OLD, "no shard of ranks [1]"),)
    assert choice.missing == ((OLD, (1,)),)


def test_what_one_node_lacks_another_has():
    first, second = whole(OLD)
    assert choose(inventory([first], None, [held(second)], [held(second)]), None).candidates == (OLD,)


def test_copies_that_differ_are_no_copies():
    first, second = whole(OLD)
    choice = choose(inventory([first, second], None, [held(second, content=1)]), None)
    assert choice.candidates == ()
    assert choice.passed_over == ((OLD, "copies of the shards of ranks [1] differ"),)


def test_shards_of_two_worlds_are_refused():
    choice = choose(inventory([ShardId(OLD, 0, 2), ShardId(OLD, 1, 3)], None), None)
    assert choice.passed_over == ((OLD, "its shards disagree on the world size: [2, 3]"),)


def test_missing_shards_are_explained_by_who_had_them():
    session = Session(
        Launch(1, 10),
        2,
        (Member("alpha", "", "", (0,)), Member("beta", "", "", (1,)), Member("gamma", "", "", ())),
        1,
        "ring",
        2,
    )
    choice = choose(inventory(whole(OLD)[:1], None), None)
    ((_, reason),) = explain(choice, {Launch(1, 10): session}, ["alpha", "gamma"]).passed_over
    assert reason.startswith("no shard of ranks [1]: rank 1 ran on beta, its replicas on ")
    assert "beta not here" in reason or "beta and" in reason


def test_with_a_step_all_others_are_passed_over_with_that_reason():
    other = Generation(1, 10, 9, 4)
    choice = choose(inventory(whole(OLD, other), None), 8)
    assert choice.candidates == (OLD,)
    assert choice.passed_over == ((other, "step 8 was asked for"),)


def test_what_lacks_nothing_is_not_explained_by_who_had_it():
    """A generation of a remembered launch may be passed over for another reason than missing shards."""
    first, second = whole(OLD)
    choice = choose(inventory([first, second], None, [held(second, content=1)]), None)
    session = Session(Launch(1, 10), 2, (Member("alpha", "", "", (0, 1)),), 1, "ring", 2)
    assert explain(choice, {Launch(1, 10): session}, ["alpha"]) == choice


def test_missing_shards_of_a_launch_that_nobody_remembers_are_not_explained():
    choice = choose(inventory(whole(OLD)[:1], None), None)
    assert explain(choice, {}, ["alpha"]) == choice
