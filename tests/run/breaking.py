"""Breaks the library of a tracker in mid-run, in the process that holds it: its third record raises, hangs or kills."""

import os
import signal
import time
from itertools import count
from typing import Any

import psutil
from helpers.before import before

from rlgen.run.sinks import worker
from rlgen.run.sinks.tracker import Opening, Tracker

# What of the library a tracker calls for a record of metrics.
CALLS = {
    "WandbTracker": ("run", "log"),
    "TrackioTracker": ("run", "log"),
    "TensorboardTracker": ("writer", "add_event"),
    "MlflowTracker": ("client", "log_batch"),
}
THIRD = 3


def raises() -> None:
    raise RuntimeError("broken by a test")


def hangs() -> None:
    time.sleep(1e6)


def killed() -> None:
    """Kills the service process of the library, such as wandb's, or else its own."""
    for process in psutil.Process().children(recursive=True) or [psutil.Process()]:
        os.kill(process.pid, signal.SIGKILL)


def arm(how: str) -> None:
    """Makes the worker open trackers whose libraries break."""
    opened = worker.open_tracker

    def open_tracker(settings: dict[str, Any], opening: Opening) -> Tracker:
        tracker = opened(settings, opening)
        (holder, name), calls = CALLS[type(tracker).__name__], count(1)
        before(getattr(tracker, holder), name, lambda *_: globals()[how]() if next(calls) == THIRD else None)
        return tracker

    worker.open_tracker = open_tracker
