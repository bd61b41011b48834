"""What a node says and counts after a shard was lost: exactly that, and nothing that would cost a generation."""

from __future__ import annotations

from flashckpt.protocol.events import Gone, KeepRecord, Received, Rotten, ShardSealed, Tick
from flashckpt.protocol.wire import Beat, GiveUp, Lost, Report, WantBack
from tests.unit.test_agent_core import LAUNCH, acked, agent, generation, held, only, sent, shard, told


def report(step, rank, holder):
    return Report(shard(step, rank), b"d" * 16, (holder,))


def test_an_owner_whose_buddy_has_a_copy_asks_for_it_and_gives_nothing_up():
    """A generation that is given up is gone for all ranks, though the buddy could give the shard back."""
    core, one = agent("n1"), held(1, rank=1)
    core.handle(ShardSealed(one), 0.0)
    effects = core.handle(Rotten(one.shard, "crc"), 1.0)
    assert sent(effects) == [("n0", Lost(one.shard)), ("n0", WantBack(one.shard, one.digest))]
    # The message may have been lost: each beat repeats both until a copy is back.
    assert sent(core.handle(Tick(), 2.0)) == [("n0", Lost(one.shard)), ("n0", WantBack(one.shard, one.digest))]
    core.handle(Received("n0", LAUNCH, one), 3.0)
    assert not sent(core.handle(Tick(), 4.0), WantBack | Lost)


def test_an_owner_that_is_the_coordinator_wants_its_copy_back_from_its_buddies_only():
    core, one = agent("n0", nodes=3, replicas=1), held(1, world=3)
    core.handle(ShardSealed(one), 0.0)
    (buddy,) = core.placement.buddies(0)
    assert sent(core.handle(Gone(one.shard), 1.0)) == [(buddy, WantBack(one.shard, one.digest))]
    assert sent(core.handle(Tick(), 2.0), WantBack) == [(buddy, WantBack(one.shard, one.digest))]
    # That node has nothing to give back: now there is nobody left, and the generation is given up at once.
    told(core, buddy, Lost(one.shard), 3.0)
    assert generation(1) in core.voids


def test_a_holder_tells_the_owner_alone_of_its_loss():
    core, one = agent("n1", nodes=3, replicas=2), held(1, world=3)
    core.handle(Received("n0", LAUNCH, one), 0.0)
    assert sent(core.handle(Gone(one.shard), 1.0)) == [("n0", Lost(one.shard))]
    assert sent(core.handle(Tick(), 2.0), Lost | WantBack | GiveUp) == [("n0", Lost(one.shard))]


def test_a_copy_that_its_owner_has_reported_lost_is_in_no_commit():
    core = agent("n0")
    told(core, "n1", report(1, 1, "n0"))
    told(core, "n1", Lost(shard(1, 1)))
    core.handle(ShardSealed(held(1)), 2.0)
    assert not only(KeepRecord, acked(core, held(1)))
    assert core.threshold is None
    # It came back and was reported again.
    assert only(KeepRecord, told(core, "n1", report(1, 1, "n0"), 3.0))


def test_a_rank_that_goes_on_after_a_loss_voids_what_it_lost_at_once():
    """Without waiting for the patience of a shard that is merely not spoken of."""
    core = agent("n0")
    told(core, "n1", report(1, 1, "n0"))
    told(core, "n1", Lost(shard(1, 1)))
    assert generation(1) not in core.voids
    told(core, "n1", report(2, 1, "n0"))
    assert "rank 1 went on to step 2 without it" in core.voids[generation(1)]


def test_a_node_that_lost_nothing_has_nothing_to_repeat():
    core = agent("n1")
    assert {type(body) for _, body in sent(core.handle(Tick(), 2.0))} <= {Beat}
