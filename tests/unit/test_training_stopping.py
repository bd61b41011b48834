"""Where to stop: one step for all ranks, whoever of them was signalled, and without a word of trouble."""

from __future__ import annotations

import logging
import signal

import pytest
from torch.distributed import HashStore

from flashckpt.training import stopping
from flashckpt.training.stopping import SignalHandlers, StopBoard


@pytest.fixture
def boards(monkeypatch):
    """Two ranks of one launch, whose store is not the job's."""
    store = HashStore()
    monkeypatch.setattr(stopping, "job_store", lambda name: store)
    return [StopBoard("launch", 2) for _ in range(2)]


def handlers(board):
    return SignalHandlers([], deadline=60.0, board=board, exit_code=None)


def test_a_process_alone_stops_where_it_is():
    board = StopBoard("launch", 1)
    assert board.read() is None
    assert board.propose(5) == 5
    assert board.propose(6) == 5
    assert board.read() == 5


def test_all_ranks_stop_at_the_step_after_that_of_the_one_that_was_signalled(boards):
    mine, other = boards
    assert other.read() is None
    assert mine.propose(5) == 6
    assert other.read() == 6
    # The other one was signalled too, a step later: the first word counts.
    assert other.propose(6) == 6
    assert mine.propose(7) == 6


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_a_step_apart_take_the_same_last_snapshot(boards, ahead, caplog):
    mine, other = map(handlers, boards)
    assert not mine.is_final(4)
    mine._note(signal.SIGTERM, None)
    if ahead:  # the other rank has finished step 5 already when this one asks
        assert not other.is_final(5)
    assert not mine.is_final(5)
    if not ahead:
        assert not other.is_final(5)
    assert other.is_final(6)
    assert mine.is_final(6)
    assert other.requested
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_process_alone_that_is_signalled_stops_without_a_warning(caplog):
    one = handlers(StopBoard("launch", 1))
    assert not one.is_final(4)
    one._note(signal.SIGTERM, None)
    assert one.is_final(5)
    assert caplog.records == []


def test_a_rank_whose_store_is_gone_stops_at_its_own_step_and_says_so(caplog):
    class Gone:
        def read(self):
            raise RuntimeError("connection reset")

        def propose(self, step):
            return self.read()

    one = handlers(Gone())
    assert not one.is_final(4)
    one._note(signal.SIGTERM, None)
    assert one.is_final(5)
    assert "can't agree with the other ranks on the step to stop at (connection reset)" in caplog.text
