"""How far engine and trainer may disagree."""

from dataclasses import dataclass

from rlgen.errors import SentinelError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest |engine - trainer| log-prob of a sampled token, in nats: of any token, and on average. None: not bounded.

    float32: measured 1e-6 to 4e-6 on the CPU at the start of a run; a stale tensor moves log-probs by 1e-2 and more.
    bfloat16: single tokens differ by 1e-2 and more on a healthy engine, so that only the mean is telling; 0.03 is what the
    field's continuous-integration runs accept.
    """

    max_delta: float | None
    mean_delta: float | None

    def check(self, where: str, max_delta: float, mean_delta: float, cause: str) -> None:
        """Raises SentinelError, naming both numbers, the bound and the cause, if a bound is exceeded or not a number."""
        for name, value, bound in (("max", max_delta, self.max_delta), ("mean", mean_delta, self.mean_delta)):
            if bound is not None and not value <= bound:
                raise SentinelError(
                    f"{where}: engine and trainer disagree about sampled tokens: {name} |Δ log-prob| is {value:.3g} nats,"
                    f" the bound is {bound:.3g} (max {max_delta:.3g}, mean {mean_delta:.3g}). {cause}"
                )


# By the coarser of the two dtypes.
BY_DTYPE = {"float32": Bounds(max_delta=1e-4, mean_delta=None), "bfloat16": Bounds(max_delta=None, mean_delta=0.03)}


def bounds_for(dtypes: tuple[str, str], max_delta: float | None, mean_delta: float | None) -> Bounds:
    """Bounds of `sentinel` in the recipe; where it says nothing, those of the dtypes of trainer and engine."""
    if max_delta is not None or mean_delta is not None:
        return Bounds(max_delta, mean_delta)
    return BY_DTYPE["bfloat16" if "bfloat16" in dtypes else "float32"]
