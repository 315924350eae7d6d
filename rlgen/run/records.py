"""What is written about the samples of a step."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from rlgen.losses.advantages import zero_variance
from rlgen.types import Sample

# Why rewards fail, and the metric that counts the samples of each.
CAUSES = {"error": "errors", "timeout": "timeouts", "died": "died", "memory": "memory"}


def rollout_records(
    step: int, samples: Sequence[Sample], advantages: Sequence[float], trained: Sequence[bool]
) -> list[dict[str, Any]]:
    """One object a sample for `rollouts/`: its record, its advantage, and whether it was trained on."""
    return [
        {
            "step": step,
            **{field.name: getattr(sample, field.name) for field in fields(Sample)},
            "advantage": advantage,
            "trained": was_trained,
        }
        for sample, advantage, was_trained in zip(samples, advantages, trained, strict=True)
    ]


def nonfinite_records(
    samples: Sequence[Sample], advantages: Sequence[float], old_logp: Mapping[int, Sequence[float]], rows: Collection[int]
) -> list[dict[str, Any]]:
    """One object a sample of a batch whose update was not finite; numbers that are not are texts: "nan", "inf", "-inf".

    Args:
        old_logp: [L] by row, the trainer's log-probs of the completion before the first update.
        rows: those with a number that is not finite: a log-prob, or the loss of their micro-batch.
    """
    return [
        {
            **{field.name: getattr(sample, field.name) for field in fields(Sample)},
            "sampler_logp": [as_text(value) for value in sample.sampler_logp],
            "old_logp": [as_text(value) for value in old_logp.get(row, ())],
            "advantage": as_text(advantage),
            "not_finite": row in rows,
        }
        for row, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
    ]


def as_text(value: float | None) -> float | str | None:
    """A number that JSON has, or its name."""
    return value if value is None or math.isfinite(value) else str(value)


def sample_metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Means over the samples of a step; None where there is nothing to average. Rewards of None do not count.

    `groups/zero_std` is the share of groups with equal rewards, among those with two scored samples or more.
    """
    lengths = [len(sample.completion_ids) for sample in samples]
    truncated = [sample.finish_reason == "length" for sample in samples]
    nothing = float("nan")
    rewards = torch.tensor([nothing if s.reward is None else s.reward for s in samples], dtype=torch.float64)
    constant = zero_variance(rewards, torch.tensor([sample.group_id for sample in samples], dtype=torch.long)).tolist()
    metrics: dict[str, Any] = {
        "reward/mean": _mean([s.reward for s in samples if s.reward is not None]),
        "reward/std": _std([s.reward for s in samples if s.reward is not None]),
        "reward/unscored": sum(sample.reward is None for sample in samples),
        "groups/zero_std": _mean(constant),
        "completions/mean_tokens": _mean(lengths),
        "completions/min_tokens": min(lengths, default=None),
        "completions/max_tokens": max(lengths, default=None),
        "completions/truncated": _mean(truncated),
        "tokens/generated": sum(lengths),
    }
    for name in samples[0].rewards if samples else ():
        values = [value for sample in samples if (value := sample.rewards[name]) is not None]
        metrics[f"reward/{name}/mean"] = _mean(values)
        metrics[f"reward/{name}/std"] = _std(values)
        causes = Counter(text.partition(":")[0] for sample in samples if (text := sample.reward_errors.get(name)))
        metrics[f"reward/{name}/failed"] = causes.total()
        metrics |= {f"reward/{name}/{key}": causes[cause] for cause, key in CAUSES.items() if causes.total()}
    return metrics


def staleness_metrics(samples: Sequence[Sample], version: int, dropped: int) -> dict[str, Any]:
    """How old the weights were that sampled, in versions, when those of `version` were trained; and samples dropped for it."""
    ages = [version - sample.weight_version for sample in samples]
    return {
        "rollout/staleness_mean": _mean(ages),
        "rollout/staleness_max": max(ages, default=None),
        "rollout/dropped_stale": dropped,
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
