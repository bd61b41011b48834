"""Saves that come quicker than they can be replicated: what happens is said, and nobody waits for ever."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.fault.agents import MIB, World, wait_until


def test_skip_names_who_is_missing_and_frees_the_others():
    with World(3) as world:
        launch = world.launch(on_busy="skip")
        launch.save(1)
        gone = launch.buddy(0)
        world.stop_agent(gone)
        first, (other,) = launch.ranks[0], [rank for rank in launch.ranks[1:] if rank.node != gone]
        assert launch.save_nowait(2, ranks=[first])[0]["outcome"] == "ok"
        (skipped,) = launch.save_nowait(3, ranks=[first])
        assert (skipped["outcome"], skipped["code"]) == ("skipped", "FC-MEM-002")
        assert f"step 2 is not on node{gone}" in skipped["reason"]
        assert skipped["seconds"] < 2
        # Another rank does get a slot for it; what it writes there is of no use any more.
        assert launch.save_nowait(3, ranks=[other])[0]["outcome"] == "ok"
        (third,) = launch.wait(3, ranks=[other])
        assert third["outcome"] == "failed"
        assert "gave it up" in third["reason"]
        world.signal_agent(gone, signal.SIGCONT)
        wait_until(lambda: not world.paths(other.node, "sealed", launch.generation(3), other.number), "step 3 to go")
        steps = itertools.count(4)  # skipped until the push to the node that is back was tried again
        wait_until(lambda: launch.save_nowait(next(steps), ranks=[first])[0]["outcome"] == "ok", "a slot")
        step = next(steps) - 1
        assert {one["outcome"] for one in launch.save_nowait(step, ranks=launch.ranks[1:])} == {"ok"}
        assert {one["outcome"] for one in launch.wait(step)} == {"ok"}
        world.check()


def test_wait_gives_up_at_its_deadline_and_names_who_is_missing():
    with World(2) as world:
        launch = world.launch(on_busy="wait", save_timeout=1.0)
        launch.save(1)
        world.stop_agent(1)
        first = launch.ranks[:1]
        assert launch.save_nowait(2, ranks=first)[0]["outcome"] == "ok"
        (busy,) = launch.save_nowait(3, ranks=first)
        assert (busy["outcome"], busy["code"]) == ("failed", "FC-MEM-002")
        assert "step 2 is not on node1" in busy["reason"]
        assert 0.9 < busy["seconds"] < 4
        world.signal_agent(1, signal.SIGCONT)
        launch.save_nowait(2, ranks=launch.ranks[1:])
        assert {one["outcome"] for one in launch.wait(2)} == {"ok"}
        launch.save(4)
        world.check()


def test_wait_goes_on_as_soon_as_the_previous_one_is_replicated():
    with World(2, size_bytes=2 * MIB, replicate_max_mbps=48.0) as world:
        launch = world.launch(on_busy="wait")
        seconds = []
        for step in range(1, 6):
            saved = launch.save_nowait(step)
            assert {one["outcome"] for one in saved} == {"ok"}, saved
            seconds.append(max(one["seconds"] for one in saved))
        # A push takes 0.35 s; from the third save on, each waits for one.
        assert max(seconds[2:]) > 0.2
        assert {one["outcome"] for one in launch.wait(5)} == {"ok"}
        world.check()


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_generation_that_one_rank_gives_up_does_not_hold_the_others(on_busy):
    with World(2, ranks=[1, 2], start=False) as world:
        world.start_agent(0)
        world.start_agent(1)
        launch = world.launch(on_busy=on_busy, failpoints={2: "before_seal=error(EIO)*1@2"})
        launch.save(1)
        saved = launch.save_nowait(2)
        assert [one["outcome"] for one in saved] == ["ok", "ok", "failed"]
        others = launch.wait(2, ranks=launch.ranks[:2])
        assert [one["outcome"] for one in others] == ["failed", "failed"]
        assert all("gave it up" in one["reason"] for one in others)
        wait_until(
            lambda: not any(world.paths(i, "sealed", launch.generation(2), r) for i in (0, 1) for r in (0, 1, 2)),
            "step 2 to be dropped everywhere",
        )
        for step in (3, 4, 5):
            launch.save(step)
        world.check()
