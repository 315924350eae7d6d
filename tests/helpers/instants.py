"""Deaths at each instant at which a process changes files.

An instant is just before a file is opened to be written, flushed, renamed or removed, or a folder made or removed.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.truncate")


class Instants:
    """Counts the instants of this process, and kills it at one of them.

    What it had opened last is then whole or, `torn` as after a power cut, half there.
    """

    def __init__(self, folder: Path, fatal: int | None, torn: bool) -> None:
        self.folder, self.fatal, self.torn = str(folder), fatal, torn
        self.count = 0
        self.last: str | None = None  # file that was opened to be written
        sys.addaudithook(self.hear)
        flush = os.fsync
        os.fsync = lambda file: (self.reached("fsync"), flush(file))[1]  # type: ignore[assignment]

    def hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            if isinstance(path, str | Path) and str(path).startswith(self.folder) and flags & (os.O_WRONLY | os.O_RDWR):
                self.reached(f"open {str(path).removeprefix(self.folder)}")
                self.last = str(path)
        elif event in CHANGES:
            self.reached(event)

    def reached(self, what: str, halve: bool = False) -> None:
        if self.count == self.fatal:
            if (halve or self.torn) and self.last and os.path.exists(self.last):
                descriptor = os.open(self.last, os.O_RDONLY)
                size = os.fstat(descriptor).st_size
                os.close(descriptor)
                self.fatal = None  # what follows is no instant
                os.truncate(self.last, size // 2)
            os.write(1, f"{what}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def in_child(work: Callable[[], int]) -> tuple[int, str]:
    """The wait status of a child that runs `work`, and what it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        try:
            os._exit(work())
        except BaseException as error:
            os.write(1, repr(error).encode())
            os._exit(99)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said.strip()
