"""Groups that are scored while others are still sampled."""

import threading
from collections.abc import Sequence

from rlgen.rewards.score import Scorer, Scoring
from rlgen.types import Group


class EarlyScoring:
    """Scores the groups of one step after the other; those of a step that is not open yet wait until it is.

    With `rollout.async_steps`, groups of the next step may arrive before those of the present step are scored.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._lock = threading.Lock()  # guards the fields below
        self._step = 0  # the open one
        self._scoring: Scoring | None = None  # of the open step
        self._waiting: dict[int, list[Group]] = {}  # by step
        self._closed = False

    def open(self, step: int) -> None:
        """Starts the calls for the groups of `step` that have arrived and will arrive, and gives up another step that is open."""
        with self._lock:
            self._open(step)

    def add(self, step: int, group: Group) -> None:
        """Starts the calls for a group with all its completions, or keeps it until `step` is open. Called from any thread."""
        with self._lock:
            if self._scoring is not None and self._step == step:
                self._scoring.add(group)
            elif not self._closed:
                self._waiting.setdefault(step, []).append(group)

    def settled(self, step: int) -> list[Group]:
        """Returns the groups of `step` that have been scored since the last time, see `Scoring.settled`. Does not wait."""
        with self._lock:
            return self._scoring.settled() if self._scoring is not None and self._step == step else []

    def result(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Waits for the rewards of a step and returns its groups with them, see `Scoring.result`. Closes the step."""
        with self._lock:  # not while the calls are waited for: groups of the next step arrive
            scoring = self._open(step)
        scored = scoring.result(groups)
        with self._lock:
            self._scoring = None
        return scored

    def close(self) -> None:
        """Abandons the open step and ends its calls that still run. Ignores groups that arrive later."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._scoring is not None:
                self._scoring.close()
                self._scoring = None

    def _open(self, step: int) -> Scoring:
        if self._scoring is None or self._step != step:
            if self._scoring is not None:
                self._scoring.close()
            self._scoring, self._step = self._scorer.begin(step), step
            for group in self._waiting.pop(step, ()):
                self._scoring.add(group)
        return self._scoring
