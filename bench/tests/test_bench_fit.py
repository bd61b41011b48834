"""Lines through figures."""

from __future__ import annotations

import pytest

from bench.fit import fit_line


def test_a_straight_line_is_found_over_decades_and_leaves_nothing() -> None:
    line = fit_line([(x, 0.002 + 3e-6 * x) for x in (10, 100, 1_000, 100_000)])
    assert line.start == pytest.approx(0.002)
    assert line.slope == pytest.approx(3e-6)
    assert line.residual == pytest.approx(0, abs=1e-9)


def test_a_bend_is_seen_in_the_residual() -> None:
    quadratic = fit_line([(x, x * x) for x in (1, 2, 3, 4, 5, 6)])
    assert quadratic.residual > 0.15


def test_small_figures_count_as_much_as_large_ones() -> None:
    """With plain least squares the last point alone would decide where the line starts."""
    line = fit_line([(1, 1.0), (2, 1.0), (3, 1.0), (1_000_000, 2_000_000.0)])
    assert line.at(1) == pytest.approx(1.0, abs=0.9)
    assert line.at(1) > 0


@pytest.mark.parametrize(
    ("points", "message"), [([(1, 1.0), (1, 2.0)], "two different x"), ([(1, 0.0), (2, 1.0)], "every y above 0")]
)
def test_what_no_line_fits_is_refused(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_line(points)
