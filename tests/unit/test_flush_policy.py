"""When is what flushed, by whom, and what becomes of it: decisions without a process or a disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashckpt.persist.retain import KeepRules, Lying, removable
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.events import (
    Answered,
    Begun,
    FlushEnded,
    FlushWanted,
    HurryFlush,
    LeaseEnded,
    Notify,
    NotifyFlushFailed,
    Release,
    Send,
    ShardSealed,
    StartFlush,
    StopFlush,
    Tick,
    Told,
)
from flashckpt.protocol.flush import choose, retry_delay, writers
from flashckpt.protocol.members import who_orders
from flashckpt.protocol.placement import place
from flashckpt.protocol.replicate import Limits
from flashckpt.protocol.wire import Announce, Answer, Beat, Envelope, FlushFailure, FlushOrder, WantPersisted
from flashckpt.rpc.session import decode_session, encode_session
from flashckpt.types import Generation, Held, Launch, Level, Member, PersistSettings, Record, Session, ShardId

LAUNCH = Launch(5, 77)


def gen(step, seq=None):
    return Generation(5, 77, step, step if seq is None else seq)


def decide(newest, persisted=None, wanted=None, since_step=0, since_seconds=0.0, **settings):
    return choose(
        PersistSettings("/p", **settings),
        newest=newest,
        persisted=persisted,
        wanted=wanted,
        since_step=since_step,
        since_seconds=since_seconds,
    )


@pytest.mark.parametrize(
    ("arguments", "expected", "reason"),
    [
        ({"newest": None}, None, "nothing is committed"),
        ({"newest": gen(10)}, None, "nothing is due"),
        ({"newest": gen(9), "interval": 10}, None, "nothing is due"),
        ({"newest": gen(10), "interval": 10}, 10, "every 10 steps"),
        ({"newest": gen(13), "interval": 10}, 13, "every 10 steps"),
        ({"newest": gen(13), "interval": 10, "since_step": 10}, None, "nothing is due"),
        ({"newest": gen(20), "interval": 10, "since_step": 13}, 20, "every 10 steps"),
        ({"newest": gen(10), "interval": 10, "persisted": gen(10)}, None, "is persisted"),
        ({"newest": gen(3), "interval_seconds": 60.0, "since_seconds": 59.0}, None, "nothing is due"),
        ({"newest": gen(3), "interval_seconds": 60.0, "since_seconds": 60.0}, 3, "every 1 minutes"),
        ({"newest": gen(9), "wanted": (gen(7), "asked")}, 7, "asked"),
        ({"newest": gen(9), "wanted": (gen(7), "asked"), "persisted": gen(7)}, None, "nothing is due"),
    ],
)
def test_what_is_due(arguments, expected, reason):
    found, why = decide(**arguments)
    assert (None if found is None else found.step) == expected
    assert reason in why


def test_pauses_between_retries_double_up_to_five_minutes():
    expected = [5, 5, 10, 20, 40, 80, 160, 300, 300]
    assert [retry_delay(failures) for failures in range(9)] == expected
    assert retry_delay(10_000) == 300


def session_of(nodes=1, ranks=1, replicas=0, **settings):
    members = tuple(
        Member(f"n{i}", f"127.0.0.1:{i + 1}" if nodes > 1 else "", "", tuple(range(i * ranks, (i + 1) * ranks)))
        for i in range(nodes)
    )
    return Session(LAUNCH, nodes * ranks, members, replicas, "ring", 2, PersistSettings("/p", **settings))


def test_buddies_write_for_a_node_that_is_down():
    session = session_of(3, 2, 1)
    placement = place(session.members, 1, "ring")
    every, problem = writers(session, placement, ())
    assert (dict(every), problem) == ({"n0": (0, 1), "n1": (2, 3), "n2": (4, 5)}, "")
    without, problem = writers(session, placement, {"n1"})
    assert not problem
    assert sorted(rank for _, ranks in without for rank in ranks) == [0, 1, 2, 3, 4, 5]
    assert "n1" not in dict(without)
    nobody, problem = writers(session, placement, {"n0", "n1", "n2"})
    assert not nobody
    assert "rank 0" in problem


def test_a_session_keeps_its_settings():
    session = session_of(2, 1, 1, interval=5, keep_steps=(1, 2), max_mbps=3.5)
    assert decode_session(encode_session(session)) == session


class Node:
    """A core and what it said."""

    def __init__(self, session, node_id="n0"):
        self.core = AgentCore(node_id, Limits())
        self.session = session
        self.now = 0.0
        self.feed(Begun(session))

    def feed(self, event, seconds=0.0):
        self.now += seconds
        self.out = self.core.handle(event, self.now)
        return self.out

    def save(self, step):
        for rank in self.session.members[0].ranks:
            shard = ShardId(gen(step), rank, self.session.world)
            self.feed(ShardSealed(Held(shard, bytes(16), 1, 0)))
        return self.out

    def of(self, kind):
        return [effect for effect in self.out if isinstance(effect, kind)]


def test_a_due_generation_is_flushed_held_and_let_go():
    node = Node(session_of(interval=2))
    node.save(1)
    assert not node.of(StartFlush)
    node.save(2)
    (started,) = node.of(StartFlush)
    assert (started.order.generation, started.writers) == (gen(2), (("n0", (0,)),))
    # Newer ones are committed, and older ones go: but not what is being flushed.
    node.save(3)
    assert not node.of(Release)
    assert gen(2) in {shard.generation for shard in node.core.held}
    node.save(5)  # due, but one at a time
    assert [effect.shard.generation for effect in node.of(Release)] == [gen(3)]
    assert not node.of(StartFlush)
    node.feed(FlushEnded(started.order.attempt))
    assert Notify(gen(2), Level.PERSISTED) in node.out
    assert gen(2) in [effect.shard.generation for effect in node.of(Release)]
    assert [effect.order.generation for effect in node.of(StartFlush)] == [gen(5)]


def test_a_failure_is_waited_out_and_the_newest_tried():
    node = Node(session_of(interval=1))
    node.save(1)
    (first,) = node.of(StartFlush)
    node.feed(FlushEnded(first.order.attempt, "disk full"))
    assert node.core.flushing.problem == "disk full"
    assert node.core.flushing.counts == {"done": 0, "failed": 1}
    node.save(2)
    assert not node.of(StartFlush)
    assert not [shard for shard in node.core.held if shard.generation == gen(1)]
    node.feed(Tick(), 4.0)
    assert not node.of(StartFlush)
    node.feed(Tick(), 1.5)
    (again,) = node.of(StartFlush)
    assert again.order.generation == gen(2)
    assert again.order.attempt != first.order.attempt
    # What the first one still says does not count.
    node.feed(FlushEnded(first.order.attempt))
    assert node.core.flushing.persisted is None


def test_what_is_asked_for_before_it_is_committed_is_flushed_then():
    node = Node(session_of(2, 1, 1))
    shard = ShardId(gen(1), 0, 2)
    node.feed(ShardSealed(Held(shard, bytes(16), 1, 0)))
    node.feed(FlushWanted(gen(1), "asked"))
    assert not node.of(StartFlush)
    assert node.core.flushing.is_busy


def test_when_nobody_works_any_more_the_newest_is_flushed():
    node = Node(session_of())
    node.save(4)
    node.feed(LeaseEnded(1))
    assert not node.of(StartFlush)
    node.feed(FlushWanted(None, "the trainers ended"))
    (started,) = node.of(StartFlush)
    assert (started.order.generation, started.order.reason) == (gen(4), "the trainers ended")


def test_of_two_wishes_the_newer_one_is_kept():
    node = Node(session_of(2, 1, 1))
    node.feed(FlushWanted(gen(1), "asked"))
    node.feed(FlushWanted(gen(2), "asked"))
    assert Notify(gen(1), Level.NONE, "step 2 is flushed instead") in node.out
    assert node.core.flushing.wanted.generation == gen(2)


def told(node, body, sender="n0"):
    node.feed(Told(Envelope(sender, LAUNCH, None, body)))
    return node.out


def test_other_nodes_do_their_part_while_the_order_stands():
    node = Node(session_of(2, 1, 1), "n1")
    shard = ShardId(gen(3), 1, 2)
    node.feed(ShardSealed(Held(shard, bytes(16), 1, 0)))
    order = FlushOrder(gen(3), 9, "every 3 steps", ())
    told(node, Announce(None, (), order))
    (started,) = node.of(StartFlush)
    assert started.order == order
    told(node, Announce(None, (), order))
    assert not node.of(StartFlush)
    told(node, Announce(None, (), None, gen(3)))
    assert StopFlush() in node.out
    assert Notify(gen(3), Level.PERSISTED) in node.out


def test_a_wish_of_another_node_is_repeated_until_it_is_heard():
    node = Node(session_of(2, 1, 1), "n1")
    node.feed(FlushWanted(gen(3), "asked"))
    assert Send("n0", WantPersisted(gen(3), "asked")) in node.out
    node.feed(Tick(), 2.0)
    assert Send("n0", WantPersisted(gen(3), "asked")) in node.out
    told(node, Announce(None, (), FlushOrder(gen(3), 9, "asked", ())))
    node.feed(Tick(), 2.0)
    assert Send("n0", WantPersisted(gen(3), "asked")) not in node.out


def test_a_node_that_goes_down_is_left_out_of_the_next_order():
    node = Node(session_of(2, 1, 1, timeout=1000.0))
    flushing = node.core.flushing
    node.core.ledger.records = ()
    flushing.order, flushing.giver = FlushOrder(gen(1), 9, "asked", ()), "n0"
    node.feed(Tick(), 60.0)
    assert StopFlush() in node.out
    assert flushing.order is None
    assert flushing.wanted.generation == gen(1)
    assert "n1 went down" in flushing.problem


# --- failures reach everybody


def test_a_failure_is_told_to_the_trainers_of_all_nodes():
    node = Node(session_of(interval=1))
    node.save(1)
    (first,) = node.of(StartFlush)
    node.feed(FlushEnded(first.order.attempt, "disk full"))
    assert NotifyFlushFailed(gen(1), "disk full") in node.out
    # A node that only does its part hears of it, once.
    other = Node(session_of(2, 1, 1), "n1")
    failure = FlushFailure(gen(1), 9, "disk full")
    told(other, Announce(None, (), None, None, failure))
    assert NotifyFlushFailed(gen(1), "disk full") in other.out
    told(other, Announce(None, (), None, None, failure))
    assert not other.of(NotifyFlushFailed)
    assert other.core.flushing.problem == "disk full"
    told(other, Announce(None, (), None, gen(2)))
    assert other.core.flushing.problem == ""


def test_a_node_whose_part_fails_says_so_until_the_order_is_gone():
    node = Node(session_of(2, 1, 1), "n1")
    node.feed(ShardSealed(Held(ShardId(gen(3), 1, 2), bytes(16), 1, 0)))
    told(node, Announce(None, (), FlushOrder(gen(3), 9, "asked", ())))
    assert node.of(StartFlush)
    failure = FlushFailure(gen(3), 9, "not mounted")
    node.feed(FlushEnded(9, "not mounted"))
    assert Send("n0", failure) in node.out
    node.feed(Tick(), 2.0)
    assert Send("n0", failure) in node.out
    told(node, Announce(None, (), None, None, FlushFailure(gen(3), 9, "n1: not mounted")))
    node.feed(Tick(), 2.0)
    assert Send("n0", failure) not in node.out


def test_whoever_ordered_ends_the_flush_of_which_another_part_failed():
    node = Node(session_of(2, 1, 1))
    flushing = node.core.flushing
    flushing.order, flushing.giver = FlushOrder(gen(1), 9, "asked", ()), "n0"
    told(node, FlushFailure(gen(1), 8, "of an earlier one"), "n1")
    assert flushing.order is not None
    told(node, FlushFailure(gen(1), 9, "not mounted"), "n1")
    assert StopFlush() in node.out
    assert NotifyFlushFailed(gen(1), "n1: not mounted") in node.out
    assert flushing.order is None
    assert flushing.counts == {"done": 0, "failed": 1}


def test_a_flush_that_somebody_waits_for_hurries():
    node = Node(session_of(interval=1))
    node.save(1)
    (started,) = node.of(StartFlush)
    assert not started.order.urgent
    node.feed(FlushWanted(gen(1), "asked", urgent=True))
    assert HurryFlush() in node.out
    assert node.core.flushing.order.urgent
    assert node.core.flushing.order.attempt == started.order.attempt
    node.feed(FlushWanted(gen(1), "asked", urgent=True))
    assert not node.of(HurryFlush)
    # On the other nodes too.
    other = Node(session_of(2, 1, 1), "n1")
    order = FlushOrder(gen(3), 9, "every 3 steps", ())
    told(other, Announce(None, (), order))
    told(other, Announce(None, (), replace(order, urgent=True)))
    assert HurryFlush() in other.out
    # And one that begins because nobody works any more.
    last = Node(session_of())
    last.save(4)
    last.feed(FlushWanted(None, "the trainers ended"))
    assert last.of(StartFlush)[0].order.urgent


# --- who orders


@pytest.mark.parametrize(
    ("silent", "own", "expected", "reason"),
    [
        ((), "n2", "n0", "the coordinator"),
        (("n1",), "n2", "n0", "the coordinator"),
        (("n0",), "n2", "n1", "n0 does not answer"),
        (("n0", "n1"), "n2", "n2", "n0, n1 do not answer"),
        (("n0", "n1", "n2"), "n1", "n1", "n0 does not answer"),  # nobody is silent to itself
        (("n1", "n2"), "n0", "n0", "the coordinator"),
    ],
)
def test_the_first_member_that_answers_orders(silent, own, expected, reason):
    assert who_orders(session_of(3).members, silent, own) == (expected, reason)


def test_without_members_a_node_answers_for_itself():
    assert who_orders((), (), "n7")[0] == "n7"


def committed_on(node_id):
    """Three nodes; this one holds its shard of step 4 and the coordinator's replica, and knows that it is committed."""
    node = Node(session_of(3, 1, 1, timeout=1000.0), node_id)
    rank = int(node_id[1])
    for held in (rank, (rank - 1) % 3):
        node.feed(ShardSealed(Held(ShardId(gen(4), held, 3), bytes(16), 1, 0)))
    told(node, Announce(Record(gen(4), 3, 1, 0.0), ()))
    return node


def lose(node, gone, alive, seconds=15):
    """The time passes in which some answer and others do not."""
    seen = []
    for _ in range(seconds):
        for other in alive:
            node.feed(Answered(other, Answer(LAUNCH, None, None, ())))
        seen += node.feed(Tick(), 1.0)
    assert set(gone) <= set(node.core.silent(node.now))
    return seen


def test_the_next_member_orders_when_the_coordinator_is_lost():
    node = committed_on("n1")
    node.feed(FlushWanted(None, "the trainers ended"))
    assert Send("n0", WantPersisted(gen(4), "the trainers ended")) in node.out
    assert not node.of(StartFlush)
    seen = lose(node, ["n0"], ["n2"])
    (started,) = [effect for effect in seen if isinstance(effect, StartFlush)]
    assert (started.order.generation, started.order.down, started.commits) == (gen(4), ("n0",), True)
    assert dict(started.writers) == {"n1": (0, 1), "n2": (2,)}
    news = [
        one.body for one in seen if isinstance(one, Send) and one.node_id == "n2" and isinstance(one.body, Announce)
    ]
    # An order, and no word on what is committed: that stays the coordinator's.
    assert Announce(None, (), started.order) in news
    node.feed(FlushEnded(started.order.attempt))
    assert Notify(gen(4), Level.PERSISTED) in node.out
    assert Send("n2", Announce(None, (), None, gen(4))) in node.out


def test_an_order_of_another_member_counts_only_while_those_before_it_are_silent():
    node = committed_on("n2")
    order = FlushOrder(gen(4), 9, "the trainers ended", ("n0",))
    told(node, Announce(None, (), order), "n1")
    assert not node.of(StartFlush)
    lose(node, ["n0"], ["n1"])
    told(node, Announce(None, (), order), "n1")
    (started,) = node.of(StartFlush)
    assert (started.order, started.commits) == (order, False)
    # The coordinator is back and knows of no order: what it says counts again.
    node.feed(Answered("n0", Answer(LAUNCH, None, None, ())))
    assert StopFlush() in node.out
    assert node.core.flushing.order is None


def test_the_wishes_of_others_go_to_whoever_orders():
    node = committed_on("n2")
    node.feed(FlushWanted(gen(4), "asked"))
    assert Send("n0", WantPersisted(gen(4), "asked")) in node.out
    seen = lose(node, ["n0"], ["n1"])
    assert Send("n1", WantPersisted(gen(4), "asked")) in seen
    assert not [effect for effect in seen if isinstance(effect, StartFlush)]


def test_a_flush_that_loses_its_orderer_is_ordered_again_by_the_next():
    node = committed_on("n1")
    order = FlushOrder(gen(4), 9, "every 4 steps", ())
    told(node, Announce(None, (), order))
    assert [effect.commits for effect in node.of(StartFlush)] == [False]
    seen = lose(node, ["n0"], ["n2"])
    assert StopFlush() in seen
    (again,) = [effect for effect in seen if isinstance(effect, StartFlush)]
    assert (again.order.generation, again.order.reason, again.commits) == (gen(4), "every 4 steps", True)
    assert again.order.attempt != order.attempt
    assert "n0 went down while step 4" in node.core.flushing.problem


def test_whoever_orders_next_counts_from_what_is_on_disk():
    node = Node(session_of(3, 1, 1, interval=4, timeout=1000.0), "n1")
    node.feed(ShardSealed(Held(ShardId(gen(5), 1, 3), bytes(16), 1, 0)))
    told(node, Announce(Record(gen(5), 3, 1, 0.0), (), None, gen(4)))
    # Step 5 is newer, but no multiple of 4 lies between.
    assert not [effect for effect in lose(node, ["n0"], ["n2"]) if isinstance(effect, StartFlush)]


def test_what_only_others_know_to_be_committed_is_flushed_too():
    """The coordinator told one node of its last record, and was lost."""
    node = committed_on("n1")
    node.feed(ShardSealed(Held(ShardId(gen(6), 1, 3), bytes(16), 1, 0)))
    node.feed(FlushWanted(None, "the trainers ended"))
    lose(node, ["n0"], ["n2"], 11)
    node.core.flushing.order = None  # whatever was ordered before the word came
    node.core.flushing.wanted = None
    node.feed(Answered("n2", Answer(LAUNCH, None, Record(gen(6), 3, 1, 0.0), ())))
    assert [effect.order.generation for effect in node.of(StartFlush)] == [gen(6)]


def test_a_new_launch_ends_what_the_old_one_flushed():
    node = Node(session_of(interval=1))
    node.save(1)
    assert node.of(StartFlush)
    newer = Session(Launch(6, 1), 1, node.session.members, 0, "ring", 2, node.session.persist)
    node.feed(Begun(newer))
    assert StopFlush() in node.out
    assert node.core.flushing.order is None


def test_beats_alone_order_nothing():
    node = Node(session_of(2, 1, 1), "n1")
    told(node, Beat())
    assert not node.of(StartFlush)


# --- retention


def lying(step, epoch=1, good=True, ours=True, **rest):
    return Lying(f"step-{step}", step, (epoch, 0, step), good, ours, **rest)


def test_retention_keeps_what_it_promises():
    steps = [lying(step) for step in range(1, 8)]
    assert removable(steps, KeepRules(0), "step-7") == {}
    assert list(removable(steps, KeepRules(2), "step-7")) == [f"step-{n}" for n in range(1, 6)]
    # Permanent ones neither count nor go.
    assert list(removable(steps, KeepRules(2, every=3, steps=frozenset({1})), "step-7")) == ["step-2", "step-4"]
    # What latest names, what is being written, others' and what is not whole is not ours to judge.
    assert "step-2" not in removable(steps, KeepRules(2), "step-2")
    marked = [lying(n, permanent=n == 2) for n in range(1, 8)]
    assert list(removable(marked, KeepRules(2), "step-7")) == ["step-1", "step-3", "step-4", "step-5"]
    assert "step-3" not in removable(steps, KeepRules(2), "step-7", {"step-3"})
    others = [lying(step, ours=step > 5) for step in range(1, 8)]
    assert removable(others, KeepRules(2), "step-7") == {}
    bad = [lying(1), lying(2), lying(3), lying(4, good=False), lying(5, good=False)]
    assert list(removable(bad, KeepRules(2), None)) == ["step-1"]


def test_the_newest_is_that_of_the_newest_launch():
    """A step that was rolled back is not what the job stands on, however high it is."""
    steps = [lying(5, 1), lying(9, 1), lying(6, 2), lying(7, 2)]
    assert list(removable(steps, KeepRules(2), "step-7")) == ["step-5", "step-9"]
