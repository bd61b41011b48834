"""The roll: all ranks begin a collective call together or none does; who is missing is named; saves stop waiting."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from flashckpt.errors import DeadlineError, FlashError, OtherRankError
from flashckpt.ranks import roll as rolls
from flashckpt.ranks.roll import VAIN_SAVES, Roll


class Ranks:
    """Ranks as threads over one store."""

    def __init__(self, world, **options):
        self.store = HashStore()
        self.rolls = [Roll(self.store, rank, world, **options) for rank in range(world)]

    def call(self, steps, *, call="save", timeout=0.3):
        """`steps`: rank → step. Returns rank → None, or the error."""
        results = {}

        def one(rank, step):
            try:
                results[rank] = self.rolls[rank].meet(call, f"step {step}", timeout, step=step)
            except FlashError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=item) for item in steps.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == len(steps), "a rank waits for ever"
        return results


def test_all_ranks_meet_again_and_again():
    ranks = Ranks(3)
    for step in range(5):
        assert ranks.call(dict.fromkeys(range(3), step), timeout=20) == dict.fromkeys(range(3))


def test_a_missing_rank_is_named_in_the_log_and_in_the_error_of_every_other(caplog, monkeypatch):
    monkeypatch.setattr(rolls, "NOTICE_SECONDS", 0.1)
    results = Ranks(3).call({0: 1, 2: 1})
    for error in results.values():
        assert isinstance(error, DeadlineError)
        assert "rank 1 has not called save()" in error.message
        assert "on every rank" in error.hint
        assert error.missing == [1]
    assert sum("rank 1 has not called save()" in line for line in caplog.messages) == 2


def test_saves_stop_waiting_until_the_missing_rank_was_seen_again():
    ranks = Ranks(3)
    for step in range(VAIN_SAVES):
        assert all(isinstance(error, DeadlineError) for error in ranks.call({0: step, 2: step}).values())
    for step in (2, 3):
        for error in ranks.call({0: step, 2: step}, timeout=60).values():
            assert isinstance(error, OtherRankError)
            assert "did not wait for rank 1" in error.message
    # It is back at step 4; whichever rank looks first, all wait from step 5 on.
    back = ranks.call({1: 4}, timeout=60)
    assert "wait again" in back[1].message
    assert all(isinstance(error, OtherRankError) for error in ranks.call({0: 4, 2: 4}, timeout=60).values())
    assert ranks.call(dict.fromkeys(range(3), 5), timeout=60) == dict.fromkeys(range(3))


def test_a_rank_that_is_late_joins_the_round_that_the_others_are_at():
    ranks = Ranks(2)
    assert isinstance(ranks.call({0: 1})[0], DeadlineError)
    assert ranks.rolls[1].missed().missing == (1,)
    assert ranks.call({0: 2, 1: 2}, timeout=20) == {0: None, 1: None}
    assert ranks.rolls[1].missed() is None


def test_a_rank_that_is_late_does_not_wait_for_a_step_that_the_others_gave_up():
    """They may be waiting for it in a collective of the next step."""
    ranks = Ranks(2)
    assert isinstance(ranks.call({0: 1})[0], DeadlineError)
    assert "gave step 1 up: rank 1 has not called save()" in ranks.call({1: 1}, timeout=60)[1].message
    assert ranks.call({0: 2, 1: 2}, timeout=20) == {0: None, 1: None}


def test_different_steps_are_named_on_all_ranks():
    results = Ranks(3).call({0: 10, 1: 11, 2: 10}, timeout=20)
    for error in results.values():
        assert isinstance(error, OtherRankError)
        assert "save(step 10) on ranks [0, 2], save(step 11) on rank 1" in error.message


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_missing_keys_are_found_by_halves(world, there):
    store = HashStore()
    for number in there:
        store.set(f"x/{number}", "1")
    assert rolls._absent(store, "x/", 0, world) == sorted(set(range(world)) - there)


def test_the_ranks_behind_are_known_by_their_last_step():
    ranks = Ranks(3)
    assert ranks.rolls[0].behind(1) == {1: None, 2: None}
    for rank, step in enumerate((7, 7, 5)):
        ranks.rolls[rank].note_step(step)
    assert ranks.rolls[0].behind(7) == {2: 5}
    assert ranks.rolls[2].behind(8) == {0: 7, 1: 7}


def test_a_rank_that_has_ended_is_named_long_before_the_deadline(monkeypatch):
    monkeypatch.setattr(rolls, "LOOK_SECONDS", 0.05)
    ranks = Ranks(2, ended=lambda: {1: "rank 1 ended (signal 9) on node2"})
    error = ranks.call({0: 1}, timeout=60)[0]
    assert "rank 1 ended (signal 9) on node2" in error.message
    assert isinstance(ranks.call({0: 2}, timeout=60)[0], OtherRankError)  # the next one does not wait


def test_without_a_store_nobody_waits():
    Roll(None, 0, 2).meet("save", "", 60)

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection reset")

    Roll(Gone(), 0, 2).meet("save", "", 60)


@settings(max_examples=40)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=6))
def test_all_who_call_hear_the_same_and_in_the_end_all_meet(rounds):
    """Any ranks may miss any calls: callers either all go or all fail; two calls of all later, all go."""
    ranks = Ranks(3)
    for step, callers in enumerate(rounds):
        results = ranks.call(dict.fromkeys(callers, step), timeout=0.05)
        if any(error is None for error in results.values()):
            assert results == dict.fromkeys(range(3))
    first = len(rounds)
    for step in range(first, first + VAIN_SAVES + 1):
        results = ranks.call(dict.fromkeys(range(3), step), timeout=20)
    assert results == dict.fromkeys(range(3))
