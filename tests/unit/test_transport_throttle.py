"""The bandwidth limit, on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from flashckpt.errors import ConfigError
from flashckpt.move.throttle import Throttle


class Time:
    def __init__(self):
        self.now = 100.0
        self.slept = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("limit", [None, 0])
def test_no_limit(limit):
    time = Time()
    throttle = Throttle(limit, time.clock, time.sleep)
    assert throttle.take(1 << 40) == 0
    assert time.slept == []


@pytest.mark.parametrize("chunk", [1, 1000, 50_000, 1_000_000])
def test_rate_is_kept_whatever_the_pieces(chunk):
    time = Time()
    throttle = Throttle(1_000_000, time.clock, time.sleep)
    sent = 0
    while sent < 3_000_000:
        throttle.take(chunk)
        sent += chunk
        if chunk == 1 and sent == 200_000:
            break
    assert sent <= 1_000_000 * (time.now - 100) + 50_000 + 1
    assert time.now - 100 <= sent / 1_000_000 + 1e-6, "and it is used"


def test_a_pause_saves_up_one_burst_and_no_more():
    time = Time()
    throttle = Throttle(1000, time.clock, time.sleep)
    time.now += 3600
    assert throttle.take(50) == 0
    assert throttle.take(500) == pytest.approx(0.5)


def test_takers_pay_in_turn():
    """Together they keep the limit: each sleep is longer than the one before, on a clock that stands still."""
    slept = []
    throttle = Throttle(1000, lambda: 0.0, slept.append)
    threads = [threading.Thread(target=throttle.take, args=(1000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == pytest.approx([n + 1 - 0.05 for n in range(8)])


@pytest.mark.parametrize("limit", [-1, float("inf"), float("nan")])
def test_bad_limits(limit):
    with pytest.raises(ConfigError, match="bytes_per_second"):
        Throttle(limit)


def test_negative_sizes():
    with pytest.raises(ConfigError, match="size_bytes"):
        Throttle(1).take(-1)
