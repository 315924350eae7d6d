"""When a run must have saved: does another step fit, and until when may a step sample?"""

import time
from collections.abc import Callable
from dataclasses import dataclass

MARGIN, LEAST = 1.25, 2.0  # of what is expected; and seconds beside it


@dataclass(slots=True)
class Deadline:
    """A time by which the last step that is trained must be saved.

    The next step is expected to take as long as the longest so far, and its save as long as the longest so far, or, before the
    first, as long as a step: with a margin, both must fit. Of the first step nothing is known: it begins if it is not too late.
    Once it has begun, a step samples until its update, sync and save would no longer fit, by the same rule.
    """

    at: float  # seconds since 1970
    now: Callable[[], float] = time.time
    longest_step: float = 0.0  # seconds, without its save
    longest_update: float = 0.0  # seconds of it, from where nothing is given up any more
    longest_save: float = 0.0

    def took(self, step: float, update: float, save: float) -> None:
        """A step took so many seconds, so many of them from its update on, and its save as many more; 0: it was not saved."""
        self.longest_step = max(self.longest_step, step)
        self.longest_update = max(self.longest_update, update)
        self.longest_save = max(self.longest_save, save)

    def fits(self) -> bool:
        """Whether another step and its save are expected to end in time."""
        return self._left(self.longest_step) >= 0

    def seconds_to_sample(self) -> float:
        """Until an update and its save would no longer end in time."""
        return self._left(self.longest_update)

    def _left(self, coming: float) -> float:
        expected = coming + (self.longest_save or self.longest_step)
        return self.at - self.now() - MARGIN * expected - LEAST
