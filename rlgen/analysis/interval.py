"""Computes 95 % intervals: of a mean, of the difference of two means, and of the mean of a series with correlated neighbours.

Why not scipy: of what is needed here it has Student's quantile and Welch's interval, about ten lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rlgen.run.estimates import student

LEAST = 4  # values of a series: with fewer there are no two blocks of two
Values = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval. Interval(value=0.12, low=0.05, high=0.19)"""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def of_mean(values: Values) -> Interval:
    """Returns the mean of two independent values or more, with Student's interval."""
    return around(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values) - 1)


def reach_of_mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns how far Student's interval of the mean over the rows [values, ...] reaches to each side."""
    return np.asarray(np.std(rows, axis=0, ddof=1) * (student(len(rows) - 1) / math.sqrt(len(rows))))


def of_difference(left: Values, right: Values) -> Interval:
    """Returns the mean of `left` less that of `right`, two values or more each, with Welch's interval: variances may differ."""
    parts = [float(np.var(side, ddof=1)) / len(side) for side in (left, right)]
    shares = [part**2 / (len(side) - 1) for part, side in zip(parts, (left, right), strict=True)]
    # Without any variance the freedom does not matter: the interval is a point.
    freedom = sum(parts) ** 2 / sum(shares) if sum(shares) else 1.0
    return around(float(np.mean(left) - np.mean(right)), math.sqrt(sum(parts)), freedom)


def of_series(values: Values) -> Interval:
    """Returns the mean of a series of `LEAST` values or more, with an interval by the circular block bootstrap.

    Blocks of neighbours preserve their correlation (Politis and Romano, 1992). Nothing is drawn, because the variance over all
    resamples has a closed form: the variance of the means of the n blocks on a ring, divided by the number of blocks in a
    resample. Because blocks are few, the divisor is one less, and Student's quantile replaces the normal one.
    """
    size = block_size(values)
    blocks = len(values) / size
    means = sliding_window_view(np.append(values, values[: size - 1]), size).mean(axis=1)
    return around(float(np.mean(values)), float(np.std(means)) / math.sqrt(blocks - 1), blocks - 1)


def block_size(values: Values) -> int:
    """Returns the number of neighbours that a block of a series holds, from the correlation of neighbours.

    Twice the size with the smallest error of the variance for a first-order autoregression (Politis and White, 2004), because an
    interval needs larger blocks to cover than a variance does. At least two, and a third of a series of six or more at most.
    """
    count = len(values)
    apart = np.asarray(values) - np.mean(values)
    power = float(apart @ apart)
    correlation = float(apart[1:] @ apart[:-1]) / power if power else 0.0
    correlation += (1 + 3 * correlation) / count  # the estimate is too small by about that much (Kendall, 1954)
    correlation = min(max(correlation, 0.0), 0.97)
    best = (6 * correlation**2 / (1 - correlation**2) ** 2 * count) ** (1 / 3)
    return min(max(2, math.ceil(2 * best)), max(2, count // 3))


def around(value: float, error: float, freedom: float) -> Interval:
    """Returns the interval around an estimate with this standard error."""
    reach = student(freedom) * error
    return Interval(value, value - reach, value + reach)
