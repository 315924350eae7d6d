"""Estimates how long the rest of a run takes, and writes times as a clock does."""

from collections.abc import Sequence

LAST = 50  # steps whose mean time predicts the remaining steps: enough to include several evaluations


def remaining(seconds: Sequence[float], left: int) -> float | None:
    """Returns the seconds that the `left` remaining steps may take, from those of earlier steps; None: no step was timed."""
    known = seconds[-LAST:]
    return sum(known) / len(known) * left if known else None


def as_clock(seconds: float) -> str:
    """Returns a time as "0:47", "12:05", "3h20m" or "2d03h"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minute:02d}m" if hours else f"{minute}:{second:02d}"
