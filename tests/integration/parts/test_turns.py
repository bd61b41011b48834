from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import turns
from tests.turns import turn


def test_one_that_is_alone_meets_nobody_and_the_others_meet_each_other(tmp_path):
    inside, met, guard = set(), set(), threading.Lock()

    def take(who, alone):
        for _ in range(10):
            with turn(tmp_path, alone=alone):
                with guard:
                    inside.add(who)
                time.sleep(0.005)
                with guard:
                    met.update(frozenset((who, other)) for other in inside - {who})
                    inside.discard(who)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(take, who, who in "AB") for who in "ABcd"]:
            done.result()
    assert met == {frozenset("cd")}


def test_those_who_share_do_not_keep_one_waiting_that_is_alone(tmp_path):
    over = threading.Event()

    def share():
        while not over.is_set():
            with turn(tmp_path, alone=False):
                time.sleep(0.02)

    threads = [threading.Thread(target=share) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with turn(tmp_path, alone=True):
            pass
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # pytest-timeout has a thread
def test_a_forked_child_does_not_keep_the_turn(tmp_path):
    with turn(tmp_path, alone=True):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    try:
        with turn(tmp_path, alone=True):
            pass
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_turn_that_never_comes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    with (
        turn(tmp_path, alone=True),
        pytest.raises(TimeoutError, match="it is still locked"),
        turn(tmp_path, alone=False),
    ):
        pytest.fail("the room is taken")
