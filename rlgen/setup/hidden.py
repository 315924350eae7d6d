"""Keeps what libraries print off the screen: it goes to a log of the run, without secrets."""

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from rlgen.run.console import OUTPUTS
from rlgen.worker_pool.process import Printer


class Hidden:
    """Sends what this process writes to descriptors 1 and 2 to a file: warnings and progress bars, from Python and from C.

    A stream that `rlgen.run.console.apart` returned before still leads to the screen. Descriptors are as before when the block
    ends.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> "Hidden":
        return self

    def to(self, path: Path) -> None:
        """Appends what is printed from now on to the file at `path`. Raises CheckpointError if it cannot be opened."""
        self._undo.close()
        printer = Printer(path)
        self._undo.callback(printer.close)  # last, when nothing writes to its pipe any more
        pipe = printer.pipe()
        flush()
        for output in OUTPUTS:
            with suppress(OSError):  # closed, as by `rlgen train … >&-`
                copy = os.dup(output)
                self._undo.callback(os.close, copy)
                self._undo.callback(os.dup2, copy, output)
                os.dup2(pipe.fileno(), output)
        self._undo.callback(flush)

    def __exit__(self, *exc: object) -> None:
        self._undo.close()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
