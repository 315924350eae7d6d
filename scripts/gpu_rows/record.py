"""What the rows of `make gpu-check` take and return. Imports nothing but the standard library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the rows run."""

    folder: str  # for models and runs, emptied at the end
    gpu: bool  # False: a rehearsal on the CPU, with small sizes
    model: str | None = None  # a real checkpoint's folder; None: none is at hand

    @property
    def device(self) -> str:
        """Returns torch's name of the device that is measured."""
        return "cuda:0" if self.gpu else "cpu"


@dataclass(frozen=True, slots=True)
class Value:
    """One measured number, and between which bounds it must lie. Value("max |Δ|", 1.2e-6, "nats", most=1e-4)"""

    what: str
    value: float
    unit: str
    least: float | None = None  # None: no bound
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Returns whether the number is within its bounds. NaN is within none, and not within no bounds either."""
        low, high = (float("-inf") if self.least is None else self.least), (float("inf") if self.most is None else self.most)
        return low <= self.value <= high

    @property
    def bound(self) -> str:
        """Returns the bounds in words; empty without any."""
        words = [
            f"{word} {short(limit)}" for word, limit in (("at least", self.least), ("at most", self.most)) if limit is not None
        ]
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a row found."""

    status: Status
    sentence: str = ""  # why it failed or was left out, or what the values were measured on
    values: tuple[Value, ...] = ()
    numbers: dict[str, Any] | None = None  # further ones, for the JSON alone
    seconds: float = 0.0
    log: str | None = None  # file of what a failed row printed
    log_end: tuple[str, ...] = ()  # the last lines of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, measured in a process of its own."""

    name: str
    tier: int
    limit: int  # seconds on a GPU; a rehearsal has more
    check: Callable[[Place], Finding]
    packages: tuple[str, ...]  # without these, beside torch, it is left out


def judged(values: Sequence[Value], sentence: str = "", numbers: dict[str, Any] | None = None) -> Finding:
    """Returns the finding of a row that has measured `values`: failed if one is out of its bounds, and then it says which."""
    wrong = [
        f"{one.what} is {f'{short(one.value)} {one.unit}'.strip()}, wanted {one.bound or 'a number'}"
        for one in values
        if not one.holds
    ]
    status: Status = "failed" if wrong else "ok"
    return Finding(status=status, sentence="; ".join([*wrong, *filter(None, [sentence])]), values=tuple(values), numbers=numbers)


def skipped(why: str) -> Finding:
    """Returns the finding of a row that was left out."""
    return Finding(status="skipped", sentence=why)


def failed(why: str) -> Finding:
    """Returns the finding of a row that found no values."""
    return Finding(status="failed", sentence=why)


def short(number: float) -> str:
    """Returns a number with three digits: 0.000123 -> `1.23e-04`, 12345.6 -> `12,346`."""
    if number != number or number in (float("inf"), float("-inf")):
        return str(number)
    if number == 0 or 1e-3 <= abs(number) < 1000:
        return f"{number:.3g}"
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.2e}"
