"""Which launches may take a job over: the decision, apart from who is asked."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import OtherRankError, StorageError
from flashckpt.ranks.topology import Node, Topology
from flashckpt.start.claim import refuse_beside_live
from flashckpt.start.claimants import (
    ENDING_GRACE_SECONDS,
    GRACE_SECONDS,
    ClaimAnswer,
    Trainer,
    decide,
    describe,
    live_job,
    others,
)
from flashckpt.store.owner import Owner
from flashckpt.types import Claimant, Launch

LAUNCHES = st.builds(Launch, st.integers(1, 3), st.integers(0, 2))
CLAIMANTS = st.builds(
    Claimant,
    process=st.sampled_from([f"process{i}" for i in range(6)]),
    pid=st.integers(1, 9),
    rank=st.integers(0, 7),
    launch=LAUNCHES,
    claimed_at=st.floats(0, 2e9),
    is_ending=st.booleans(),
)
TRAINERS = st.lists(st.builds(Trainer, st.sampled_from("abc"), CLAIMANTS), max_size=8)
PROCESSES = st.frozensets(st.sampled_from([f"process{i}" for i in range(6)]))


@given(TRAINERS, PROCESSES, LAUNCHES)
def test_only_other_processes_of_another_launch_count(found, processes, launch):
    strangers = others(found, processes, launch)
    assert {one for one in found if one.claimant.process not in processes and one.claimant.launch != launch} == set(
        strangers
    )
    ranks = [one.claimant.rank for one in strangers]
    assert ranks == sorted(ranks)


@given(TRAINERS, st.floats(0, 60))
def test_nothing_is_taken_beside_anybody_and_every_wait_ends(found, waited):
    answer, reason = decide(found, waited)
    assert reason
    assert (answer is ClaimAnswer.TAKE) == (not found)
    if waited >= ENDING_GRACE_SECONDS:
        assert answer is not ClaimAnswer.WAIT
    if waited < GRACE_SECONDS:
        assert answer is not ClaimAnswer.REFUSE
    if waited >= GRACE_SECONDS and not all(one.claimant.is_ending for one in found):
        assert answer is ClaimAnswer.REFUSE


@given(TRAINERS.filter(bool))
def test_the_error_names_who_where_and_since_when(found):
    error = pickle.loads(pickle.dumps(live_job("run1", found)))
    assert error.code == "FC-JOB-002"
    first = found[0]
    assert f"rank {first.claimant.rank} (process {first.claimant.pid} on {first.node})" in error.message
    assert len(error.trainers) == len(found)
    assert error.trainers[0]["since"] == first.claimant.claimed_at
    assert "take_over=True" in error.hint


class Gathering:
    """A group of two whose other rank says `told`."""

    def __init__(self, told):
        self.said, self._told = [], told

    def gather(self, message, what):
        self.said.append(json.loads(message))
        return [json.dumps(self._told).encode(), message]


@pytest.mark.parametrize("fails_here", [True, False])
def test_a_rank_that_can_not_tell_which_process_it_is_keeps_nobody_waiting(monkeypatch, fails_here):
    """For want of descriptors, say: all ranks meet, and each of them hears of it."""
    topology = Topology(1, 2, (Node("a", "", (0, 1)),), (0, 1))
    if fails_here:
        group = Gathering(["process0", []])
        monkeypatch.setattr(Owner, "current", lambda: raised(StorageError("too many open files")))
        error = StorageError
    else:
        group = Gathering(["", [], "StorageError: too many open files"])
        error = OtherRankError
    with pytest.raises(error, match="too many open files"):
        refuse_beside_live(group, topology, None, "job")
    (said,) = group.said
    assert said[2:] == (["StorageError: too many open files"] if fails_here else [])


def raised(error):
    raise error


def test_a_few_trainers_are_named_and_the_others_counted():
    trainers = [Trainer("a", Claimant(f"p{rank}", 10 + rank, rank, Launch(1, 0), 0.0, False)) for rank in range(6)]
    assert describe(trainers[:1]) == "rank 0 (process 10 on a)"
    assert describe(trainers[:4]).endswith("rank 3 (process 13 on a)")
    assert describe(trainers).endswith("rank 3 (process 13 on a) and 2 more")
