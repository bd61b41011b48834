"""The oracle by example, and a fixed part of the campaign. For more: `make campaign`."""

from __future__ import annotations

import pytest

from tests.campaign.__main__ import run
from tests.campaign.oracle import ROOT_MARK, Facts, Oracle, next_mark
from tests.campaign.schedule import EVENTS, UNMENDED, draw


def save(oracle, parent, launch, step, level=""):
    mark = next_mark(parent, launch, step)
    generation = (launch, 1, step, 1)
    assert oracle.saved(mark, parent, step, launch, generation) == []
    oracle.went_on(mark)
    if level:
        assert oracle.promised(generation, level)
    return mark


def facts(oracle, *marks, within_budget=False, anything=True):
    return Facts(within_budget, frozenset(oracle.states[mark].generation for mark in marks), anything)


@pytest.fixture
def line():
    """Steps 1 to 3 of launch 1; 2 was promised."""
    oracle = Oracle()
    first = save(oracle, ROOT_MARK, 1, 1)
    second = save(oracle, first, 1, 2, "replicated")
    third = save(oracle, second, 1, 3)
    return oracle, first, second, third


def test_the_promised_state_or_a_newer_one_of_its_line(line):
    oracle, first, second, third = line
    there = facts(oracle, first, second, third, within_budget=True)
    assert oracle.judge(second, there) == oracle.judge(third, there) == []
    assert "expected State" in oracle.judge(first, there)[0]
    assert "nobody saved" in oracle.judge("f" * 16, there)[0]
    assert "found nothing" in oracle.judge(None, there)[0]
    assert "refused with FC-LOAD-002" in oracle.judge(None, there, code="FC-LOAD-002")[0]


def test_a_promise_that_is_gone_within_the_budget_is_a_violation_and_beyond_it_is_not(line):
    oracle, first, _, _ = line
    assert "is not whole any more" in oracle.judge(first, facts(oracle, first, within_budget=True))[0]
    assert oracle.judge(first, facts(oracle, first)) == []
    assert oracle.judge(None, facts(oracle), code="FC-LOAD-002") == []
    assert "found nothing" in oracle.judge(None, facts(oracle))[0], "never a silent fresh start"


def test_what_an_operator_went_back_behind_stays_dead(line):
    oracle, first, second, third = line
    oracle.loaded(first)
    other = save(oracle, first, 2, 2, "replicated")
    there = facts(oracle, first, second, third, other, within_budget=True)
    assert oracle.judge(other, there) == []
    for dead in (second, third):
        assert any("gone back behind" in one for one in oracle.judge(dead, there))
    assert not oracle.promised(oracle.states[third].generation, "replicated"), "too late"


def test_what_is_persisted_survives_the_cluster(line):
    oracle, first, second, _ = line
    oracle.promised(oracle.states[first].generation, "persisted")
    assert oracle.persisted.mark == first
    assert oracle.judge(first, facts(oracle)) == []
    assert "persisted" in oracle.judge(None, facts(oracle), code="FC-LOAD-002")[0]
    assert oracle.judge(second, facts(oracle)) == []


def test_a_seed_is_a_schedule():
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3) != draw(8, 3)
    drawn = {episode.event for number in range(100) for episode in draw(1, number).episodes}
    assert drawn == set(EVENTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_the_campaign():
    mended = tuple(one for one in EVENTS if one not in UNMENDED)
    report = run("ci", minutes=0.6, schedules=3, events=mended, bound=15.0)
    assert report.violations == [], report.summary()
    assert report.promises > 20, report.summary()
