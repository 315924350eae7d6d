"""How far apart engine and trainer may be."""

from dataclasses import dataclass

from rlgen.sentinel.gap import Gap

POWER = 5.0  # a fault must move the gap by this many bounds, or its absence proves nothing
AFTER_RUNG_1 = 3.0  # where only the mean is bounded, later gaps may be this often that of rung 1
FLOOR = 1e-4  # of such a bound: a gap of 0 at rung 1 is luck


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest |engine - trainer| log-prob of a sampled token, in nats: of any token, and on average. None: not bounded.

    float32: measured 1e-6 to 2e-5 on the CPU on a healthy engine, trained models included; a stale tensor moves log-probs
    by 1e-2 and more.
    bfloat16: single tokens differ by 1e-2 and more on a healthy engine, so that only the mean is telling; 0.03 is what the
    field's continuous-integration runs accept.
    """

    max_delta: float | None
    mean_delta: float | None

    def hold(self, gap: Gap) -> bool:
        """Whether the gap is within them; one that is not a number never is."""
        pairs = ((gap.max_delta, self.max_delta), (gap.mean_delta, self.mean_delta))
        return all(bound is None or value <= bound for value, bound in pairs)

    def see(self, gap: Gap) -> bool:
        """Would they see a gap like this with `POWER` to spare?"""
        pairs = ((gap.max_delta, self.max_delta), (gap.mean_delta, self.mean_delta))
        return any(bound is not None and value > POWER * bound for value, bound in pairs)

    @property
    def by_max(self) -> bool:
        """Whether the largest gap is bounded: where both are, it is the one that is printed."""
        return self.max_delta is not None

    @property
    def bound(self) -> float:
        """The one that is printed."""
        bound = self.max_delta if self.max_delta is not None else self.mean_delta
        assert bound is not None  # one of both is set
        return bound

    def of(self, gap: Gap) -> float:
        """The value of the gap that `bound` is about."""
        return gap.max_delta if self.by_max else gap.mean_delta

    def words(self, gap: Gap) -> str:
        """`max |Δ log-prob| is 0.84 nats, mean 0.021, the bound is 0.0001 (max)`"""
        return (
            f"max |Δ log-prob| is {gap.max_delta:.3g} nats, mean {gap.mean_delta:.3g}, the bound is {self.bound:.3g}"
            f" ({'max' if self.by_max else 'mean'})"
        )


# By the coarser of the two dtypes.
BY_DTYPE = {"float32": Bounds(1e-4, None), "bfloat16": Bounds(None, 0.03)}


def bounds_for(dtypes: tuple[str, str], max_delta: float | None, mean_delta: float | None) -> Bounds:
    """The bounds of a recipe: its own where it names any, otherwise those of its dtypes (trainer's and engine's)."""
    if max_delta is not None or mean_delta is not None:
        return Bounds(max_delta, mean_delta)
    return BY_DTYPE["bfloat16" if "bfloat16" in dtypes else "float32"]


def bounds_after(bounds: Bounds, first_mean: float) -> Bounds:
    """Bounds of the rungs above rung 1, which measured `first_mean`: the usual mean is wide, this pair's own is telling."""
    if bounds.max_delta is not None or bounds.mean_delta is None:
        return bounds
    return Bounds(None, min(max(AFTER_RUNG_1 * first_mean, FLOOR), bounds.mean_delta))
