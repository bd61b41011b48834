"""Memory that runs out at the receiver: a reason, not a loss; and it goes on when there is room again."""

from __future__ import annotations

import pytest

from flashckpt.testing import Cluster
from tests.fault.agents import MIB, World, wait_until

needs_root = pytest.mark.skipif(bool(Cluster.available("netns")), reason="needs root: a tmpfs for each node")


@pytest.mark.root
@needs_root
def test_a_full_tmpfs_at_the_receiver():
    with World(2, size_bytes=4 * MIB, memory_bytes=64 * MIB) as world:
        launch = world.launch()
        launch.save(1)
        launch.ranks[1].ask("prepare", size_bytes=world.size_bytes)  # what node 1 itself needs is there
        junk = world.nodes[1].memory_dir.removesuffix("memory") + "junk"
        with open(junk, "wb") as file:
            fill(file)
        launch.save_nowait(2)
        problem = wait_until(lambda: backlog_problem(world, 0), "node 1 to refuse")
        assert "node1" in problem
        assert "expected" in problem or "MiB" in problem, problem
        assert world.peer_state(0, 1)["state"] == "up"
        (late,) = launch.wait(2, timeout=0.2, ranks=launch.ranks[:1])
        assert late["outcome"] == "late"
        world.check()  # step 1 is whole
        assert world.paths(1, "sealed", launch.generation(1), 0)
        with open(junk, "wb"):
            pass  # room again
        assert {one["outcome"] for one in launch.wait(2)} == {"ok"}
        launch.save(3)
        world.check()


def test_the_budget_of_the_receiver():
    with World(2, size_bytes=4 * MIB, start=False) as world:
        world.start_agent(0)
        pid = world.start_agent(1, budget_bytes=14 * MIB)  # two slots of its own rank, one replica
        launch = world.launch()
        launch.ranks[1].ask("prepare", size_bytes=world.size_bytes)
        launch.save(1)
        launch.save_nowait(2)
        problem = wait_until(lambda: backlog_problem(world, 0), "node 1 to refuse")
        assert "budget" in problem
        world.check()
        assert world.paths(1, "sealed", launch.generation(1), 0)
        # With another budget it goes on; the trainers' own settings have none.
        world.kill_agent(1)
        wait_until(lambda: world.agent_pid(1) not in (None, pid), "the agent to be back")
        assert {one["outcome"] for one in launch.wait(2)} == {"ok"}
        launch.save(3)
        world.check()


def test_a_trainer_that_can_not_have_its_slot_gives_the_generation_up():
    with World(2, size_bytes=MIB, start=False) as world:
        world.start_agent(0)
        world.start_agent(1, budget_bytes=12 * MIB)
        launch = world.launch()
        launch.save(1)
        small, large = launch.ranks
        large.send("save", step=2, size_bytes=32 * MIB)
        small.send("save", step=2, size_bytes=MIB)
        failed = large.result()
        assert (failed["outcome"], failed["code"]) == ("failed", "FC-MEM-001")
        assert "budget" in failed["reason"]
        assert small.result()["outcome"] == "ok"
        (other,) = launch.wait(2, ranks=[small])
        assert other["outcome"] == "failed"
        assert "gave it up" in other["reason"]
        launch.save(3)
        world.check()


def fill(file):
    """Until nothing more goes in."""
    try:
        while True:
            file.write(bytes(MIB))
            file.flush()
    except OSError:
        pass


def backlog_problem(world, index):
    status = world.status(index)
    return next((one["problem"] for one in status["backlog"] if one["problem"]), "") if status else ""
