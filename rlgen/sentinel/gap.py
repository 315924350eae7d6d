"""The distance between two sets of log-probs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.types import Sample


@dataclass(frozen=True, slots=True)
class Gap:
    """|Δ|, Δ = trainer - engine log-prob of a sampled token, over the tokens of a probe, in nats."""

    max_delta: float
    mean_delta: float
    p999_delta: float  # nearest rank

    @classmethod
    def of(cls, delta: Tensor) -> "Gap":
        """delta: [N]. Without any value, or with one that is not a number, all three are not numbers."""
        size = delta.double().abs().flatten().sort().values
        if not len(size) or not size.isfinite().all():
            return cls(math.nan, math.nan, math.nan)
        return cls(size[-1].item(), size.mean().item(), size[math.ceil(0.999 * len(size)) - 1].item())

    def as_measured(self, by_max: bool) -> dict[str, float]:
        """The value that is bounded comes first."""
        largest = {"max_delta": self.max_delta, "p999_delta": self.p999_delta}
        return {**largest, "mean_delta": self.mean_delta} if by_max else {"mean_delta": self.mean_delta, **largest}


def sampler_logp(samples: Sequence[Sample]) -> list[Tensor]:
    """What the engine reported: one [L] float64 tensor a sample."""
    return [torch.tensor(sample.sampler_logp, dtype=torch.float64) for sample in samples]


def compare(samples: Sequence[Sample], logp: Sequence[Tensor]) -> Gap:
    """The gap between what the engine reported and `logp`, one [L] tensor a sample."""
    return between(logp, sampler_logp(samples))


def between(one: Sequence[Tensor], other: Sequence[Tensor]) -> Gap:
    """The gap between two lists of [L] tensors."""
    return Gap.of(torch.cat([a.double() - b.double() for a, b in zip(one, other, strict=True)]))
