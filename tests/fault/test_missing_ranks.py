"""Ranks that do not call what the others call: named within seconds, waited for a few times, and said at the end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flashckpt.agent.start import stop_agent
from flashckpt.errors import FlashError


def saves(job, rank):
    """Step → outcome, seconds, reason."""
    said = job.said("saved")[rank]
    return {int(words[0]): (words[1], float(words[2]), " ".join(words[3:])) for words in said}


@pytest.mark.slow
def test_a_save_on_rank_0_only_is_named_and_its_end_is_loud(nursery, memory_dir):
    job = nursery.run(2, task="only_some_save", memory_dir=memory_dir, agent="off", savers=[0])
    assert job.codes == [0, 0], job.outputs
    found = saves(job, 0)
    assert {outcome for outcome, *_ in found.values()} == {"failed"}
    assert "save() waits, at most 6 s: rank 1 has not called save()" in job.outputs[0]
    for step in (1, 2):
        assert "rank 1 has not called save()" in found[step][2]
        assert 5 < found[step][1] < 9
    for step in (3, 4, 5, 6):
        assert "did not wait for rank 1" in found[step][2]
        assert found[step][1] < 1
    assert "NO CHECKPOINT WAS SAVED: 6 of 6 saves failed" in job.outputs[0]
    assert "rank 1 of 2: rank 1 has not called save()" in job.outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["off", "auto"])
def test_a_rank_that_stops_saving_is_waited_for_twice_and_saves_go_on_when_it_is_back(agent, nursery, memory_dir):
    job = nursery.run(
        2, task="only_some_save", memory_dir=memory_dir, agent=agent, savers=[0], first=3, again=10, last=13
    )
    assert job.codes == [0, 0], job.outputs
    found = saves(job, 0)
    assert [step for step in found if found[step][0] != "ok" and step >= 11] == [], job.outputs
    waited = [step for step, (_, seconds, _) in found.items() if seconds > 3]
    assert len(waited) == 2
    assert all("rank 1 has not called save() since step 2" in found[step][2] for step in waited)
    assert "s for memory: " in job.outputs[0]
    assert [said[0] for said in job.said("loaded")] == [["13"]] * 2


def test_ranks_that_save_different_steps_hear_it_at_the_first_save(nursery, memory_dir):
    job = nursery.run(2, task="different_steps", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    for rank in (0, 1):
        assert "save(step 1) on rank 0, save(step 11) on rank 1" in saves(job, rank)[1][2]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "when"), [(1, 1), (2, 3)])
def test_a_rank_that_was_killed_is_named_within_seconds_and_not_waited_for(nodes, when, nursery, memory_dir):
    """Before the first save, which is collective; and later, where saves wait for slots and then a load for all."""
    for node in range(nodes):
        Path(memory_dir, str(node)).mkdir(mode=0o700)
    try:
        job = nursery.run(2, task="one_ends", memory_dir=memory_dir, nodes=nodes, when=when, spares=True)
    finally:
        for node in range(nodes):
            with contextlib.suppress(FlashError):
                stop_agent(f"{memory_dir}/{node}", "ends", 5.0, kill=True)
    assert job.codes == [0, -9], job.outputs
    named = f"rank 1 ended (signal 9) on node{1 % nodes}"
    found = saves(job, 0)
    failed = [step for step in found if found[step][0] != "ok"]
    assert max(seconds for _, seconds, _ in found.values()) < 15
    assert failed[0] >= when
    assert named in found[failed[0]][2], found
    seconds, *words = job.said("load")[0][0]
    assert float(seconds) < 15
    assert named in " ".join(words)
