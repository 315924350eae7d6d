"""Estimates from the completions of held-out prompts: pass@k, and the interval of a mean over prompts. Pure functions."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

LEVEL = 0.95  # of the intervals


class MeanEstimate(NamedTuple):
    """A mean with its 95 % interval. MeanEstimate(mean=0.5, low=0.43, high=0.57); no interval: fewer than two values."""

    mean: float | None
    low: float | None
    high: float | None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the chance that one of `k` completions is correct, of which `n` were sampled and `correct` are.

    This is 1 - C(n - correct, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (2107.03374): the share of all sets of `k`
    of the `n` completions that hold a correct one.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_of_prompts(values: Sequence[float]) -> MeanEstimate:
    """Returns the mean of one value for each prompt, with Student's t-interval.

    Prompts are drawn, and the completions of a prompt are not independent. So the interval is over prompts: clustered standard
    errors (Miller 2024, 2411.00640). It says how far the mean would move with other prompts of the same kind. Sums are exact, and
    do not depend on the order of the values.
    """
    if len(values) < 2:
        return MeanEstimate(values[0] if values else None, None, None)
    mean = statistics.fmean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = student(len(values) - 1) * math.sqrt(variance / len(values))
    return MeanEstimate(mean, mean - half, mean + half)


@cache
def student(freedom: float) -> float:
    """Returns the number that Student's t of this freedom, one or more, exceeds in absolute value in 5 of 100 cases.

    With t = sqrt(freedom) tan(angle), the share of cases below it is an integral of cos(angle) ** (freedom - 1).
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        inside = scale * angle * float(weights @ np.cos((nodes + 1) / 2 * angle) ** (freedom - 1))
        low, high = (angle, high) if inside < LEVEL else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)
