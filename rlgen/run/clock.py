"""Measures how long each phase of a step takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from rlgen.metrics import Metric

Phase: TypeAlias = Literal["generate", "reward", "train", "sync", "save", "eval"]
TIMES: dict[Phase, Metric] = {
    "generate": Metric.TIME_GENERATE,
    "reward": Metric.TIME_REWARD,
    "train": Metric.TIME_TRAIN,
    "sync": Metric.TIME_SYNC,
    "save": Metric.TIME_SAVE,
    "eval": Metric.TIME_EVAL,
}


class Clock:
    """Counts seconds by phase. Phases do not overlap, so that their sum is at most the time of the step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[Phase, float] = {}

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Returns the seconds since the clock was created."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """Returns {"time/step": 1.2, "time/generate": 0.8, ...}: seconds since the clock was created, and seconds by phase."""
        times: dict[str, float] = {TIMES[phase]: round(seconds, 6) for phase, seconds in self._phases.items()}
        return {Metric.TIME_STEP: round(self.seconds, 6), **times}
