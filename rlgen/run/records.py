"""Computes the metrics of the samples of a step."""

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
from rlgen.rollout.table import CAUSES as FAILED
from rlgen.rollout.table import RowTable

# Why rewards fail, and the metric that counts the samples of each.
CAUSES = {
    "error": Family.REWARD_ERRORS,
    "timeout": Family.REWARD_TIMEOUTS,
    "died": Family.REWARD_DIED,
    "memory": Family.REWARD_MEMORY,
}


def as_text(value: float | None) -> float | str | None:
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
        metrics |= {CAUSES[cause].of(name): failed[place] for place, cause in enumerate(FAILED) if failed.total()}
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


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
