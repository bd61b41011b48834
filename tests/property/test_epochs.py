"""A launch's epoch: above all that were seen, and never far ahead because of one wrong clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import ConfigError
from flashckpt.launch import LAST_EPOCH, LATEST_CLOCK_MS, MAX_CLOCK_DIFFERENCE_MS, agree_epoch

NOW = 1_800_000_000_000
YEAR = 366 * 86_400_000
HOUR = 3_600_000

clocks = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(NOW - 11 * HOUR, NOW + 11 * HOUR), min_size=1, max_size=6
)


@given(st.integers(0, LAST_EPOCH - 1), clocks)
def test_it_is_above_all_that_was_seen_and_at_a_clock_else(highest, found):
    epoch = agree_epoch(highest, found)
    assert epoch > highest
    assert epoch == highest + 1 or epoch in found.values()
    assert epoch >= min(found.values())


@given(clocks, st.integers(MAX_CLOCK_DIFFERENCE_MS, 500 * YEAR), st.booleans())
def test_a_wrong_clock_is_named_and_leaves_no_epoch(found, by, ahead):
    wrong = NOW + 12 * HOUR + by if ahead else max(0, NOW - 12 * HOUR - by)
    with pytest.raises(ConfigError, match="'wrong'") as refused:
        agree_epoch(0, {**found, "wrong": wrong})
    assert "wrong" in refused.value.nodes
    if len(found) > 1:
        assert refused.value.nodes == ("wrong",)
    assert "set the clock" in refused.value.hint


def test_a_node_alone_174_years_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"before 2100-01-01 .* found 2201-.* on node 'a'"):
        agree_epoch(0, {"a": NOW + 174 * YEAR})


def test_a_clock_that_is_behind_everywhere_is_taken():
    assert agree_epoch(0, {"a": 5, "b": 7}) == 5
    assert agree_epoch(NOW, {"a": 5}) == NOW + 1


def test_an_epoch_that_a_wrong_clock_has_left_goes_on():
    poisoned = NOW + 174 * YEAR
    assert agree_epoch(poisoned, {"a": NOW, "b": NOW}) == poisoned + 1
    assert poisoned > LATEST_CLOCK_MS


def test_the_last_epoch():
    assert agree_epoch(LAST_EPOCH - 1, {"a": NOW}) == LAST_EPOCH
    with pytest.raises(ConfigError, match="no launch could be above it"):
        agree_epoch(LAST_EPOCH, {"a": NOW})
