"""What the soak calls flat."""

from __future__ import annotations

import random

from tests.soak import trend


def judged(values, bound=100.0, slack=5.0):
    return trend("agent", "descriptors", [(10.0 * i, value) for i, value in enumerate(values)], bound, slack)


def test_warming_up_and_noise_are_flat():
    noise = random.Random(1)
    assert judged([0, 10, 18, 20] + [20 + noise.choice((-2, 0, 2)) for _ in range(12)]).is_flat
    assert judged([20] * 16).per_hour == 0


def test_one_more_in_each_measurement_is_not():
    rising = judged(list(range(20, 36)))
    assert not rising.is_flat
    assert round(rising.per_hour) == 360


def test_too_few_points_say_nothing():
    assert judged([1, 2, 3, 50]).is_flat
