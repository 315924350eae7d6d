"""When a run must have saved: does another step fit?"""

import time
from collections.abc import Callable
from dataclasses import dataclass

MARGIN, LEAST = 1.25, 2.0  # of what is expected; and seconds beside it


@dataclass(slots=True)
class Deadline:
    """A time by which the last step that is trained must be saved.

    The next step is expected to take as long as the longest so far, and its save as long as the longest so far, or, before the
    first, as long as a step: with a margin, both must fit. Of the first step nothing is known: it begins if it is not too late.
    """

    at: float  # seconds since 1970
    now: Callable[[], float] = time.time
    longest_step: float = 0.0  # seconds, without its save
    longest_save: float = 0.0

    def took(self, step: float, save: float) -> None:
        """A step took so many seconds, and its save as many more; about 0: it was not saved."""
        self.longest_step = max(self.longest_step, step)
        self.longest_save = max(self.longest_save, save)

    def fits(self) -> bool:
        """Whether another step and its save are expected to end in time."""
        expected = self.longest_step + (self.longest_save or self.longest_step)
        return self.now() + MARGIN * expected + (LEAST if expected else 0.0) <= self.at
