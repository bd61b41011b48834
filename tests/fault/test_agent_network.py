"""Links that break, heal and are slow, between nodes with networks of their own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flashckpt.testing import Cluster
from tests.fault.agents import MIB, World, wait_until

REASON = Cluster.available("netns")
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(REASON), reason=REASON)]


def sent_bytes(world, index):
    """Over the node's link, by whomever."""
    keeper = world.nodes[index].host._namespace.pid
    for line in Path(f"/proc/{keeper}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise AssertionError("no eth0")


def test_a_push_resumes_where_its_link_broke():
    size = 16 * MIB
    with World(2, kind="netns", size_bytes=size, replicate_max_mbps=80.0, peer_timeout=1.5) as world:
        launch = world.launch()
        launch.save_nowait(1)
        wait_until(lambda: sent_bytes(world, 0) > 0.75 * size, "three quarters of the shard to be sent")
        world.nodes[1].cut()
        wait_until(lambda: world.peer_state(0, 1)["state"] == "down", "node 1 to be called down")
        world.nodes[1].heal()
        assert {one["outcome"] for one in launch.wait(1, timeout=20.0)} == {"ok"}
        # All of it again would be 1.75 times.
        assert sent_bytes(world, 0) < 1.4 * size
        wait_until(lambda: world.peer_state(0, 1)["state"] == "up", "node 1 to be well again")
        launch.save(2, timeout=20.0)
        world.check()


def test_a_link_that_is_down_for_a_moment_costs_nothing_but_the_moment():
    size = 16 * MIB
    with World(2, kind="netns", size_bytes=size, replicate_max_mbps=80.0, peer_timeout=8.0) as world:
        launch = world.launch()
        launch.save_nowait(1)
        wait_until(lambda: sent_bytes(world, 0) > 0.5 * size, "half of the shard to be sent")
        world.nodes[1].cut()
        time.sleep(1.0)  # the fault itself
        world.nodes[1].heal()
        assert {one["outcome"] for one in launch.wait(1, timeout=20.0)} == {"ok"}
        assert sent_bytes(world, 0) < 1.3 * size
        assert "failed" not in world.log(0)
        world.check()


@pytest.mark.alone
def test_a_node_that_is_cut_off_is_named_and_comes_back():
    with World(3, kind="netns", peer_timeout=1.0) as world:
        launch = world.launch()
        launch.save(1)
        gone = launch.buddy(0)
        (other,) = {1, 2} - {gone}
        world.nodes[gone].cut()
        began = time.monotonic()
        launch.save_nowait(2)
        down = wait_until(lambda: find(world, 0, gone, "down"), "the node to be called down")
        assert time.monotonic() - began < 1.0 + 3.0
        assert down["problem"]
        assert find(world, 0, other, "up")
        (late,) = launch.wait(2, timeout=0.1, ranks=launch.ranks[:1])
        assert late["outcome"] == "late"
        # Those on the other side of the cut see it the other way round, and nobody commits alone.
        wait_until(lambda: find(world, gone, 0, "down"), "the coordinator to be called down")
        world.nodes[gone].heal()
        assert {one["outcome"] for one in launch.wait(2, timeout=20.0)} == {"ok"}
        launch.save(3)
        world.check()


def test_one_way_links_commit_nothing_that_is_not_there():
    """A node that hears but is not heard acknowledges in vain."""
    with World(2, kind="netns", peer_timeout=1.0) as world:
        launch = world.launch()
        launch.save(1)
        world.nodes[1].cut(world.nodes[0], "out")
        launch.save_nowait(2)
        ended = launch.wait(2, timeout=1.5)
        assert "ok" not in {one["outcome"] for one in ended}
        world.check()
        world.nodes[1].heal()
        assert {one["outcome"] for one in launch.wait(2, timeout=20.0)} == {"ok"}
        world.check()


@pytest.mark.alone
def test_the_limit_of_replication_is_kept_on_a_slow_link():
    size, limit = 12 * MIB, 64.0
    with World(2, kind="netns", size_bytes=size, rate_mbit=200.0, replicate_max_mbps=limit) as world:
        launch = world.launch()
        reached = []
        # A busy machine is slower than the limit at times, never quicker.
        while max(reached, default=0.0) < 0.7 * limit and len(reached) < 5:
            before, began = sent_bytes(world, 0), time.monotonic()
            launch.save(len(reached) + 1, timeout=20.0)
            reached.append(8 * size / 1e6 / (time.monotonic() - began))
            assert sent_bytes(world, 0) - before < 1.2 * size
        assert 0.7 * limit <= max(reached) < 1.3 * limit
        world.check()


def find(world, index, of, state):
    found = world.peer_state(index, of)
    return found if found and found["state"] == state else None
