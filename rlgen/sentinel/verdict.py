"""Defines the result of a check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlgen.errors import Fault, SentinelError
from rlgen.sentinel.bounds import Noise


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    NOT_MEASURABLE = "not measurable"  # the check could not have detected the fault
    NOT_NEEDED = "not needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The result of one check of engine and trainer.

    Rung(number=3, name="changed sync", verdict=Outcome.OK, measured={"mean_delta": 5e-7}, bound=1.5e-6, power=0.8, sentence="…")
    """

    number: int
    name: str
    verdict: Outcome
    sentence: str
    measured: Mapping[str, float] = field(default_factory=dict)
    bound: float | None = None  # bound of the first measured value
    bounds: Mapping[str, float] = field(default_factory=dict)  # of all measured values that have one
    noise: Noise | None = None  # what rounding explains; None: not measured
    power: float | None = None  # how far that value would move if the fault were there
    fault: Fault | None = None  # set if the check failed

    def error(self) -> SentinelError:
        """Returns the error of a failed check."""
        assert self.fault is not None
        return SentinelError(self.fault, self.sentence, f"rung {self.number}, {self.name}")


def failed(rungs: Sequence[Rung]) -> Rung | None:
    """Returns the check that failed; None if none did."""
    return next((rung for rung in rungs if rung.verdict is Outcome.FAILED), None)


def agreement(rungs: Sequence[Rung]) -> str:
    """Returns each measured value with its bound, and at check 3 also the value that a sync of no weights would have given:

    `engine and trainer agree: same weights 4.8e-07 of 1.9e-06, changed weights 5.3e-07 of 2.1e-06 (0.84 without a sync)`

    What a check could not measure follows in a sentence of its own.
    """
    parts, blind = [], ""
    for rung in rungs:
        power = f" ({rung.power:.2g} without a sync)" if rung.number == 3 and rung.power is not None else ""
        if rung.measured:
            parts.append(f"{rung.name} {next(iter(rung.measured.values())):.1e} of {rung.bound:.1e}{power}")
        if rung.verdict is Outcome.NOT_MEASURABLE:
            blind += f". Not measurable: {rung.name}. {rung.sentence.rstrip('.')}"
    return "engine and trainer agree: " + ", ".join(parts) + blind
