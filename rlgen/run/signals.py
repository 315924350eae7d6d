"""Handles requests to stop: the run saves the last step that it has trained, and exits.

A request is SIGINT, SIGTERM or SIGUSR1, the end of the launcher, or the deadline `run.must_save_by`. A step whose weights have
begun to change is finished first; a step that is still sampling or computing rewards is abandoned.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, and signals may come during that import
    from rlgen.processes import Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
DUE = signal.SIGUSR2  # sent by the deadline's timer to this process, to interrupt whatever it is waiting for
LATE = "for run.must_save_by"
ECHO_SECONDS = 2.0  # a launcher passes on a signal of the terminal within this time
AT_ONCE = "stopping now; go on with --resume"
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
        """Records the seconds of a step and of the longest complete save, see the fields; `save` is 0 if none is complete."""
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


class StopNow(KeyboardInterrupt):
    """Raised to stop the run when nothing has been trained since the last step.

    Not an `Exception`, so that code in between does not handle it as a failure.
    """


class StopRequest:
    """Handles the signals of one process. The first one requests a stop; the second one raises KeyboardInterrupt at once.

    Args:
        launched: whether a launcher started this process. A launcher passes on signals that the terminal has already sent to all
            processes, and sends SIGTERM to the rest when one has ended; so its repeated signals are no second request. Only a
            second SIGINT is, `ECHO_SECONDS` after the first signal or later. If the launcher is gone, its processes stop, too.
        answer: called at once, inside the signal handler, with what a signal leads to. It must not wait for anything.
    """

    def __init__(self, launched: bool, answer: Callable[[str], None] = lambda text: None) -> None:
        self.launched = launched
        self.answer = answer
        self.step = 0  # the one that is going on; 0: the first one has not begun
        self._sampling = False  # nothing of this step is trained yet: it would be abandoned
        self.why = ""  # the reason to stop; empty: not requested
        self._asked = 0.0  # time.monotonic() of the first signal; 0: none came
        self._parent = os.getppid()
        self._at_once = False
        self._deadline: Deadline | None = None
        self._timer: threading.Timer | None = None
        self._timing = threading.Lock()

    def handle(self, number: int, frame: FrameType | None) -> None:
        before = self.why
        echoed = self.launched and (number != signal.SIGINT or time.monotonic() - self._asked < ECHO_SECONDS)
        if number == DUE:
            self.why = before or LATE
        elif self._asked and not echoed:
            self.answer(AT_ONCE)
            raise KeyboardInterrupt
        else:
            first, self._asked = not self._asked, self._asked or time.monotonic()
            self.why = before or f"on request ({signal.Signals(number).name})"
            if first:
                self.answer(self.words())
        if self._at_once and not before:
            raise StopNow

    def words(self) -> str:
        if self.step == 0:
            return "stopping before the first step: nothing is lost; interrupt again to stop now"
        if self._sampling:
            saving = ", then saving" if self.step > 1 else ": nothing is lost"
            return f"stopping before step {self.step}{saving}; interrupt again to stop now"
        return f"finishing step {self.step}, then saving; interrupt again to stop now"

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Installs the signal handlers for the block. In a launched process they stay installed until it ends."""
        before = {number: signal.signal(number, self.handle) for number in (*SIGNALS, DUE)}
        try:
            yield self
        finally:
            self._disarm()
            if not self.launched:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def by(self, deadline: Deadline | None) -> None:
        self._deadline = deadline
        self._arm()

    def took(self, step: float, update: float, save: float, saving: float | None) -> None:
        """Records the durations of a step, see `Deadline.took`, and restarts the timer."""
        if self._deadline is not None:
            self._deadline.took(step, update, save, saving)
            self._arm()

    def _arm(self) -> None:
        """Starts a timer that requests a stop when just enough time is left for an update and its save."""
        self._disarm()
        if self._deadline is not None:
            seconds = min(max(0.0, self._deadline.seconds_to_sample()), threading.TIMEOUT_MAX)
            self._timer = threading.Timer(seconds, self._due)
            self._timer.daemon = True
            self._timer.start()

    def _disarm(self) -> None:
        with self._timing:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        with self._timing:  # once disarmed, the signal handler may be gone
            if self._timer is threading.current_thread():
                os.kill(os.getpid(), DUE)

    def check(self, processes: "Processes", before_step: bool = False) -> None:
        """Raises StopNow in all processes if one was asked to stop or, `before_step`, if another step would not end in time.

        All processes must call this at the same point.
        """
        if not self.why and self.launched and os.getppid() != self._parent:
            self.why = "because its launcher is gone"
        if not self.why and before_step and self._deadline is not None and not self._deadline.fits():
            self.why = LATE
        reasons = [why for why in processes.gather([self.why]) if why]
        if reasons:
            self.why = reasons[0]
            raise StopNow

    @contextmanager
    def at_once(self, processes: "Processes") -> Iterator[None]:
        """Lets a signal raise StopNow immediately inside the block, in which nothing may be trained, in a single process.

        With several processes, one that left would leave the others waiting in a collective: they stop at the next `check`.
        """
        self._at_once, self._sampling = processes.world == 1, True
        try:
            if self._at_once and self.why:
                raise StopNow
            yield
        finally:
            self._at_once = self._sampling = False
