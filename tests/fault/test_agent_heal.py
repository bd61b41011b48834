"""Real agents bring redundancy back by themselves: nodes lost with their memory, agents killed while they heal."""

from __future__ import annotations

import time

import pytest

from flashckpt.protocol.placement import place
from flashckpt.store.slots import SlotStore
from flashckpt.testing.check import find_problems
from tests.fault.agents import JOB, MIB, World, wait_until

HEALED = 90.0  # seconds; it takes about three on an idle machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lose(world, launch, index):
    """Trainers, agent and memory of a node, all at once."""
    for rank in launch.ranks:
        if rank.node == index:
            rank.kill()
    world.nodes[index].kill()
    world.nodes[index].wipe()


def live(world):
    return [index for index in range(len(world.nodes)) if world.agent_pid(index) is not None]


def holders(world, generation):
    """By rank, the nodes on which its shard lies."""
    found = {}
    for index in live(world):
        with SlotStore.open(world.nodes[index].memory_dir, JOB, create=False) as store:
            for sealed in store.scan():
                if sealed.shard.generation == generation:
                    found.setdefault(sealed.shard.rank, set()).add(index)
    return found


def wait_healed(world, generation, ranks, copies=2):
    """Every shard has its copies, and all of them are alike, byte by byte."""

    def is_healed():
        found = holders(world, generation)
        return set(found) == set(range(ranks)) and all(len(nodes) >= copies for nodes in found.values())

    try:
        wait_until(is_healed, f"{copies} copies of every shard of {generation}", HEALED)
    except AssertionError as error:
        raise AssertionError(f"{error}: {holders(world, generation)}{world.logs()}") from error

    def problems():
        memory = {world.nodes[index].name: world.nodes[index].memory_dir for index in live(world)}
        return find_problems(JOB, memory, {})

    # An agent that has just come back still cleans up after the one that was killed.
    wait_until(lambda: not problems(), "no problem is found")
    assert problems() == []


def health(world, index):
    status = world.status(index)
    kept = status["kept"] if status else None
    return kept["health"] if kept else None


def wait_said(world, condition, what):
    """Until every live agent says so of what is kept."""

    def all_say():
        found = [health(world, index) for index in live(world)]
        return all(one is not None and one["is_current"] and condition(one) for one in found) and found

    return wait_until(all_say, what, HEALED)


def restarted(world, older, step, nodes=None):
    """A new launch that has loaded `step` of an older one."""
    launch = world.launch(nodes=nodes)
    for rank in launch.ranks:
        rank.ask("line", step=step, base=list(older.generation(step)))
    return launch


@pytest.mark.parametrize(("nodes", "lost"), [(3, 2), (3, 0), (4, 1), (4, 0)])
def test_others_take_over_the_copies_of_a_lost_node_while_the_trainers_hang(nodes, lost):
    """The first node is the coordinator and the healer."""
    with World(nodes) as world:
        launch = world.launch()
        launch.save(1)
        lose(world, launch, lost)
        wait_healed(world, launch.generation(1), nodes)
        name = world.nodes[lost].name
        said = wait_said(
            world, lambda one: one["missing_nodes"] == [name] and not one["healing"]["copies"], "it is healed"
        )
        assert {one["survives"]["any_nodes"] for one in said} == {1}
        assert {one["copies"]["fewest"] for one in said} == {2}
        assert all(one["survives"]["words"].startswith("any 1 node") for one in said)


@pytest.mark.parametrize("world_after", [3, 2])
def test_what_was_loaded_is_healed_before_anything_is_saved(world_after):
    """On a blank node in the place of the lost one, or on those that are left."""
    with World(3) as world:
        older = world.launch()
        older.save(1)
        older.kill()
        lose(world, older, 2)
        nodes = [0, 1]
        if world_after == 3:
            world.start_agent(2)
            nodes.append(2)
        launch = restarted(world, older, 1, nodes)
        wait_healed(world, older.generation(1), 3)
        wait_said(world, lambda one: one["copies"]["fewest"] == 2 and one["level"] == "replicated", "two copies")
        launch.save(2)
        if world_after == 3:
            world._owners.clear()
            world.check(60.0)


def test_an_agent_that_was_restarted_still_heals_what_was_loaded():
    with World(3) as world:
        older = world.launch()
        older.save(1)
        older.kill()
        lose(world, older, 2)
        world.start_agent(2)
        for index in (0, 1):
            world.kill_agent(index)
            world.start_agent(index, "before_heal=error(EIO)")
        restarted(world, older, 1)
        world.wait_fired("before_heal")
        for index in (0, 1, 2):
            world.kill_agent(index)
        wait_healed(world, older.generation(1), 3)


@pytest.mark.parametrize("who", ["source", "target", "healer"])
def test_whoever_is_killed_while_healing_does_not_stop_it(who):
    spec = {
        "source": "before_heal=kill*1",
        "target": "after_heal_open=kill*1",
        "healer": "before_heal=sleep(2)*1",
    }[who]
    with World(4) as world:
        older = world.launch()
        older.save(1)
        older.kill()
        lose(world, older, 3)
        pids = []
        for index in range(4):
            if index != 3:
                world.kill_agent(index)
            pids.append(world.start_agent(index, spec))  # now: it may be killed as soon as it finds something to heal
        restarted(world, older, 1)
        fired = world.wait_fired(spec.partition("=")[0])
        assert set(fired) <= set(pids)
        if who == "healer":
            world.kill_agent(0)
        wait_healed(world, older.generation(1), 4)
        wait_said(world, lambda one: one["copies"]["fewest"] == 2, "two copies")


def test_a_node_lost_while_healing_and_the_next_loss_that_status_calls_survivable():
    with World(4, start=False) as world:
        for index in range(4):
            world.start_agent(index, "before_heal=sleep(1)")
        launch = world.launch()
        launch.save(1)
        lose(world, launch, 3)
        world.wait_fired("before_heal")
        said = wait_said(world, lambda one: one["missing_nodes"] == [world.nodes[3].name], "one is gone")
        if said[0]["survives"]["any_nodes"] == 0:
            needed = {name for one in said[0]["survives"]["fatal"] for name in one["nodes"]}
            spare = [index for index in live(world) if world.nodes[index].name not in needed]
        else:
            spare = live(world)
        lose(world, launch, spare[-1])
        wait_healed(world, launch.generation(1), 4)
        said = wait_said(world, lambda one: len(one["missing_nodes"]) == 2 and one["copies"]["fewest"] == 2, "healed")
        assert [one["survives"]["words"] for one in said] == ["any 1 node"] * 2
        lose(world, launch, live(world)[-1])
        assert set(holders(world, launch.generation(1))) == set(range(4))


def test_copies_go_to_another_domain():
    with World(4, domains=["east", "east", "west", "west"]) as world:
        launch = world.launch()
        launch.save(1)
        lose(world, launch, 3)
        wait_healed(world, launch.generation(1), 4)
        for rank, nodes in holders(world, launch.generation(1)).items():
            assert {index in (0, 1) for index in nodes} == {True, False}, f"shard {rank} is on {nodes}"
        said = wait_said(world, lambda one: not one["healing"]["copies"], "healed")
        assert not any(one["survives"]["fatal_domains"] for one in said)


def test_lack_of_memory_refuses_the_copy_and_not_the_save():
    """Five slots are what the launch needs on each node: two of its own rank, three of the one it hosts."""
    slot = MIB + 64 * 1024
    with World(3, budget_bytes=6 * slot) as world:
        older = world.launch()
        older.save(1)
        older.kill()
        lose(world, older, 2)
        world.start_agent(2)
        launch = restarted(world, older, 1)
        refused = wait_until(
            lambda: (one := health(world, 0)) is not None and "kept free for saves" in one["healing"]["reason"] and one,
            "a copy to be refused",
            HEALED,
        )
        assert refused["healing"]["copies"] > 0
        assert refused["copies"]["fewest"] == 1
        for step in (2, 3, 4):
            launch.save(step)
        wait_said(world, lambda one: one["of"]["step"] == 4 and one["copies"]["fewest"] == 2, "two copies of step 4")


def test_nothing_is_copied_while_all_is_well():
    # On a loaded machine an agent may be silent for the two seconds that others wait elsewhere.
    with World(3, start=False, peer_timeout=6.0) as world:
        for index in range(3):
            world.start_agent(index, "before_heal=sleep(0)")
        launch = world.launch()
        for step in (1, 2, 3):
            launch.save(step)
        wait_said(world, lambda one: one["of"]["step"] == 3 and one["copies"]["fewest"] == 2, "two copies")
        time.sleep(3 * world.options["peer_timeout"] / 2)
        assert world.fired("before_heal") == []
        buddies = place(launch.session.members, 1, "ring")
        names = [node.name for node in world.nodes]
        for rank, nodes in holders(world, launch.generation(3)).items():
            assert nodes == {rank, *(names.index(name) for name in buddies.buddies(rank))}
        world.check()
