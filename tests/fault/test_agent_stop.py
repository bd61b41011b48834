"""Agents that stand still, drain, or are reached over a line that flips bits."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from flashckpt.testing import Proxy
from tests.fault.agents import MIB, World, wait_until


@pytest.mark.alone
def test_a_stopped_agent_is_named_and_goes_on_where_it_was():
    with World(3, peer_timeout=1.0) as world:
        launch = world.launch()
        launch.save(1)
        world.stop_agent(1)
        began = time.monotonic()
        launch.send_save(2)
        launch.saved([launch.ranks[0], launch.ranks[2]])
        down = wait_until(lambda: seen(world, 0, 1, "down"), "node 1 to be called down")
        assert time.monotonic() - began < 1.0 + 3.0
        assert down["silent_seconds"] >= 1.0
        assert world.peer_state(0, 2)["state"] == "up"
        (late,) = launch.wait(2, timeout=0.1, ranks=launch.ranks[:1])
        assert late["outcome"] == "late"
        world.signal_agent(1, signal.SIGCONT)
        launch.saved(launch.ranks[1:2])
        assert {one["outcome"] for one in launch.wait(2)} == {"ok"}
        wait_until(lambda: seen(world, 0, 1, "up"), "node 1 to be well again")
        launch.save(3)
        world.check()


def test_a_trainer_does_not_wait_for_a_stopped_agent_beyond_its_deadline():
    with World(2) as world:
        launch = world.launch(save_timeout=1.0)
        launch.save(1)
        world.stop_agent(1)
        (failed,) = launch.save_nowait(2, ranks=launch.ranks[1:])
        assert (failed["outcome"], failed["code"]) == ("failed", "FC-AGT-001")
        assert "within 1 s" in failed["reason"]
        assert failed["seconds"] < 10
        world.signal_agent(1, signal.SIGCONT)
        launch.save_nowait(2, ranks=launch.ranks[:1])
        # Rank 1 gave it up, be it heard now or known by what it delivers next.
        wait_until(lambda: world.status(1), "agent 1 to answer")
        launch.save(3)
        world.check()


def test_a_drained_agent_finishes_what_it_pushes():
    with World(2, size_bytes=4 * MIB, start=False) as world:
        world.start_agent(0)
        world.start_agent(1, replicate_max_mbps=12.0)  # three seconds for a push
        launch = world.launch()
        launch.save_nowait(1)
        wait_until(lambda: running(world, 1), "the push to run")
        pid = world.signal_agent(1, signal.SIGTERM)
        world.wait_agent_gone(1, pid)
        assert world.paths(0, "sealed", launch.generation(1), 1)
        assert "draining" in world.log(1)
        assert {one["outcome"] for one in launch.wait(1)} == {"ok"}
        launch.save(2)
        world.check()


def test_trainers_save_while_their_agent_drains():
    """An operator who restarts agents does not end the training."""
    with World(2, size_bytes=4 * MIB, start=False) as world:
        world.start_agent(0)
        world.start_agent(1, replicate_max_mbps=24.0)
        launch = world.launch()
        launch.save_nowait(1)
        wait_until(lambda: running(world, 1), "the push to run")
        pid = world.signal_agent(1, signal.SIGTERM)
        for step in (2, 3, 4):
            assert {one["outcome"] for one in launch.save_nowait(step)} == {"ok"}
        world.wait_agent_gone(1, pid)
        assert {one["outcome"] for one in launch.wait(4)} == {"ok"}
        world.check()


def test_a_launch_begins_while_an_agent_drains():
    with World(2, size_bytes=4 * MIB, start=False) as world:
        world.start_agent(0)
        world.start_agent(1, replicate_max_mbps=24.0)
        older = world.launch()
        older.save_nowait(1)
        wait_until(lambda: running(world, 1), "the push to run")
        older.kill()
        pid = world.signal_agent(1, signal.SIGTERM)
        wait_until(lambda: world.status(1) and world.status(1)["draining"], "the agent to drain")
        newer = world.launch()
        assert world.agent_pid(1) != pid
        for rank in newer.ranks:
            rank.ask("line", step=1, base=older.generation(1))
        newer.save(2)
        world.check()


def test_agents_are_stopped_in_order_with_the_trainers():
    with World(2) as world:
        launch = world.launch()
        launch.save(1)
        launch.exit()
        for index in (0, 1):
            world.wait_agent_gone(index, world.signal_agent(index, signal.SIGTERM))
        assert all(not world.paths(index, "writing") for index in (0, 1))
        world.check()
        # What they held is there for the next ones.
        for index in (0, 1):
            world.start_agent(index)
        again = world.launch()
        for rank in again.ranks:
            rank.ask("line", step=1, base=launch.generation(1))
        assert world.paths(0, "sealed", launch.generation(1), 1)
        again.save(2)
        world.check()


def test_bits_that_flip_on_the_wire_arrive_nowhere():
    """TLS notices, the connection breaks, and the push is made again."""
    with contextlib.ExitStack() as stack, World(2, size_bytes=2 * MIB) as world:
        proxies = []

        def through(told):
            proxies.append(stack.enter_context(Proxy(told)))
            for byte in (50, 300_000):
                proxies[-1].flip(byte, 3, way="up", times=2)
            return proxies[-1].address

        launch = world.launch(addresses={0: through, 1: through})
        for step in (1, 2):
            launch.save(step)
        assert sum(proxy.flipped for proxy in proxies) >= 1
        world.check()
        assert all(not world.paths(index, "quarantine") for index in (0, 1))


def seen(world, index, of, state):
    found = world.peer_state(index, of)
    return found if found and found["state"] == state else None


def running(world, index):
    status = world.status(index)
    return status and any(one["running"] for one in status["backlog"])
