"""Measures the distance between two sets of log-probs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgen.losses.order import Total, alone
from rlgen.types import Sample


@dataclass(frozen=True, slots=True)
class Gap:
    """Statistics of |Δ|, Δ = trainer - engine log-prob of a sampled token, over the tokens of a probe, in nats."""

    max_delta: float
    mean_delta: float
    rms_delta: float  # root of the mean square

    @classmethod
    def of(cls, delta: Tensor, total: Total = alone) -> "Gap":
        """Measures [N] differences, together with those of all processes that `total` reduces over.

        All three values are NaN if there is no difference at all, or one is not finite.
        """
        size = delta.double().abs().flatten()
        count, finite, added, squares = total(
            torch.tensor([len(size), size.isfinite().sum(), size.sum(), size.square().sum()], dtype=torch.float64), "sum"
        ).tolist()
        if not count or finite < count:
            return cls(math.nan, math.nan, math.nan)
        largest = total(size.max() if len(size) else torch.tensor(0.0, dtype=torch.float64), "max").item()
        return cls(largest, added / count, math.sqrt(squares / count))


def sampler_logp(samples: Sequence[Sample]) -> list[Tensor]:
    """Returns the log-probs that the engine reported: one [L] float64 tensor per sample."""
    return [torch.from_numpy(sample.sampler_logp).double() for sample in samples]


def compare(samples: Sequence[Sample], logp: Sequence[Tensor], sure: Sequence[Tensor] | None = None) -> Gap:
    """Returns the gap between what the engine reported and `logp`, one [L] tensor per sample, at the tokens `sure`; None: all."""
    return between(logp, sampler_logp(samples), sure)


def between(one: Sequence[Tensor], other: Sequence[Tensor], sure: Sequence[Tensor] | None = None) -> Gap:
    """Returns the gap between two lists of [L] tensors, at the tokens `sure`."""
    return Gap.of(torch.cat(where([a.double() - b.double() for a, b in zip(one, other, strict=True)], sure)))


def where(values: list[Tensor], sure: Sequence[Tensor] | None) -> list[Tensor]:
    """Returns the values at the tokens `sure`; all of them for None."""
    return values if sure is None else [value[kept] for value, kept in zip(values, sure, strict=True)]
