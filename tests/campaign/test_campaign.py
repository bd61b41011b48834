"""The oracle by example, and a fixed part of the campaign. For more: `make campaign`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.campaign.__main__ import run
from tests.campaign.nursery import Nursery
from tests.campaign.oracle import ROOT_MARK, Facts, Oracle, next_mark
from tests.campaign.runner import Report, World
from tests.campaign.schedule import EVENTS, Episode, Schedule, draw

# Of the part that runs with all other tests: what is about histories.
SCHEDULED = (
    ("rollback_without", "stray_saves"),
    ("kill_trainers", "lose_node", "split"),
    ("evaluate", "wrong_nodes", "stray"),
)


def save(oracle, parent, launch, step, level=""):
    mark = next_mark(parent, launch, step)
    generation = (launch, launch, step, 1)
    assert oracle.saved(mark, parent, step, launch, generation) == []
    if level:
        assert oracle.promised(generation, level)
    return mark


def name(launch):
    return f"{launch:016x}"


def facts(oracle, *marks, within_budget=False, anything=True, known=()):
    complete = frozenset(oracle.states[mark].generation for mark in marks)
    return Facts(within_budget, complete, anything, frozenset(map(name, known)))


def go_on(oracle, mark, launch, known, *marks, **how):
    """A launch that loads a state, on nodes that know of these launches and have these states."""
    oracle.named(launch, name(launch))
    oracle.loaded(mark, launch, facts(oracle, *marks, known=known), **how)


@pytest.fixture
def line():
    """Steps 1 to 3 of launch 1; 2 was promised."""
    oracle = Oracle()
    oracle.loaded(None, 1)
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
    go_on(oracle, first, 2, [1], first, second, third)
    other = save(oracle, first, 2, 2, "replicated")
    there = facts(oracle, first, second, third, other, within_budget=True)
    assert oracle.judge(other, there) == []
    for dead in (second, third):
        assert any("gone back behind" in one for one in oracle.judge(dead, there))
    assert not oracle.promised(oracle.states[third].generation, "replicated"), "too late"


def test_what_was_abandoned_stays_so_after_the_next_launch(line):
    oracle, first, second, third = line
    oracle.promised(oracle.states[first].generation, "persisted")
    oracle.promised(oracle.states[third].generation, "persisted")
    go_on(oracle, first, 2, [1], first, second, third, chosen=True)
    other = save(oracle, first, 2, 2, "persisted")
    newest = save(oracle, other, 2, 3, "replicated")
    go_on(oracle, newest, 3, [1, 2], newest, third)
    on_disk = facts(oracle, first, third, other)
    assert oracle.judge(other, on_disk) == []
    assert any("gone back behind" in one for one in oracle.judge(third, on_disk))
    assert any("is persisted" in one for one in oracle.judge(None, on_disk, code="FC-LOAD-002"))


def test_a_stray_that_saves_nothing_changes_nothing(line):
    oracle, _, second, third = line
    oracle.loaded(None, 2, facts(oracle, anything=False), stray=True)
    there = facts(oracle, second, third, known=[1])
    assert oracle.judge(third, there) == []
    assert any("there is one history" in one for one in oracle.judge(None, there, code="FC-LOAD-003"))


def test_two_histories_have_to_be_refused_until_one_is_chosen(line):
    oracle, _, second, third = line
    oracle.loaded(None, 2, facts(oracle, anything=False), stray=True)
    stray = save(oracle, ROOT_MARK, 2, 1)
    both = facts(oracle, third, stray, known=[1, 2])
    assert oracle.judge(None, both, code="FC-LOAD-003", names=[name(1), name(2)]) == []
    assert "and not the history" in oracle.judge(None, both, code="FC-LOAD-003", names=[name(1)])[0]
    assert "of which nothing is there" in oracle.judge(None, both, code="FC-LOAD-003", names=[name(1), name(2), "x"])[0]
    assert "2 histories are there" in oracle.judge(third, both)[0]
    assert oracle.judge(third, facts(oracle, third, known=[1])) == [], "the stray's node is away"
    main, other = oracle.visible(both.complete)
    assert oracle.judge(third, both, history=main) == oracle.judge(stray, both, history=other) == []
    assert oracle.judge(third, both, history=other)
    go_on(oracle, stray, 3, [1, 2], third, stray, chosen=True)
    assert oracle.judge(stray, both) == []
    for dead in (second, third):
        assert any("gone back behind" in one for one in oracle.judge(dead, facts(oracle, second, third, stray)))


def test_launches_that_have_not_heard_of_each_other_make_two_histories(line):
    oracle, _, second, _ = line
    go_on(oracle, second, 2, [1], second)
    one = save(oracle, second, 2, 3)
    go_on(oracle, second, 3, [1], second)
    other = save(oracle, second, 3, 3)
    both = facts(oracle, second, one, other, known=[1, 2, 3])
    assert oracle.judge(None, both, code="FC-LOAD-003", names=[name(2), name(3)]) == []
    assert "2 histories" in oracle.judge(other, both)[0]
    assert oracle.judge(one, facts(oracle, second, one)) == [], "where only one of them is"
    go_on(oracle, other, 4, [1, 2, 3], one, other, chosen=True)
    assert any("gone back behind" in problem for problem in oracle.judge(one, both))


def test_a_launch_that_knew_of_another_leaves_it_behind(line):
    oracle, _, second, _ = line
    go_on(oracle, second, 2, [1], second)
    one = save(oracle, second, 2, 3)
    go_on(oracle, second, 3, [1, 2], second)
    other = save(oracle, second, 3, 3)
    assert oracle.judge(other, facts(oracle, second, one, other, known=[1, 2, 3])) == []


def test_who_begins_again_on_purpose_gives_up_what_is_known(line):
    oracle, _, second, third = line
    oracle.started_fresh(2, facts(oracle, third, known=[1]))
    new = save(oracle, ROOT_MARK, 2, 1, "replicated")
    there = facts(oracle, second, third, new, known=[1, 2])
    assert oracle.judge(new, there) == []
    assert any("gone back behind" in one for one in oracle.judge(third, there))


def test_what_is_persisted_survives_the_cluster(line):
    oracle, first, second, _ = line
    oracle.promised(oracle.states[first].generation, "persisted")
    assert oracle.persisted.mark == first
    assert oracle.judge(first, facts(oracle)) == []
    assert "is persisted" in oracle.judge(None, facts(oracle, first), code="FC-LOAD-002")[0]
    gone = replace(facts(oracle), on_disk=frozenset())
    assert "not whole on disk" in oracle.judge(None, gone, code="FC-LOAD-002")[0]
    assert oracle.judge(second, facts(oracle)) == []


def test_a_seed_is_a_schedule():
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3) != draw(8, 3)
    drawn = {episode.event for number in range(100) for episode in draw(1, number).episodes}
    assert drawn == set(EVENTS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("events", SCHEDULED, ids="-".join)
def test_a_part_of_the_campaign(events):
    report = Report("ci")
    episodes = tuple(
        Episode((0, 1, 2), 1, 1, 0.3, event, (1, 2, 0), 0.3, 0.25 + 0.1 * number) for number, event in enumerate(events)
    )
    nursery = Nursery()
    try:
        with World(Schedule(0, 3, persist=False, episodes=episodes), report, nursery, "loopback", 15.0) as world:
            world.run()
    finally:
        nursery.close()
    assert report.violations == [], report.summary()
    assert report.promises > 5, report.summary()
    assert report.choices == sum(event in ("stray_saves", "split") for event in events), report.summary()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_schedules():
    report = run("ci", minutes=0.5, schedules=2, bound=15.0)
    assert report.violations == [], report.summary()
    assert report.promises > 10, report.summary()
