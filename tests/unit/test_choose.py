from __future__ import annotations

import pytest

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.load.choose import choose
from flashckpt.load.inventory import Inventory
from flashckpt.types import Fence, Generation, ShardId


def whole(*generations, world=2):
    return {ShardId(g, rank, world): 0 for g in generations for rank in range(world)}


OLD, NEW = Generation(1, 10, 8, 3), Generation(2, 20, 5, 1)


def test_newest_step_first():
    other = Generation(1, 10, 9, 4)
    assert choose(Inventory(whole(OLD, other), None), None).candidates == (other, OLD)


def test_a_fence_buries_what_lies_above_it():
    choice = choose(Inventory(whole(OLD, NEW), Fence(step=4, epoch=2, nonce=20)), None)
    assert choice.candidates == (NEW,)
    assert choice.passed_over == ((OLD, "fenced: step 4 was loaded at epoch 2"),)


def test_two_histories_without_a_fence_are_refused_by_name():
    with pytest.raises(AmbiguousHistoryError, match=r"step 8 .* step 5") as caught:
        choose(Inventory(whole(OLD, NEW), None), None)
    assert caught.value.steps == (8, 5)


def test_an_explicit_step_decides_between_them():
    assert choose(Inventory(whole(OLD, NEW), None), 5).candidates == (NEW,)


def test_incomplete_ones_are_passed_over_with_the_missing_ranks():
    tags = whole(OLD)
    del tags[ShardId(OLD, 1, 2)]
    choice = choose(Inventory(tags, None), None)
    assert choice.candidates == ()
    assert choice.passed_over == ((OLD, "no shard of ranks [1]"),)
