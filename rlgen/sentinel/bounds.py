"""Defines how large the difference between log-probs of engine and trainer may be: a few times what rounding explains.

Rounding is measured. On the tokens that are compared, the trainer computes log-probs a second time in a wider dtype (float32
beside bfloat16, float64 beside float32), from weights that are rounded as the engine holds them. The distance of the two, token
by token, is the *noise*. An engine that computes the same model in the same dtype rounds as often, in another order. So it is as
far from the wider result as the trainer is, and √2 times as far from the trainer, if their errors are independent. The mean gap
of healthy engines was 0.7 to 1.2 times the noise: SmolLM2-135M in both dtypes, and 20 tiny random models. torch's float32 softmax
errs by itself, by 1e-5 nats and more on peaked distributions over many ids. Engines use it and the trainer does not, so its error
on the same logits is added.

The bounds are `FACTOR` times the noise in two statistics. The mean moves when most tokens are wrong. The root of the mean square
(RMS) moves when a few rows are wrong: one row of 64, off by 2 nats, moves it by 0.25. The maximum has no bound, nor has any
quantile: at single tokens, where the model is undecided, rounding is many times larger than at others. On tiny trained models the
largest gap of a batch is up to eight times the noise of that very token, while the RMS of the batch is at most 2.2 times the
noise.

A gap beyond its bounds is compared with a closer measurement on the same rows: the trainer computes them under `ROUNDINGS` other
roundings, each as valid as its own. A single error can be small by chance, and would make the noise of its token too small.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from torch import Tensor

from rlgen.sentinel.gap import Gap

POWER = 5.0  # a check counts only if the fault would move the gap by more than this many bounds
FACTOR = 3.0  # the bounds, in multiples of the noise
FLOOR = 1e-6  # nats; the distance of neighbouring float32 log-probs near -8; engines report float32
ROUNDINGS = 4  # of the closer measurement


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding explains of a gap, in nats. Noise(mean=1.0e-05, rms=1.6e-05)"""

    mean: float
    rms: float  # root of the mean square

    @classmethod
    def of(cls, deltas: Tensor) -> "Noise":
        """Measures [N] differences that rounding has made."""
        size = deltas.double().abs()
        return cls(size.mean().item(), size.square().mean().sqrt().item())

    def or_more(self, other: "Noise | None") -> "Noise":
        """Returns the larger of both, value by value."""
        return self if other is None else Noise(max(self.mean, other.mean), max(self.rms, other.rms))


class Excess(NamedTuple):
    """The statistic of a gap that is largest relative to its bound."""

    name: str
    value: float
    bound: float

    @property
    def share(self) -> float:
        """Returns the value as a multiple of its bound; infinite for a gap that is NaN."""
        return math.inf if math.isnan(self.value) else self.value / self.bound


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

    def excess(self, gap: Gap) -> Excess:
        """Returns the statistic that comes nearest to its bound, or exceeds it the most."""
        bounded = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return max(
            (Excess(name, getattr(gap, name), bound) for name, bound in bounded if bound is not None),
            key=lambda excess: excess.share,
        )

    def hold(self, gap: Gap) -> bool:
        """Returns whether the gap is within all bounds. A gap that is NaN never is."""
        return self.excess(gap).share <= 1

    @property
    def main(self) -> str:
        """Returns the name of the bounded statistic that is shown first: the mean, or else what the recipe bounds."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def bound(self) -> float:
        """Returns the bound of `main`."""
        bound: float = getattr(self, self.main)
        return bound

    def of(self, gap: Gap) -> float:
        """Returns the value of the gap that `bound` applies to."""
        value: float = getattr(gap, self.main)
        return value

    def see(self, gap: Gap) -> bool:
        """Returns whether a gap like this would exceed `bound` by more than the factor `POWER`."""
        return self.of(gap) > POWER * self.bound

    def measured(self, gap: Gap) -> dict[str, float]:
        """Returns the statistics of a gap by name, `main` first."""
        return {self.main: self.of(gap), **asdict(gap)}

    @property
    def as_json(self) -> dict[str, float]:
        return {name: bound for name, bound in asdict(self).items() if bound is not None}

    def worst(self, *gaps: Gap) -> Gap:
        """Returns the largest gap; one beyond the bounds, which may be NaN, before all others."""
        return max(gaps, key=lambda gap: (not self.hold(gap), self.of(gap)))

    def words(self, gap: Gap) -> str:
        """Returns `mean |Δ log-prob| is 0.021 nats, the bound is 3.1e-05; max 0.84`."""
        name, value, bound = self.excess(gap)
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
