"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by phase; phases do not overlap, so that they add up to the step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """{"time/step": 1.2, "time/generate": 0.8, ...}: seconds since the clock was made, and of each phase."""
        times = {f"time/{phase}": round(seconds, 6) for phase, seconds in self._phases.items()}
        return {"time/step": round(self.seconds, 6), **times}
