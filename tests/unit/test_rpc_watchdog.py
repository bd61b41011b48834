"""The thread that cancels silent streams ends when it is told to, whatever it is doing."""

from __future__ import annotations

import threading

from flashckpt.rpc.watchdog import Watchdog

PATIENCE = 20.0


def test_closed_while_it_cancels():
    """Nobody wakes it after that: a node's agent waited for ever where a launch began at that moment."""
    watchdog = Watchdog(0.04)
    cancelling, go_on = threading.Event(), threading.Event()

    def cancel():
        cancelling.set()
        go_on.wait(PATIENCE)

    watched = watchdog.watch(cancel)
    watched.expect(0.0)
    assert cancelling.wait(PATIENCE)
    watchdog.forget(watched)  # nothing is left to watch, so that it would sleep without an end
    closing = threading.Thread(target=watchdog.close, daemon=True)
    closing.start()
    while not watchdog._closed:
        closing.join(0.001)
    go_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_closed_before_it_has_slept():
    for _ in range(200):
        watchdog = Watchdog(10.0)
        watchdog.forget(watchdog.watch(lambda: None))
        closing = threading.Thread(target=watchdog.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()


def test_closed_twice_and_without_a_thread():
    watchdog = Watchdog(1.0)
    watchdog.close()
    watchdog.close()
    assert watchdog._thread is None
    watchdog.watch(lambda: None)  # too late: whatever watches it ends at once
    watchdog.close()
    assert not watchdog._thread.is_alive()
