"""Launches that meet on the same agents, and trainers that wake up in another launch's time."""

from __future__ import annotations

import signal
import time

import pytest

from flashckpt.rpc.session import encode_session
from flashckpt.store.slots import SlotStore
from flashckpt.types import Launch, Member, Session
from tests.fault.agents import JOB, Refused, World, wait_until


def test_of_two_launches_at_once_the_newer_wins():
    with World(2) as world:
        older = world.launch(begin=False)
        newer = world.launch(begin=False)
        # Each took one node first.
        older.ranks[0].ask("begin")
        newer.ranks[1].ask("begin")
        with pytest.raises(Refused) as refused:
            older.ranks[1].ask("begin")
        assert refused.value.error == "FencedError"
        assert f"epoch {newer.launch.epoch} has taken over" in refused.value.message
        newer.ranks[0].ask("begin")
        newer.save(1)
        late = older.save_nowait(2, ranks=older.ranks[:1])
        assert late[0]["outcome"] == "failed"
        assert late[0]["code"] == "FC-JOB-001"
        assert f"epoch {newer.launch.epoch}" in late[0]["reason"]
        newer.save(2)
        world.check()


def test_a_launch_that_lost_leaves_no_credentials_behind():
    """What it brought along must not be what a restarted agent of the winner speaks with."""
    with World(2) as world:
        winner = world.launch()
        winner.save(1)
        loser = world.launch(epoch=winner.launch.epoch - 1, begin=False)
        for rank in loser.ranks:
            with pytest.raises(Refused, match=f"epoch {winner.launch.epoch}"):
                rank.ask("begin")
        loser.kill()
        world.kill_agent(1)
        winner.save(2)
        world.check()


@pytest.mark.parametrize("place", ["before_copy", "after_copy", "before_header", "before_preamble", "before_seal"])
def test_a_frozen_trainer_wakes_up_in_another_launch(place):
    with World(2) as world:
        older = world.launch(failpoints={1: f"{place}=stop*1@2"})
        older.save(1)
        older.send_save(2)
        zombie = older.ranks[1]
        zombie.wait_stopped()
        older.saved(older.ranks[:1])
        older.ranks[0].kill()
        newer = world.launch()
        newer.ranks[0].ask("line", step=1, base=older.generation(1))
        newer.ranks[1].ask("line", step=1, base=older.generation(1))
        newer.save(2)
        zombie.signal(signal.SIGCONT)
        late = zombie.result()
        # Beyond the last look at the line it seals; nobody takes that for a shard of the new launch.
        if place in ("before_preamble", "before_seal"):
            assert late["outcome"] == "ok"
        else:
            assert (late["outcome"], late["code"]) == ("failed", "FC-JOB-001")
            assert f"epoch {newer.launch.epoch}" in late["reason"]
        again = older.save_nowait(3, ranks=[zombie])
        assert (again[0]["outcome"], again[0]["code"]) == ("failed", "FC-JOB-001")
        with pytest.raises(Refused, match="FencedError"):
            zombie.ask("line", step=1, base=None)
        newer.save(3)
        world.check()
        wait_until(lambda: not world.paths(1, "sealed", older.generation(2), 1), "the zombie's shard to go")


def test_acks_of_a_launch_that_is_over_do_not_count():
    """Its push was under way when the next launch began: the replica that comes then is nobody's."""
    with World(2, start=False) as world:
        world.start_agent(0, "before_ack=sleep(2)*1@2")
        world.start_agent(1)
        older = world.launch()
        older.save(1)
        older.save_nowait(2)
        world.wait_fired("before_ack")
        newer = world.launch()
        for rank in newer.ranks:
            rank.ask("line", step=1, base=older.generation(1))
        ended = older.wait(2, timeout=3.0)
        assert "ok" not in [one["outcome"] for one in ended]
        assert {one["level"] for one in ended} == {"sealed"}
        newer.save(2)
        world.check()
        assert all(not world.paths(index, "sealed", older.generation(2), r) for index in (0, 1) for r in (0, 1))


def test_a_rollback_kills_what_lies_above_it_and_nothing_else():
    with World(2) as world:
        older = world.launch()
        for step in (1, 2, 3):
            older.save(step)
        older.save_nowait(4, ranks=older.ranks[:1])  # half a generation
        older.kill()
        newer = world.launch()
        for rank in newer.ranks:
            rank.ask("line", step=3, base=older.generation(3))
        wait_until(lambda: not world.paths(0, "sealed", older.generation(4), 0), "step 4 to go")
        assert world.paths(0, "sealed", older.generation(3), 0)
        world.check()
        newer.save_nowait(3, ranks=newer.ranks[:1])
        # What was loaded stays until the new launch has committed.
        assert world.paths(1, "sealed", older.generation(3), 0)
        assert world.paths(0, "sealed", older.generation(3), 0)
        newer.save(4)
        world.check()
        wait_until(lambda: not world.paths(0, "sealed", older.generation(3), 0), "the old launch's shard to go")


def test_a_rollback_below_what_is_committed():
    with World(2) as world:
        older = world.launch()
        older.save(5)
        older.exit()
        newer = world.launch()
        for rank in newer.ranks:
            rank.ask("line", step=2, base=None)
        wait_until(lambda: not world.paths(0, "sealed") and not world.paths(1, "sealed"), "step 5 to go")
        newer.save(3)
        world.check()
        assert world.paths(0, "sealed", newer.generation(3), 1)


def test_a_job_that_a_wrong_clock_has_launched_goes_on():
    """174 years ahead: its epoch stays, and later launches are above it, also with agents that were restarted. Nodes
    that have not heard of it don't begin it, because nothing tells them that it is not a wrong clock now."""
    poisoned = int(time.time() * 1000) + 174 * 366 * 86_400_000
    with World(3, start=False) as world:
        for node in world.nodes[:2]:  # as an earlier version has left them
            past = Session(Launch(poisoned - 1, 7), 1, (Member(node.name, "", "", (0,)),), 0, "ring", 2)
            with SlotStore.open(node.memory_dir, JOB) as store:
                store.write_session(encode_session(past))
        for index in range(3):
            world.start_agent(index)
        launch = world.launch(nodes=[0, 1], epoch=poisoned)
        launch.save(1)
        launch.kill()
        world.kill_agent(0)
        again = world.launch(nodes=[0, 1])
        assert again.session.launch.epoch == poisoned + 1
        for rank in again.ranks:
            rank.ask("line", step=1, base=launch.generation(1))
        again.save(2)
        world.check()
        with pytest.raises(Refused, match="epoch of a launch: expected at most") as refused:
            world.launch(nodes=[2], epoch=poisoned + 2)
        assert refused.value.error == "IncompatibleError"
        assert world.status(2)["launch"] is None
