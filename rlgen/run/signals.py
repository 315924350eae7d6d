"""A run that is asked to stop saves the last step that it has trained, and ends.

Asked by SIGINT, SIGTERM or SIGUSR1, by its launcher's end, or by `run.must_save_by`. A step whose weights have begun to move is
finished first; one that only samples and rewards is given up.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rlgen.run.deadline import Deadline

if TYPE_CHECKING:  # it brings torch, and signals may come while that is imported
    from rlgen.processes import Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 2.0  # within which a launcher passes on what a terminal has sent to its processes already


class StopNow(KeyboardInterrupt):
    """Nothing has been trained since the last step. No `Exception`: what lies between must not take it for a failure."""


class StopRequest:
    """The first signal asks; the second one interrupts at once.

    Args:
        launched: a launcher passes on what a terminal has sent to all processes already, and sends SIGTERM to those that are
            left when one has ended: its signals repeat, and mean no haste. A second SIGINT does that comes seconds later. The
            launcher kills after 30 seconds. When it is gone itself nobody looks after its processes: they stop, too.
        deadline: when the last step must be saved.
    """

    def __init__(self, launched: bool, deadline: Deadline | None = None) -> None:
        self.launched = launched
        self.deadline = deadline
        self.why = ""  # empty: nobody asked
        self._asked = 0.0
        self._parent = os.getppid()
        self._at_once = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.why and not self._echo(number):
            raise KeyboardInterrupt
        if not self.why:
            self.why, self._asked = f"on request ({signal.Signals(number).name})", time.monotonic()
        if self._at_once:
            raise StopNow

    def _echo(self, number: int) -> bool:
        return self.launched and (number != signal.SIGINT or time.monotonic() - self._asked < ECHO_SECONDS)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handles the signals inside the block, and of a launched process until its end."""
        before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        try:
            yield self
        finally:
            if not self.launched:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def check(self, processes: "Processes", before_step: bool = False) -> None:
        """Raises StopNow in all processes if one of them was asked to stop. All come here at the same place.

        Args:
            before_step: the deadline counts, too.
        """
        if not self.why and self.launched and os.getppid() != self._parent:
            self.why = "because its launcher is gone"
        if not self.why and before_step and self.deadline is not None and not self.deadline.fits():
            self.why = "for run.must_save_by"
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
