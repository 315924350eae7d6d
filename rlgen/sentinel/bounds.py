"""Measures the gap between log-probs of engine and trainer, and bounds it: by a few times what rounding explains.

Rounding is measured. On the tokens that are compared, the trainer computes log-probs a second time in a wider dtype (float32
beside bfloat16, float64 beside float32), from weights that are rounded as the engine holds them. The distance of the two, token
by token, is the *noise*. An engine that computes the same model in the same dtype rounds as often, in another order: it is √2
times as far from the trainer, if the errors are independent. The mean gap of healthy engines was 0.7 to 1.2 times the
noise. torch's float32 softmax errs by itself, by 1e-5 nats and more on peaked distributions over many ids. Engines use it and the
trainer does not, so its error on the same logits is added.

The bounds are `FACTOR` times the noise in two statistics. The mean moves when most tokens are wrong. The root of the mean square
(RMS) moves when a few rows are wrong: one row of 64, off by 2 nats, moves it by 0.25. Neither the maximum nor any quantile has a
bound: at single tokens, where the model is undecided, rounding is many times larger than at others.

A gap beyond its bounds is compared with a closer measurement on the same rows: the trainer computes them under `ROUNDINGS` other
roundings, each as valid as its own. A single error can be small by chance, and would make the noise of its token too small.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rlgen.losses.order import Total, alone
from rlgen.types import Sample

POWER = 5.0  # a check counts only if the fault would move the gap by more than this many bounds
FACTOR = 3.0  # the bounds, in multiples of the noise
FLOOR = 1e-6  # nats; the distance of neighbouring float32 log-probs near -8; engines report float32
ROUNDINGS = 4  # of the closer measurement
NONE_SURE = "no token can be compared: at each, rounding decides which ids are kept"  # see `Truncation.sure`


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


def engine_gap(samples: Sequence[Sample], logp: Sequence[Tensor], sure: Sequence[Tensor] | None = None) -> Gap:
    """Returns the gap between what the engine reported and `logp`, one [L] tensor per sample, at the tokens `sure`; None: all."""
    return between(logp, sampler_logp(samples), sure)


def between(one: Sequence[Tensor], other: Sequence[Tensor], sure: Sequence[Tensor] | None = None) -> Gap:
    """Returns the gap between two lists of [L] tensors, at the tokens `sure`."""
    return Gap.of(torch.cat(where([a.double() - b.double() for a, b in zip(one, other, strict=True)], sure)))


def where(values: list[Tensor], sure: Sequence[Tensor] | None) -> list[Tensor]:
    """Returns the values at the tokens `sure`; all of them for None."""
    return values if sure is None else [value[kept] for value, kept in zip(values, sure, strict=True)]


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding explains of a gap, in nats. Noise(mean=1.0e-05, rms=1.6e-05)"""

    mean: float
    rms: float  # root of the mean square

    @classmethod
    def of(cls, deltas: Tensor) -> "Noise | None":
        """Measures [N] differences that rounding has made; returns None if there is none."""
        size = deltas.double().abs()
        return cls(size.mean().item(), size.square().mean().sqrt().item()) if len(size) else None

    def or_more(self, other: "Noise | None") -> "Noise":
        """Returns the larger of both, value by value."""
        return self if other is None else Noise(max(self.mean, other.mean), max(self.rms, other.rms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest accepted |engine - trainer| log-prob of sampled tokens, in nats, by statistics of `Gap`. None: not bounded."""

    mean_delta: float | None = None
    rms_delta: float | None = None
    max_delta: float | None = None

    @classmethod
    def by_noise(cls, noise: Noise, most: "Bounds") -> "Bounds":
        """Returns the bounds that follow from the noise; none is above that of `most`."""
        assert most.mean_delta is not None and most.rms_delta is not None
        mean, rms = max(FACTOR * noise.mean, FLOOR), max(FACTOR * noise.rms, FLOOR)
        return cls(mean_delta=min(mean, most.mean_delta), rms_delta=min(rms, most.rms_delta))

    def shares(self, gap: Gap) -> dict[str, float]:
        """Returns each bounded statistic of a gap as a multiple of its bound; infinite for one that is NaN."""
        values = {name: getattr(gap, name) / bound for name, bound in self.as_json.items()}
        return {name: math.inf if math.isnan(value) else value for name, value in values.items()}

    def hold(self, gap: Gap) -> bool:
        """Returns whether the gap is within all bounds. A gap that is NaN never is."""
        return max(self.shares(gap).values()) <= 1

    @property
    def as_json(self) -> dict[str, float]:
        """Returns those that there are. The first is that of the statistic that is shown first: the mean, if it is bounded."""
        return {name: bound for name, bound in asdict(self).items() if bound is not None}

    @property
    def main(self) -> str:
        """Returns the name of the statistic that is shown first."""
        return next(iter(self.as_json))

    @property
    def bound(self) -> float:
        """Returns the bound of `main`."""
        return self.as_json[self.main]

    def of(self, gap: Gap) -> float:
        """Returns the value of the gap that `bound` applies to."""
        return float(getattr(gap, self.main))

    def see(self, gap: Gap) -> bool:
        """Returns whether a gap like this would exceed `bound` by more than the factor `POWER`."""
        return self.of(gap) > POWER * self.bound

    def worst(self, *gaps: Gap) -> Gap:
        """Returns the largest gap; one beyond the bounds, which may be NaN, before all others."""
        return max(gaps, key=lambda gap: (not self.hold(gap), self.of(gap)))

    def words(self, gap: Gap) -> str:
        """Returns `mean |Δ log-prob| is 0.021 nats, the bound is 3.1e-05; max 0.84`."""
        shares = self.shares(gap)
        name = max(shares, key=shares.__getitem__)
        value, bound = getattr(gap, name), self.as_json[name]
        return f"{NAMES[name]} |Δ log-prob| is {value:.3g} nats, the bound is {bound:.3g}; max {gap.max_delta:.3g}"


NAMES = {"mean_delta": "mean", "rms_delta": "RMS of", "max_delta": "max"}

# The widest bounds, whatever the noise: no healthy engine came near them. The coarser dtype of trainer and engine decides.
MOST = {"float32": Bounds(mean_delta=1e-3, rms_delta=3e-3), "bfloat16": Bounds(mean_delta=0.2, rms_delta=0.6)}
MOST_QUANTIZED = Bounds(mean_delta=0.3, rms_delta=0.9)


def most_for(dtypes: tuple[str, str], quantized: bool) -> Bounds:
    """Returns the bounds that hold whatever the noise, by the dtypes of trainer and engine.

    Args:
        quantized: whether one of them holds quantised weights, which the other does not.
    """
    return MOST_QUANTIZED if quantized else MOST["bfloat16" if "bfloat16" in dtypes else "float32"]
