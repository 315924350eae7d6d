"""Intervals: their values against formulas, and how often they hold the truth."""

import math

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from rlgen.analysis.interval import Interval, block_size, of_difference, of_mean, of_series, reach_of_mean, student


def bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 4.075, 10, 37.3, 1e3, 1e6])
def test_students_quantile(freedom: float) -> None:
    """P(|t| > q) is the regularised incomplete beta function at freedom / (freedom + q^2)."""
    below = freedom / (freedom + student(freedom) ** 2)
    assert float(mpmath.betainc(freedom / 2, 0.5, 0, below, regularized=True)) == pytest.approx(0.05, abs=1e-9)


def test_the_interval_of_a_mean() -> None:
    """1, 2, 3, 4: standard deviation sqrt(5 / 3), t of 3 degrees of freedom 3.182446."""
    reach = 3.182446 * math.sqrt(5 / 3) / 2
    assert bounds(of_mean([1, 2, 3, 4])) == pytest.approx((2.5, 2.5 - reach, 2.5 + reach))
    assert reach_of_mean(np.array([[1.0, 5], [2, 5], [3, 5], [4, 5]])) == pytest.approx([reach, 0])


def test_welchs_interval_of_a_difference() -> None:
    """Equal variances: 4 degrees of freedom. Others: 1/3 and 5/3 of squared error, so 2^2 / ((1/3)^2 / 2 + (5/3)^2 / 3)."""
    reach = 2.776445 * math.sqrt(2 / 3)
    assert bounds(of_difference([1, 2, 3], [4, 5, 6])) == pytest.approx((-3, -3 - reach, -3 + reach))
    reach = student(4 / (1 / 18 + 25 / 27)) * math.sqrt(2)
    assert bounds(of_difference([1, 2, 3], [2, 4, 6, 8])) == pytest.approx((-3, -3 - reach, -3 + reach))
    assert bounds(of_difference([1, 1], [2, 2])) == (-1, -1, -1), "no variance"


def test_blocks_are_larger_where_neighbours_are_alike() -> None:
    noise = np.random.default_rng(0).normal(size=96)
    smooth = np.convolve(noise, np.ones(6) / 6, "same")
    assert [block_size(values) for values in ([1.0, -1.0] * 12, np.arange(24.0), [3.0] * 24)] == [2, 8, 2]
    assert (block_size(noise), block_size(smooth)) == (4, 32)


def test_the_interval_of_a_series_by_hand() -> None:
    """0, 0, 1, 1 in blocks of two: means on the ring of 0, 1/2, 1, 1/2, of variance 1/8; two blocks, one degree of freedom."""
    reach = 12.706205 * math.sqrt(1 / 8)
    assert block_size([0, 0, 1, 1]) == 2 and bounds(of_series([0, 0, 1, 1])) == pytest.approx((0.5, 0.5 - reach, 0.5 + reach))


def test_the_closed_form_is_what_resampling_finds() -> None:
    rng = np.random.default_rng(1)
    values = autoregressive(rng, 0.4, 1, 48)[0]
    size = block_size(values)
    blocks = len(values) // size
    assert len(values) % size == 0, "or a resample would have another length"
    starts = rng.integers(0, len(values), (40_000, blocks, 1))
    means = values[(starts + np.arange(size)) % len(values)].mean(axis=(1, 2))
    found = of_series(values)
    error = (found.high - found.value) / student(blocks - 1)
    assert means.std() * math.sqrt(blocks / (blocks - 1)) == pytest.approx(error, rel=0.02)


def autoregressive(rng: np.random.Generator, correlation: float, rows: int, length: int) -> NDArray[np.float64]:
    """Rows of a process of mean 0 whose neighbours have that correlation."""
    made = rng.normal(size=(rows, length + 50))
    for place in range(1, length + 50):
        made[:, place] += correlation * made[:, place - 1]
    return made[:, 50:]


@pytest.mark.parametrize(
    "correlation, length, least", [(0.0, 25, 0.94), (0.5, 25, 0.93), (0.5, 100, 0.93), (0.8, 100, 0.93), (0.8, 25, 0.9)]
)
def test_intervals_of_a_series_cover(correlation: float, length: int, least: float) -> None:
    """Of 1000 intervals; those that take neighbours for independent are told apart."""
    rows = autoregressive(np.random.default_rng(2), correlation, 1000, length)
    intervals = [of_series(row) for row in rows]
    share, naive = (float(np.mean([one.low < 0 < one.high for one in found])) for found in (intervals, map(of_mean, rows)))
    assert least <= share <= 0.98, share
    assert (naive < 0.8) == (correlation > 0), naive


def test_intervals_of_a_difference_cover() -> None:
    """Three seeds that vary little, and five that vary three times as much."""
    rng = np.random.default_rng(3)
    pairs = [(rng.normal(0.3, 0.1, 3), rng.normal(0.1, 0.3, 5)) for _ in range(1000)]
    share = float(np.mean([one.low < 0.2 < one.high for one in (of_difference(*pair) for pair in pairs)]))
    assert 0.93 <= share <= 0.97
