"""What a load asks of its node's agent: an inventory, and what the node lacks from other nodes, whatever happens."""

from __future__ import annotations

import signal

import pytest

from flashckpt.testing import Cluster
from tests.fault.agents import MIB, Refused, World, wait_until
from tests.fault.test_agent_space import fill

CHUNK = 256 << 10
SIZE = 4 * MIB
PATIENCE = 60.0
RANK = FIRST = 2
SECOND = 1


class Loading:
    """Three nodes, one rank each. Step 1 was saved by a launch before; node 0 lacks one rank's shard, which lies on its
    own node (`FIRST`) and another one (`SECOND`)."""

    def __init__(self, world, **launch):
        self.world = world
        self.before = world.launch()
        self.before.save(1)
        self.before.kill()
        self.launch = world.launch(**launch)
        self.reader = self.launch.ranks[0]
        self.generation = self.before.generation(1)
        assert [self.before.buddy(rank) for rank in range(3)] == [2, 0, 1]
        self.lacking = self.held_by(FIRST)

    def held_by(self, node, rank=RANK):
        """None where it is not."""
        found = self.launch.ranks[node].ask("inventory")["holdings"]
        return next((one for one in found if one["shard"] == self.name(rank)), None)

    def name(self, rank=RANK):
        return " ".join(map(str, (*self.generation, rank, 3)))

    @property
    def sources(self):
        return [self.world.nodes[index].name for index in (FIRST, SECOND)]

    def ask(self, *portions, whole=False, timeout=20.0, **changes):
        """`portions`: (ranges, sources)."""
        portions = portions or (([[0, 1 << 20]], self.sources),)
        wanted = {**self.lacking, "whole": whole, "portions": portions, **changes}
        self.reader.send("retrieve", wanted=[wanted], timeout=timeout)
        return self.reader.result(PATIENCE)["places"][wanted["shard"]]

    def files(self, node=0):
        return self.world.paths(node, "fetched")

    def check(self):
        assert not self.files()
        self.world.check()


def is_whole(found):
    return found["name"] == "" and found["good"] == list(range(found["chunks"])) and found["chunks"] > 8


def test_an_inventory_says_what_lies_here():
    with World(3, size_bytes=SIZE, scrub_interval=0.5) as world:
        load = Loading(world)
        for node in range(3):
            found = load.launch.ranks[node].ask("inventory")
            assert found["node"] == world.nodes[node].name
            ranks = sorted(int(one["shard"].split()[4]) for one in found["holdings"])
            assert ranks == sorted({node, (node + 1) % 3})
            assert {one["level"] for one in found["holdings"]} == {"replicated"}
            assert found["quarantined"] == 0
            assert found["past"] == [[load.before.launch.epoch, load.before.launch.nonce, 3]]
        digests = {load.held_by(node)["digest"] for node in (FIRST, SECOND)}
        assert len(digests) == 1
        assert load.held_by(SECOND)["verified"]  # a replica, verified when it came
        wait_until(lambda: load.held_by(FIRST)["verified"], "the scrubber to have passed")
        load.check()


def test_sessions_of_earlier_launches_stay_as_long_as_their_shards():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        before = [load.before.launch.epoch, load.before.launch.nonce, 3]
        load.launch.kill()
        world.kill_agent(0)
        world.start_agent(0)
        launch = world.launch()  # the one in between saved nothing
        assert launch.ranks[0].ask("inventory")["past"] == [before]
        for rank in launch.ranks:
            rank.ask("line", step=0, base=None)
        wait_until(lambda: launch.ranks[0].ask("inventory")["past"] == [], "what was abandoned to go")
        load.check()


def test_a_whole_shard_is_sealed_and_stays():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        assert is_whole(load.ask(whole=True))
        load.reader.ask("let_go")
        held = load.held_by(0)
        assert (held["digest"], held["verified"]) == (load.lacking["digest"], True)
        # Again: it is here, and nobody is asked.
        assert is_whole(load.ask(([[0, 4]], ["nobody"]), whole=True))
        load.check()


def test_several_sources_of_one_shard_at_once():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        one, other = load.sources
        assert is_whole(load.ask(([[0, 7]], [one, other]), ([[7, 1 << 20]], [other, one]), whole=True))
        load.check()


def test_a_part_takes_memory_for_itself_alone_and_goes_with_the_call():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        one, other = load.sources
        found = load.ask(([[1, 2], [9, 1]], [one, other]), ([[4, 1]], [other, one]))
        assert found["name"]
        assert found["good"] == found["asked"] == [1, 2, 4, 9]
        assert found["taken_bytes"] <= found["head_bytes"] + 4 * CHUNK + (64 << 10)
        assert [path.name for path in load.files()] == [found["name"]]
        assert len(load.reader.ask("inventory")["holdings"]) == 2  # it is no shard
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")
        load.check()


def test_a_head_alone():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        found = load.ask(([], load.sources))
        assert (found["good"], found["taken_bytes"]) == ([], found["head_bytes"])
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")


def test_what_was_fetched_in_part_goes_with_the_trainer():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        load.ask(([[0, 3]], load.sources))
        assert load.files()
        load.reader.kill()
        wait_until(lambda: not load.files(), "the file to go")
        load.check()


def test_what_was_fetched_in_part_goes_with_the_agent():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        load.ask(([[0, 3]], load.sources))
        world.kill_agent(0)
        wait_until(lambda: world.agent_pid(0) is not None and not load.files(), "a new agent to empty the folder")
        load.reader.ask("let_go")
        assert load.ask(([[0, 3]], load.sources))["good"] == [0, 1, 2]
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")
        load.check()


@pytest.mark.parametrize("place", ["before_get", "mid_get", "mid_get@3", "after_get"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_source_dies_and_the_next_one_gives_the_rest(place, whole):
    name, _, first = place.partition("@")
    with World(3, size_bytes=SIZE, start=False) as world:
        for index in range(3):
            # Armed in one node alone, and its trainers bring it back unarmed.
            world.start_agent(index, f"{name}=kill*1@{first or 1}" if index == FIRST else "")
        load = Loading(world)
        found = load.ask(([[0, 13]], load.sources), whole=whole)
        assert world.fired(name)
        assert set(range(13)) <= set(found["good"])
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")
        load.check()


@pytest.mark.parametrize(
    "place", ["before_retrieve", "mid_retrieve", "mid_retrieve@3", "before_fetched_seal", "after_retrieve"]
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_the_fetching_agent_dies_and_its_successor_begins_anew(place, whole):
    name, _, first = place.partition("@")
    with World(3, size_bytes=SIZE, start=False) as world:
        pids = [world.start_agent(i, f"{name}=kill*1@{first or 1}" if i == 0 else "") for i in range(3)]
        load = Loading(world)
        found = load.ask(([[0, 13]], load.sources), whole=whole)
        assert world.fired(name) == pids[:1]
        assert set(range(13)) <= set(found["good"])
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")
        load.check()


def test_an_agent_that_dies_again_is_an_error():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        load.reader.ask("environ", FLASHCKPT_AGENT_FAILPOINTS="mid_retrieve=kill")
        world.kill_agent(0)
        wait_until(lambda: world.agent_pid(0) is not None, "an agent")
        with pytest.raises(Refused) as refused:
            load.ask(([[0, 13]], load.sources), timeout=30.0)
        assert refused.value.error == "AgentError"
        load.reader.ask("environ", FLASHCKPT_AGENT_FAILPOINTS="")
        world.wait_fired("mid_retrieve", times=2)
        wait_until(lambda: world.agent_pid(0) is not None and not load.files(), "nothing to be left")
        load.check()


def test_rot_at_a_source_is_set_aside_there_and_the_other_one_is_asked():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        world.flip(FIRST, load.generation, RANK, offset=-CHUNK)
        assert is_whole(load.ask(whole=True))
        assert len(world.paths(FIRST, "quarantine")) == 1
        assert load.launch.ranks[FIRST].ask("inventory")["quarantined"] == 1
        assert not world.paths(SECOND, "quarantine")


def test_the_only_copy_is_rotten():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        world.flip(FIRST, load.generation, RANK, offset=-CHUNK)
        with pytest.raises(Refused) as refused:
            load.ask(([[0, 1 << 20]], load.sources[:1]), whole=True)
        assert refused.value.code == "FC-LOAD-005"
        assert "shard 2/3 of step 1" in refused.value.message
        assert "crc32c" in refused.value.message
        assert world.nodes[FIRST].name in refused.value.message
        assert world.paths(FIRST, "quarantine")
        assert not load.files()
        assert not world.paths(0, "writing")


def test_every_reason_is_told():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        world.flip(FIRST, load.generation, RANK, offset=-SIZE // 2)
        (path,) = world.paths(SECOND, "sealed", load.generation, RANK)
        path.unlink()
        wait_until(lambda: load.held_by(SECOND) is None, "node 2 to notice")
        with pytest.raises(Refused) as refused:
            load.ask(([[0, 13]], [*load.sources, "elsewhere", world.nodes[0].name]))
        for text in ("crc32c", "does not hold", "elsewhere: ", *load.sources):
            assert text in refused.value.message, refused.value.message
        assert not load.files()


def test_a_source_that_hangs_is_left():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        world.stop_agent(FIRST)
        assert is_whole(load.ask(whole=True, timeout=40.0))
        world.signal_agent(FIRST, signal.SIGCONT)
        load.check()


def test_time_runs_out():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        world.stop_agent(FIRST)
        with pytest.raises(Refused) as refused:
            load.ask(([[0, 1 << 20]], load.sources[:1]), timeout=1.0)
        assert refused.value.error == "DeadlineError"
        assert "shard 2/3 of step 1" in refused.value.message
        world.signal_agent(FIRST, signal.SIGCONT)
        wait_until(lambda: not load.files() and not world.paths(0, "writing"), "nothing to be left")
        load.check()


def test_a_plan_that_does_not_fit_the_shard():
    with World(3, size_bytes=SIZE) as world:
        load = Loading(world)
        for portions in ([([[0, 999]], load.sources)], [([[0, 2]], load.sources), ([[1, 2]], load.sources)]):
            with pytest.raises(Refused) as refused:
                load.ask(*portions)
            assert refused.value.code == "FC-LOAD-005"
        with pytest.raises(Refused) as refused:
            load.ask(digest="00" * 16)
        assert "another content" in refused.value.message
        with pytest.raises(Refused) as refused:
            load.ask(size_bytes=load.lacking["size_bytes"] + 4096)
        assert "size" in refused.value.message
        load.check()


def test_the_budget_is_an_outcome():
    with World(3, size_bytes=SIZE, start=False) as world:
        for index in range(3):
            world.start_agent(index, **({"budget_bytes": 4 * SIZE} if index == 0 else {}))
        load = Loading(world)
        load.reader.ask("prepare", size_bytes=SIZE)
        for whole in (True, False):
            with pytest.raises(Refused) as refused:
                load.ask(([[0, load.lacking["size_bytes"] // CHUNK]], load.sources), whole=whole)
            assert refused.value.error == "NoSpaceError", refused.value
            assert "budget" in refused.value.message
        assert not load.files()


@pytest.mark.root
@pytest.mark.skipif(bool(Cluster.available("netns")), reason="needs root: a tmpfs for each node")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_full_tmpfs_is_an_outcome(whole):
    with World(3, size_bytes=SIZE, memory_bytes=64 * MIB) as world:
        load = Loading(world)
        pid = world.agent_pid(0)
        junk = world.nodes[0].memory_dir.removesuffix("memory") + "junk"
        with open(junk, "wb") as file:
            fill(file)
        plan = ([[0, load.lacking["size_bytes"] // CHUNK]], load.sources)
        with pytest.raises(Refused) as refused:
            load.ask(plan, whole=whole)
        assert refused.value.error == "NoSpaceError", refused.value
        assert "tmpfs" in refused.value.message
        assert world.agent_pid(0) == pid
        assert not load.files()
        with open(junk, "wb"):
            pass  # room again
        assert load.ask(plan, whole=whole)["good"]
        load.reader.ask("let_go")
        wait_until(lambda: not load.files(), "the file to go")
        load.check()
