"""A rank fetches what its blank node lacks straight into its tensors, whatever happens on the way."""

from __future__ import annotations

import contextlib

import pytest

from flashckpt.errors import PeerError
from flashckpt.testing import Cluster
from tests.recovery.job import arm, disarm, lose, wait_until
from tests.recovery.memory import flip_bit, holders, scan

MEBIBYTES = 8
CONFIG = {"peer_timeout": 5, "save_timeout": 60, "start_timeout": 60}
LOST = 1

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def cluster_that_lost(nodes, mebibytes=MEBIBYTES, **config):
    """Step 2 is replicated; node 1 is lost with its memory, and a blank one is in its place."""
    with Cluster(nodes) as cluster:
        before = cluster.trainers(config={**CONFIG, **config}, mebibytes=mebibytes)
        before.wait_started()
        for step in (1, 2):
            assert {one["level"] for one in before.save(step, "replicated").values()} == {"replicated"}
        before.kill()
        lose(cluster[LOST])
        yield cluster


def load(cluster, step=2, mebibytes=MEBIBYTES, **config):
    """All ranks load, and get what was saved, bit for bit."""
    trainers = cluster.trainers(config={**CONFIG, **config}, mebibytes=mebibytes)
    trainers.wait_started()
    events = trainers.load()
    assert {(one["step"], one["matches"]) for one in events.values()} == {(step, True)}
    return trainers, {rank: one["source"] for rank, one in events.items()}


def holds_own_shard(node):
    return any(shard.rank == LOST and shard.generation.step == 2 for shard in scan(node))


@pytest.mark.parametrize(
    "config",
    [{}, {"lanes": 1}, {"transport": "grpc"}, {"transport": "tcp", "encrypt_data": True}],
    ids=["lanes", "one-lane", "grpc", "tls-lanes"],
)
def test_a_blank_node_reads_into_its_tensors(config):
    with cluster_that_lost(2, **config) as cluster:
        # No copy is brought back meanwhile: what comes to the node comes by the load.
        for node in cluster.nodes:
            node.kill()
        arm(cluster[0], cluster.scratch, agent="before_push=error(EIO)")
        trainers, sources = load(cluster, **config)
        assert sources == {0: "memory", LOST: "peer"}
        assert not holds_own_shard(cluster[LOST])
        trainers.kill()


def test_its_copies_come_back_behind_the_training():
    with cluster_that_lost(3) as cluster:
        trainers, _ = load(cluster)
        wait_until(lambda: all(len(names) >= 2 for names in holders(cluster, 2).values()), "every shard has a copy")
        assert trainers.stop() == [0, 0, 0]
        assert cluster.check(timeout=60) == []


def test_by_way_of_the_memory_it_stays_there():
    with cluster_that_lost(2, fetch="memory") as cluster:
        for node in cluster.nodes:
            node.kill()
        arm(cluster[0], cluster.scratch, agent="before_push=error(EIO)")
        trainers, sources = load(cluster, fetch="memory")
        assert sources == {0: "memory", LOST: "peer"}
        assert holds_own_shard(cluster[LOST])
        trainers.kill()


def test_several_holders_are_asked_and_one_dies():
    large = 40  # enough to be fetched from all that have it at once
    with cluster_that_lost(3, large, replicas=2) as cluster:
        for node in cluster.nodes:
            node.kill()
        fired = arm(cluster[0], cluster.scratch, agent="mid_get=kill@3")
        trainers, sources = load(cluster, mebibytes=large, replicas=2)
        assert sources[LOST] == "peer"
        assert fired.exists(), "the agent of node0 was to die in the middle"
        trainers.kill()


def test_a_bad_copy_is_set_aside_and_the_other_holder_gives_the_rest():
    with cluster_that_lost(3, replicas=2) as cluster:
        flip_bit(cluster[0], LOST, 2)
        trainers, sources = load(cluster, replicas=2)
        assert sources[LOST] == "peer"
        trainers.kill()


def test_the_only_copy_is_bad():
    """Nothing older is left: it raises, and says that tensors were written to; the bad byte is in none of them."""
    with cluster_that_lost(2) as cluster:
        flip_bit(cluster[0], LOST, 2)
        trainers = cluster.trainers(config=CONFIG, mebibytes=MEBIBYTES)
        trainers.wait_started()
        number = trainers.send("load", step=None, arguments={})
        events = trainers.wait_for("error", number=number, timeout=120)
        for event in events.values():
            assert event["type"] == "UnusableError", event
            assert "step 2" in event["message"]
        assert "tensors were written to" in events[LOST]["message"]
        trainers.kill()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before_landing", "mid_landing", "mid_landing@4", "after_landing"])
def test_a_rank_is_killed_while_it_fetches(place):
    with cluster_that_lost(2) as cluster:
        name, _, at = place.partition("@")
        fired = arm(cluster[LOST], cluster.scratch, trainer=f"{name}=kill" + (f"@{at}" if at else ""))
        trainers = cluster.trainers(config=CONFIG, mebibytes=MEBIBYTES)
        trainers.wait_started()
        with pytest.raises(PeerError):
            trainers.load()
        trainers.kill()
        assert fired.exists()
        disarm(cluster[LOST])
        again, sources = load(cluster)
        assert sources[0] == "memory"
        again.kill()


@pytest.mark.slow
def test_where_it_can_not_be_had_straight_the_agent_fetches_it():
    """Addresses may have changed since the launch began: agents know where a node is now."""
    with cluster_that_lost(2) as cluster:
        fired = arm(cluster[LOST], cluster.scratch, trainer="mid_landing=error(EHOSTUNREACH)*12")
        trainers, sources = load(cluster)
        assert fired.exists()
        assert sources[LOST] == "peer"
        trainers.kill()


@pytest.mark.slow
def test_ranks_of_one_node_fetch_each_their_own():
    with Cluster(2, ranks_per_node=2) as cluster:
        before = cluster.trainers(config=CONFIG, mebibytes=MEBIBYTES)
        before.wait_started()
        before.save(2, "replicated")
        before.kill()
        lose(cluster[LOST])
        trainers, sources = load(cluster)
        assert sources == {0: "memory", 1: "memory", 2: "peer", 3: "peer"}
        assert trainers.stop() == [0] * 4
        assert cluster.check(timeout=60) == []
