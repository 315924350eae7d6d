"""A run that is asked to stop saves the last step that it has trained, and ends.

Asked by SIGINT, SIGTERM or SIGUSR1, by its launcher's end, or in time for `run.must_save_by`. A step whose weights have begun to
move is finished first; one that only samples and rewards is given up.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rlgen.run.deadline import Deadline

if TYPE_CHECKING:  # it brings torch, and signals may come while that is imported
    from rlgen.processes import Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
DUE = signal.SIGUSR2  # from the deadline's timer to this process: it interrupts whatever that is waiting for
LATE = "for run.must_save_by"
ECHO_SECONDS = 2.0  # within which a launcher passes on what a terminal has sent to its processes already


class StopNow(KeyboardInterrupt):
    """Nothing has been trained since the last step. No `Exception`: what lies between must not take it for a failure."""


class StopRequest:
    """The first signal asks; the second one interrupts at once.

    Args:
        launched: a launcher passes on what a terminal has sent to all processes already, and sends SIGTERM to those that are
            left when one has ended: its signals repeat, and mean no haste. A second SIGINT does that comes seconds later. The
            launcher kills after 30 seconds. When it is gone itself nobody looks after its processes: they stop, too.
    """

    def __init__(self, launched: bool) -> None:
        self.launched = launched
        self.why = ""  # empty: nobody asked
        self._asked = 0.0  # when the first signal came
        self._parent = os.getppid()
        self._at_once = False
        self._deadline: Deadline | None = None
        self._timer: threading.Timer | None = None
        self._timing = threading.Lock()

    def handle(self, number: int, frame: FrameType | None) -> None:
        before = self.why
        if number == DUE:
            self.why = before or LATE
        elif self._asked and not self._echo(number):
            raise KeyboardInterrupt
        else:
            self._asked = self._asked or time.monotonic()
            self.why = before or f"on request ({signal.Signals(number).name})"
        if self._at_once and not before:
            raise StopNow

    def _echo(self, number: int) -> bool:
        return self.launched and (number != signal.SIGINT or time.monotonic() - self._asked < ECHO_SECONDS)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handles the signals inside the block, and of a launched process until its end."""
        before = {number: signal.signal(number, self.handle) for number in (*SIGNALS, DUE)}
        try:
            yield self
        finally:
            self._disarm()
            if not self.launched:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def by(self, deadline: Deadline | None) -> None:
        """Stops in time for it."""
        self._deadline = deadline
        self._arm()

    def took(self, step: float, update: float, save: float) -> None:
        """As `Deadline.took`."""
        if self._deadline is not None:
            self._deadline.took(step, update, save)
            self._arm()

    def _arm(self) -> None:
        """Asks to stop when there is just time left for an update and its save."""
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
        with self._timing:  # once disarmed nobody may be listening any more
            if self._timer is threading.current_thread():
                os.kill(os.getpid(), DUE)

    def check(self, processes: "Processes", before_step: bool = False) -> None:
        """Raises StopNow in all processes if one of them was asked to stop. All come here at the same place.

        Args:
            before_step: the deadline counts, too.
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
        """Inside the block nothing is trained: one process alone raises StopNow wherever it stands.

        Of several processes, one that left would leave the others waiting: they stop at the next `check`.
        """
        self._at_once = processes.world == 1
        try:
            if self._at_once and self.why:
                raise StopNow
            yield
        finally:
            self._at_once = False
