"""Decides when a run must stop to be saved in time: whether another step fits, and until when a step may sample."""

import time
from collections.abc import Callable
from dataclasses import dataclass

MARGIN, LEAST = 1.25, 2.0  # factor on the expected durations; seconds added to them


@dataclass(slots=True)
class Deadline:
    """The time by which the last trained step must be saved, with the durations that predict the next step.

    The next step is expected to take as long as the longest step so far, and its save as long as the longest save so far or,
    before the first save, as long as a step. Step and save must both fit, with a margin; so must the rest of a save that is still
    going on, because only one is written at a time. Before the first step no duration is known: it begins unless the deadline has
    nearly passed. Once a step has begun, it may sample until its update, sync and save would no longer fit, by the same rule.
    """

    at: float  # seconds since 1970
    now: Callable[[], float] = time.time
    longest_step: float = 0.0  # seconds, without its save
    longest_update: float = 0.0  # seconds of a step from the start of its update, after which it is no longer abandoned
    longest_save: float = 0.0  # seconds, of complete saves
    saving: float | None = None  # seconds that a save had been going on when the last step ended; None: none was

    def took(self, step: float, update: float, save: float, saving: float | None = None) -> None:
        """Records how long a step took.

        Args:
            step: seconds of the step, without its save.
            update: seconds of it from the start of the update on.
            save: seconds of the longest complete save; 0: none is complete.
            saving: seconds that another save has been going on; None: none is.
        """
        self.longest_step = max(self.longest_step, step)
        self.longest_update = max(self.longest_update, update)
        self.longest_save = max(self.longest_save, save)
        self.saving = saving

    def fits(self) -> bool:
        """Returns whether another step and its save are expected to end before the deadline."""
        return self._left(self.longest_step) >= 0

    def seconds_to_sample(self) -> float:
        """Returns the seconds left until an update and its save would no longer end in time; negative if it is too late."""
        return self._left(self.longest_update)

    def _left(self, coming: float) -> float:
        save = self.longest_save or max(self.longest_step, self.saving or 0.0)
        before = 0.0 if self.saving is None else save - self.saving  # rest of the save that is going on: one is written at a time
        return self.at - self.now() - MARGIN * (max(coming, before) + save) - LEAST
