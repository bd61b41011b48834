"""Bits that flip in memory: found, set aside, and repaired from a copy that is good."""

from __future__ import annotations

import signal

import pytest

from tests.fault.agents import MIB, World, wait_until


@pytest.mark.parametrize("offset", [-1, -MIB, 0, 40, 200], ids=["end", "middle", "magic", "preamble", "header"])
@pytest.mark.parametrize("where", ["primary", "replica"])
def test_the_scrubber_finds_and_repairs(where, offset):
    with World(2, size_bytes=2 * MIB, scrub_interval=0.2) as world:
        launch = world.launch()
        launch.save(1)
        node = 0 if where == "primary" else 1
        world.flip(node, launch.generation(1), 0, offset)
        wait_until(lambda: world.paths(node, "quarantine"), "the bad copy to be set aside")
        wait_until(lambda: world.paths(node, "sealed", launch.generation(1), 0), "it to be repaired")
        world.check()
        status = world.status(node)
        assert status["scrub"]["found"] == 1
        launch.save(2)
        world.check()


def test_rot_in_one_of_three_copies():
    with World(3, replicas=2, scrub_interval=0.2) as world:
        launch = world.launch()
        launch.save(1)
        for node, rank in ((0, 0), (2, 1), (1, 2)):
            world.flip(node, launch.generation(1), rank)
        wait_until(lambda: all(world.paths(index, "quarantine") for index in (0, 1, 2)), "all to be found")
        world.check()
        launch.save(2)
        world.check()


def test_rot_is_found_by_the_push_and_never_sent():
    """The only copy is bad: the generation ends with a reason, and the one before it stays."""
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        world.stop_agent(1)
        launch.save_nowait(2, ranks=launch.ranks[:1])
        world.flip(0, launch.generation(2), 0)
        world.signal_agent(1, signal.SIGCONT)
        launch.save_nowait(2, ranks=launch.ranks[1:])
        ended = launch.wait(2)
        assert [one["outcome"] for one in ended] == ["failed", "failed"]
        assert all(one["reason"] for one in ended)
        assert not world.paths(1, "sealed", launch.generation(2), 0)
        assert world.paths(0, "quarantine")
        world.check()
        launch.save(3)
        world.check()


def test_a_replica_that_somebody_removed_is_made_again():
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        (path,) = world.paths(1, "sealed", launch.generation(1), 0)
        path.unlink()
        wait_until(lambda: world.paths(1, "sealed", launch.generation(1), 0), "it to be made again")
        world.check()
        launch.save(2)
        world.check()


def test_rot_is_found_when_an_agent_comes_back():
    """A header that is not what its name says is not adopted; the replica comes back from its owner."""
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        world.stop_agent(1)
        world.flip(1, launch.generation(1), 0, 100)
        world.kill_agent(1)
        wait_until(lambda: world.paths(1, "quarantine"), "the bad copy to be set aside")
        world.check()
        launch.save(2)
        world.check()
