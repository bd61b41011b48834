"""The garbage collector rests while a plan is made, and is as it was before afterwards."""

from __future__ import annotations

import gc
import threading

import pytest

from flashckpt.collector import collector_paused


@pytest.fixture(autouse=True)
def as_it_was():
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_it_rests_within_and_works_afterwards():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_whoever_switched_it_off_keeps_it_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_an_error_wakes_it_up():
    with pytest.raises(ValueError, match="x"), collector_paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_of_two_threads_the_last_one_wakes_it_up():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collector_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join(60)
    assert gc.isenabled()
