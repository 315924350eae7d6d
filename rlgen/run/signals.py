"""A run that is asked to stop finishes its step and saves."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`requested` turns true at the first SIGINT or SIGTERM; the second one interrupts at once.

    Args:
        launched: a launcher passes on what a terminal has sent to all processes already, and stops those that are left when one
            has ended: its signals repeat, and mean no haste. It kills after 30 seconds.
    """

    def __init__(self, launched: bool) -> None:
        self.requested = False
        self.launched = launched

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and not self.launched:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handles SIGINT and SIGTERM inside the block, and of a launched process until its end."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            if not self.launched:
                for number, handler in before.items():
                    signal.signal(number, handler)
