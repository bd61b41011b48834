"""SIGKILL of an agent or a trainer at every step of the data path: nothing promised is lost, and the job goes on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from flashckpt.testing import processes
from tests.fault.agents import PATIENCE, World, wait_until

# What lies on the way of a shard, in its order. `@2`: when the second generation comes by, so that the first one is
# committed and has to survive.
OWNER = [
    "before_begin",
    "before_session",
    "after_session",
    "before_slot@2",
    "before_grant@2",
    "after_grant@2",
    "after_slot@2",
    "before_adopt@2",
    "after_adopt@2",
    "before_push@2",
    "mid_push@3",
    "after_push@2",
    "after_tell@4",
]
RECEIVER = [
    "before_put_open@2",
    "after_put_open@2",
    "mid_put@2",
    "before_replica_seal@2",
    "after_replica_seal@2",
    "before_ack@2",
    "after_ack@2",
]
COORDINATOR = ["before_tell_taken@4", "before_record@2", "mid_record@2", "after_record@2"]
COLLECTOR = ["before_gc", "before_gc@2", "before_release", "mid_release", "after_zero_released", "after_release@2"]
CASES = [(1, name) for name in (*OWNER, *RECEIVER, "before_record@2", "after_record@2", *COLLECTOR)]
CASES += [(0, name) for name in ("before_push@2", "mid_put@2", "before_ack@2", *COORDINATOR, *COLLECTOR[:2])]


def armed(place):
    name, _, first = place.partition("@")
    return name, f"{name}=kill*1@{first or 1}"


@pytest.mark.parametrize(("node", "place"), CASES)
def test_an_agent_dies_and_its_trainers_bring_it_back(node, place):
    name, spec = armed(place)
    with World(2, start=False) as world:
        first = [world.start_agent(index, spec if index == node else "") for index in (0, 1)]
        launch = world.launch()
        for step in (1, 2, 3):
            launch.save(step)
        assert world.fired(name) == [first[node]]
        assert world.agent_pid(node) not in (first[node], None)
        assert world.agent_pid(1 - node) == first[1 - node]
        world.check()


@pytest.mark.parametrize("place", ["mid_adopt", "mid_start"])
def test_an_agent_dies_again_while_it_comes_back(place):
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        launch.save_nowait(2)
        launch.ranks[1].ask("environ", FLASHCKPT_AGENT_FAILPOINTS=f"{place}=kill")
        world.kill_agent(1)
        dead = world.wait_fired(place, times=2)
        launch.ranks[1].ask("environ", FLASHCKPT_AGENT_FAILPOINTS="")
        assert len(set(dead)) == len(dead)
        assert [one["outcome"] for one in launch.wait(2)] == ["ok", "ok"]
        launch.save(3)
        world.check()


def test_both_agents_die_at_once():
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        launch.save_nowait(2)
        for index in (0, 1):
            world.kill_agent(index)
        assert [one["outcome"] for one in launch.wait(2)] == ["ok", "ok"]
        launch.save(3)
        world.check()


def test_agents_die_again_and_again():
    with World(3, ranks=[2, 1, 1], replicas=2) as world:
        launch = world.launch()
        for step in range(1, 7):
            launch.save_nowait(step)
            if step % 2:
                world.kill_agent(step // 2 % 3)
            assert {one["outcome"] for one in launch.wait(step)} == {"ok"}
        world.check()


def test_an_operator_brings_an_agent_back_when_the_trainers_are_gone():
    """What was sealed is replicated and committed without any of them."""
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        world.stop_agent(0)  # so that nothing of step 2 gets anywhere
        launch.save_nowait(2, ranks=launch.ranks[1:])
        launch.send_save(2, ranks=launch.ranks[:1])
        world.signal_agent(0, signal.SIGCONT)
        launch.saved(launch.ranks[:1])
        launch.kill()
        world.kill_agent(1)
        world.start_agent(1)
        wait_until(lambda: committed(world, 0) == 2 and committed(world, 1) == 2, "step 2 to be committed")
        world.check()


BEFORE_SEAL = ["before_copy", "after_copy", "before_header", "before_preamble", "before_seal", "before_rename_sealed"]


def slot_ids(paths):
    return {re.search(r"(?:^|\.)s([0-9a-f]{16})\.", path.name)[1] for path in paths}


@pytest.mark.parametrize("place", ["after_attach", *BEFORE_SEAL])
def test_a_trainer_dies_before_it_has_sealed(place):
    with World(2) as world:
        launch = world.launch(failpoints={1: f"{place}=kill*1@2"})
        launch.save(1)
        launch.send_save(2)
        launch.ranks[1].wait_gone()
        assert world.fired(place) == [launch.ranks[1].pid]
        launch.saved(launch.ranks[:1])
        (other,) = launch.wait(2, ranks=launch.ranks[:1])
        assert other["outcome"] == "failed"
        assert "gave it up" in other["reason"] or "rank 1" in other["reason"]
        # What it held is taken back, and the next launch gets it.
        wait_until(lambda: not world.paths(1, "writing"), "the dead trainer's slot to be taken back")
        world.check()
        free = slot_ids(world.paths(1, "pool"))
        launch.ranks[0].kill()
        again = world.launch()
        for rank in again.ranks:
            rank.ask("line", step=1, base=launch.generation(1))
        again.save(2)
        assert free & slot_ids(world.paths(1, "sealed"))
        world.check()


@pytest.mark.parametrize("place", ["after_rename_sealed", "after_seal"])
def test_a_trainer_dies_after_it_has_sealed(place):
    """The agent finds the shard by itself, and the generation is committed."""
    with World(2) as world:
        launch = world.launch(failpoints={1: f"{place}=kill*1@2"})
        launch.save(1)
        launch.send_save(2)
        launch.ranks[1].wait_gone()
        launch.saved(launch.ranks[:1])
        (other,) = launch.wait(2, ranks=launch.ranks[:1])
        assert other["outcome"] == "ok", other
        world.check()


def test_an_agent_dies_while_a_trainer_copies():
    with World(2) as world:
        launch = world.launch(failpoints={1: "after_copy=stop*1@2"})
        launch.save(1)
        launch.send_save(2)
        launch.ranks[1].wait_stopped()
        world.kill_agent(1)
        world.start_agent(1)
        assert len(world.paths(1, "writing")) == 1  # alive, and so left alone
        launch.ranks[1].signal(signal.SIGCONT)
        assert [one["outcome"] for one in launch.saved()] == ["ok", "ok"]
        assert [one["outcome"] for one in launch.wait(2)] == ["ok", "ok"]
        launch.save(3)
        world.check()


def test_an_agent_and_its_trainer_die_together():
    with World(2) as world:
        launch = world.launch(failpoints={1: "after_copy=stop*1@2"})
        launch.save(1)
        launch.send_save(2)
        launch.ranks[1].wait_stopped()
        launch.saved(launch.ranks[:1])
        world.kill_agent(1)
        launch.kill()
        world.start_agent(1)
        assert world.paths(1, "writing") == []
        again = world.launch()
        for rank in again.ranks:
            rank.ask("line", step=1, base=launch.generation(1))
        again.save(2)
        world.check()


def committed(world, index):
    """The newest step that the node's agent knows to be committed."""
    status = world.status(index)
    steps = [one["step"] for one in status["generations"] if one["committed_at"]] if status else []
    return max(steps, default=None)


@pytest.mark.parametrize("place", ["before_line", "mid_line", "after_line"])
def test_an_agent_dies_while_a_launch_puts_its_line(place):
    """Its own second one: the first save of the older launch put one, too."""
    with World(2, start=False) as world:
        first = [world.start_agent(0), world.start_agent(1, f"{place}=kill*1@2")]
        older = world.launch()
        older.save(1)
        older.save(2)
        older.kill()
        newer = world.launch()
        for rank in newer.ranks:
            rank.ask("line", step=2, base=older.generation(2))
        assert world.fired(place) == [first[1]]
        newer.save(3)
        world.check()


@pytest.mark.parametrize("place", ["before_quarantine", "after_quarantine", "before_put_open@3", "before_ack@3"])
def test_an_agent_dies_while_it_repairs(place):
    """Its successor does not know what the first one had found; the promise is kept all the same."""
    name, spec = armed(place)
    with World(2, start=False, scrub_interval=0.2) as world:
        world.start_agent(0)
        pid = world.start_agent(1, spec)
        launch = world.launch()
        launch.save(1)
        launch.save(2)
        world.flip(1, launch.generation(2), 0)
        assert world.wait_fired(name) == [pid]
        world.wait_agent_gone(1, pid)
        wait_until(lambda: world.paths(1, "quarantine"), "the bad copy to be set aside")
        world.check()
        launch.save(3)
        world.check()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_agent_comes_back_at_another_port(victim):
    """Those that push to it hear of it, also where it has nothing to tell them."""
    with World(3) as world:
        launch = world.launch()
        launch.save(1)
        address = world.status(victim)["address"]
        host, _, port = address.rpartition(":")
        launch.ranks[victim].stop()  # its watchdog, until the port is taken
        world.kill_agent(victim)
        with socket.create_server((host, int(port))):
            world.start_agent(victim)
        launch.ranks[victim].signal(signal.SIGCONT)
        assert world.status(victim)["address"] != address
        launch.save(2)
        world.check()


def test_an_agent_dies_before_it_hears_that_a_generation_was_given_up():
    with World(2, start=False) as world:
        world.start_agent(0)
        pid = world.start_agent(1, "before_give_up=kill*1")
        launch = world.launch(failpoints={1: "before_seal=error(EIO)*1@2"})
        launch.save(1)
        assert [one["outcome"] for one in launch.save_nowait(2)] == ["ok", "failed"]
        (other,) = launch.wait(2, ranks=launch.ranks[:1])
        assert other["outcome"] == "failed"
        assert "gave it up" in other["reason"]
        assert world.fired("before_give_up") == [pid]
        launch.save(3)
        world.check()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_whatever_happens_to_agents():
    """Kills, stops and drains at random while the job saves: each save ends, and promises are kept."""
    chance = random.Random(int(os.environ.get("FLASHCKPT_SEED", "1")))
    with World(3, ranks=[2, 1, 1], peer_timeout=1.0, drain_timeout=1.0) as world:
        launch = world.launch()
        for step in range(1, 11):
            launch.send_save(step)
            stopped = []
            for index in range(3):
                fault = chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, None, None, None])
                pid = world.agent_pid(index)  # none while it is being brought back
                if fault is not None and pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, fault)
                    stopped += [pid] if fault is signal.SIGSTOP else []
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            for one in launch.saved(timeout=40):
                assert one["outcome"] == "ok" or one["reason"], one
            if step % 5 == 0:
                launch.wait(step, timeout=2.0)
        launch.save(11, timeout=30.0)
        world.check()


def test_why_the_agent_ended_is_in_the_error_of_a_rank_that_can_not_start_one():
    with World(1, ranks=2, replicas=0) as world:
        launch = world.launch(save_timeout=3.0)
        launch.save_nowait(1)
        leader, other = launch.ranks
        leader.kill()
        pid = world.agent_pid(0)
        next(Path(world.nodes[0].memory_dir).glob("*/agent.lock")).unlink()
        processes.wait_gone(pid, time.monotonic() + PATIENCE)
        (failed,) = launch.save_nowait(2, ranks=[other])
        assert (failed["outcome"], failed["code"]) == ("failed", "FC-AGT-001")
        assert "its log says: " in failed["reason"]
        assert "stopping: its lock file was removed" in failed["reason"]
