"""Defines how large the difference between log-probs of engine and trainer may be."""

from dataclasses import dataclass

from rlgen.sentinel.gap import Gap

POWER = 5.0  # a check counts only if the fault would move the gap by more than this many bounds
AFTER_RUNG_1 = 3.0  # if only the mean is bounded, later means may be this many times that of check 1
FLOOR = 1e-4  # minimum of such a bound, in nats: a gap of 0 at check 1 is chance


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest accepted |engine - trainer| log-prob of a sampled token, in nats: maximum and mean. None: not bounded.

    float32: a healthy engine measures 1e-6 to 2e-5 on the CPU, trained models included; one stale tensor moves log-probs by 1e-2
    and more.
    bfloat16: single tokens of a healthy engine differ by 1e-2 and more, so that only the mean is informative; 0.03 is what
    continuous-integration runs of other projects accept.
    Quantised weights: with weights and activations of five tiny models rounded to 8-bit floats, the means were ten times those of
    bfloat16, 0.04 to 0.08 (simulated on a CPU); so is the bound. Check 1 tightens it to what the engine has.
    """

    max_delta: float | None
    mean_delta: float | None

    def hold(self, gap: Gap) -> bool:
        """Returns whether the gap is within the bounds. A gap that is NaN never is."""
        pairs = ((gap.max_delta, self.max_delta), (gap.mean_delta, self.mean_delta))
        return all(bound is None or value <= bound for value, bound in pairs)

    def see(self, gap: Gap) -> bool:
        """Returns whether a gap like this would exceed a bound by more than the factor `POWER`."""
        pairs = ((gap.max_delta, self.max_delta), (gap.mean_delta, self.mean_delta))
        return any(bound is not None and value > POWER * bound for value, bound in pairs)

    @property
    def by_max(self) -> bool:
        """Returns whether the maximum is bounded. If maximum and mean are both bounded, messages show the maximum."""
        return self.max_delta is not None

    @property
    def bound(self) -> float:
        """Returns the bound that messages show: that of the maximum, or else that of the mean."""
        bound = self.max_delta if self.max_delta is not None else self.mean_delta
        assert bound is not None  # at least one is set
        return bound

    def of(self, gap: Gap) -> float:
        """Returns the value of the gap that `bound` applies to."""
        return gap.max_delta if self.by_max else gap.mean_delta

    def worst(self, *gaps: Gap) -> Gap:
        """Returns the largest gap; one beyond the bounds, which may be NaN, before all others."""
        return max(gaps, key=lambda gap: (not self.hold(gap), self.of(gap)))

    def words(self, gap: Gap) -> str:
        """Returns `max |Δ log-prob| is 0.84 nats, mean 0.021, the bound is 0.0001 (max)`."""
        return (
            f"max |Δ log-prob| is {gap.max_delta:.3g} nats, mean {gap.mean_delta:.3g}, the bound is {self.bound:.3g}"
            f" ({'max' if self.by_max else 'mean'})"
        )


# The coarser dtype of trainer and engine decides.
BY_DTYPE = {"float32": Bounds(1e-4, None), "bfloat16": Bounds(None, 0.03)}
QUANTIZED = Bounds(None, 0.3)


def bounds_for(
    dtypes: tuple[str, str], quantized: bool, max_delta: float | None = None, mean_delta: float | None = None
) -> Bounds:
    """Returns the bounds of a recipe: those that it sets, or else the default for its dtypes (of trainer and engine).

    Args:
        quantized: whether the engine holds quantised weights, which the trainer does not.
    """
    if max_delta is not None or mean_delta is not None:
        return Bounds(max_delta, mean_delta)
    if quantized:
        return QUANTIZED
    return BY_DTYPE["bfloat16" if "bfloat16" in dtypes else "float32"]


def bounds_after(bounds: Bounds, first_mean: float) -> Bounds:
    """Returns the bounds for the checks after check 1, which measured a mean of `first_mean` nats.

    If only the mean is bounded, tightens it to `AFTER_RUNG_1` times what this engine and trainer measured, but not below `FLOOR`
    and never above the original bound: the default for the dtype is wide. Otherwise returns `bounds`.
    """
    if bounds.max_delta is not None or bounds.mean_delta is None:
        return bounds
    return Bounds(None, min(max(AFTER_RUNG_1 * first_mean, FLOOR), bounds.mean_delta))
