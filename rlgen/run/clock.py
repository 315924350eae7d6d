"""Measures how long each phase of a step takes, and estimates how long the rest of a run takes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlgen.metrics import Metric

LAST = 50  # steps whose mean time predicts the remaining steps: enough to include several evaluations


class PhaseClock:
    """Counts seconds by phase, a metric. Phases do not overlap, so that their sum is at most the time of the step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[Metric, float] = {}

    @contextmanager
    def __call__(self, phase: Metric) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """Returns {"time/step": 1.2, "time/generate": 0.8, ...} in seconds."""
        return {phase: round(seconds, 6) for phase, seconds in {Metric.TIME_STEP: self.seconds, **self._phases}.items()}


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
