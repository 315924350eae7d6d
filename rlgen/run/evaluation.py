"""Computes the metrics of an evaluation."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlgen.metrics import Family, Metric
from rlgen.rollout.table import RowTable
from rlgen.run.estimates import Estimate, mean_of_prompts, pass_at_k

ROUNDING = 1e-9  # a weighted sum of rewards may fall this much below the threshold that it reaches


def evaluation_metrics(table: RowTable, group_size: int, threshold: float) -> dict[str, Any]:
    """Returns the metrics of an evaluation; None where there is nothing to average. Completions without a reward are left out.

    `table` has the rows of all processes, and a completion is correct if its reward is at least `threshold`.
    """
    rewards = by_prompt(table, table.reward)
    mean = mean_of_prompts([statistics.fmean(values) for values in rewards])
    metrics: dict[str, Any] = {
        Metric.EVAL_REWARD_MEAN: mean.mean,
        Metric.EVAL_REWARD_LOW: mean.low,
        Metric.EVAL_REWARD_HIGH: mean.high,
        Metric.EVAL_REWARD_UNSCORED: int(np.isnan(table.reward).sum()),
        Metric.EVAL_MEAN_TOKENS: statistics.fmean(table.sampled_tokens.tolist()) if len(table) else None,
        Metric.EVAL_TRUNCATED: statistics.fmean(table.truncated.tolist()) if len(table) else None,
        Metric.EVAL_PROMPTS: len(np.unique(table.group_id)),
    }
    for k in powers_of_two(group_size):
        chance = chance_of(rewards, k, threshold)
        metrics[Family.EVAL_PASS.of(str(k))] = chance.mean
        metrics[Family.EVAL_PASS_LOW.of(str(k))] = chance.low
        metrics[Family.EVAL_PASS_HIGH.of(str(k))] = chance.high
    for column, label in enumerate(table.labels):
        values = [statistics.fmean(of_prompt) for of_prompt in by_prompt(table, table.rewards[:, column])]
        metrics[Family.EVAL_REWARD.of(label)] = statistics.fmean(values) if values else None
        metrics[Family.EVAL_FAILED.of(label)] = int((table.causes[:, column] >= 0).sum())
    return metrics


def by_prompt(table: RowTable, values: NDArray[np.float64]) -> list[list[float]]:
    """Returns the values that are not NaN, in one list for each prompt that has any."""
    found: dict[int, list[float]] = {}
    for group, value in zip(table.group_id.tolist(), values.tolist(), strict=True):
        if not math.isnan(value):
            found.setdefault(group, []).append(value)
    return list(found.values())


def chance_of(rewards: Sequence[Sequence[float]], k: int, threshold: float) -> Estimate:
    """Returns pass@k over the prompts with `k` scored completions or more, from the rewards of each prompt."""
    enough = [values for values in rewards if len(values) >= k]
    correct = [sum(value >= threshold - ROUNDING for value in values) for values in enough]
    found = mean_of_prompts([pass_at_k(len(values), right, k) for values, right in zip(enough, correct, strict=True)])
    if found.low is None or found.high is None:
        return found
    return Estimate(found.mean, max(found.low, 0.0), min(found.high, 1.0))  # Student's interval knows no range


def powers_of_two(most: int) -> Iterator[int]:
    """Yields 1, 2, 4, … up to `most`."""
    k = 1
    while k <= most:
        yield k
        k *= 2
