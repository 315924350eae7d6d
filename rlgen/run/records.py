"""Computes the metrics of the samples of a step, and of an evaluation."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlgen.losses.advantages import zero_variance
from rlgen.metrics import Family, Metric
from rlgen.rollout.table import RowTable
from rlgen.run.estimates import MeanEstimate, mean_of_prompts, pass_at_k

# Of each of `CAUSES`, why rewards fail: the metric that counts the samples.
FAILURES = (Family.REWARD_ERRORS, Family.REWARD_TIMEOUTS, Family.REWARD_DIED, Family.REWARD_MEMORY)
ROUNDING = 1e-9  # a weighted sum of rewards may fall this much below the threshold that it reaches


def finite_or_text(value: float | None) -> float | str | None:
    """Returns a finite number or None unchanged, and any other number as text ("nan", "inf"), which JSON can hold."""
    return value if value is None or math.isfinite(value) else str(value)


def sample_metrics(table: RowTable) -> dict[str, Any]:
    """Returns means over the samples of a step; None where there is nothing to average. Samples without a reward are left out.

    `groups/zero_std` is the share of groups with equal rewards, among those with two scored samples or more.
    """
    lengths: list[int] = table.sampled_tokens.tolist()
    constant = zero_variance(torch.from_numpy(table.reward), torch.from_numpy(table.group_id)).tolist()
    scored = known(table.reward)
    metrics: dict[str, Any] = {
        Metric.REWARD_MEAN: _mean(scored),
        Metric.REWARD_STD: _std(scored),
        Metric.REWARD_UNSCORED: len(table) - len(scored),
        Metric.GROUPS_ZERO_STD: _mean(constant),
        Metric.COMPLETIONS_MEAN_TOKENS: _mean(lengths),
        Metric.COMPLETIONS_MIN_TOKENS: min(lengths, default=None),
        Metric.COMPLETIONS_MAX_TOKENS: max(lengths, default=None),
        Metric.COMPLETIONS_TRUNCATED: _mean(table.truncated.tolist()),
        Metric.TOKENS_GENERATED: sum(lengths),
    }
    for k, name in enumerate(table.labels if len(table) else ()):
        values = known(table.rewards[:, k])
        metrics[Family.REWARD_MEAN.of(name)] = _mean(values)
        metrics[Family.REWARD_STD.of(name)] = _std(values)
        failed = Counter(table.causes[:, k].tolist())
        del failed[-1]
        metrics[Family.REWARD_FAILED.of(name)] = failed.total()
        metrics |= {family.of(name): failed[place] for place, family in enumerate(FAILURES) if failed.total()}
    return metrics


def turn_metrics(table: RowTable, counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns how many turns the conversations of a step have. `counts`: what happened in all replies of the step."""
    turns: list[int] = table.turns.tolist()
    return {
        Metric.TURNS_MEAN: _mean(turns),
        Metric.TURNS_MAX: max(turns, default=None),
        Metric.TURNS_REPLY_TOKENS: _mean((table.completion_tokens - table.sampled_tokens).tolist()),
        **{Family.TOOLS.of(name): counts[name] for name in sorted(counts)},
    }


def known(values: NDArray[np.float64]) -> list[float]:
    return list(values[~np.isnan(values)].tolist())


def staleness_metrics(table: RowTable, version: int, dropped: int) -> dict[str, Any]:
    """Returns the age of the weights that sampled, in weight versions, when the step started to train `version`."""
    ages: list[int] = (version - table.weight_version).tolist()
    return {
        Metric.ROLLOUT_STALENESS_MEAN: _mean(ages),
        Metric.ROLLOUT_STALENESS_MAX: max(ages, default=None),
        Metric.ROLLOUT_MIXED: _mean((table.newest_version > table.weight_version).tolist()),
        Metric.ROLLOUT_DROPPED_STALE: dropped,
    }


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
        Metric.EVAL_MEAN_TOKENS: _mean(table.sampled_tokens.tolist()),
        Metric.EVAL_TRUNCATED: _mean(table.truncated.tolist()),
        Metric.EVAL_PROMPTS: len(np.unique(table.group_id)),
    }
    for k in [1 << power for power in range(group_size.bit_length())]:  # 1, 2, 4, … up to `group_size`
        families = (Family.EVAL_PASS, Family.EVAL_PASS_LOW, Family.EVAL_PASS_HIGH)
        metrics |= {family.of(str(k)): value for family, value in zip(families, chance_of(rewards, k, threshold), strict=True)}
    for column, label in enumerate(table.labels):
        values = [statistics.fmean(of_prompt) for of_prompt in by_prompt(table, table.rewards[:, column])]
        metrics[Family.EVAL_REWARD.of(label)] = _mean(values)
        metrics[Family.EVAL_FAILED.of(label)] = int((table.causes[:, column] >= 0).sum())
    return metrics


def by_prompt(table: RowTable, values: NDArray[np.float64]) -> list[list[float]]:
    """Returns the values that are not NaN, in one list for each prompt that has any."""
    found: dict[int, list[float]] = {}
    for group, value in zip(table.group_id.tolist(), values.tolist(), strict=True):
        if not math.isnan(value):
            found.setdefault(group, []).append(value)
    return list(found.values())


def chance_of(rewards: Sequence[Sequence[float]], k: int, threshold: float) -> MeanEstimate:
    """Returns pass@k over the prompts with `k` scored completions or more, from the rewards of each prompt."""
    enough = [values for values in rewards if len(values) >= k]
    correct = [sum(value >= threshold - ROUNDING for value in values) for values in enough]
    found = mean_of_prompts([pass_at_k(len(values), right, k) for values, right in zip(enough, correct, strict=True)])
    if found.low is None or found.high is None:
        return found
    return MeanEstimate(found.mean, max(found.low, 0.0), min(found.high, 1.0))  # Student's interval knows no range


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
