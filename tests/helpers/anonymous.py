"""Anonymous memory of a process: without pages of mapped files."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Read from outside, where its interpreter's lock delays nothing.
WATCH = """
import sys, time, threading
path, most, over = f"/proc/{sys.argv[1]}/status", 0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("ready", flush=True)
while not over.wait(0.001):
    with open(path) as file:
        most = max(most, next(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
print(most)
"""


def anonymous() -> int:
    """Bytes of this process now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def watched(found: dict[str, int]) -> Iterator[None]:
    """Bytes at the peak of the block, and held after it, beyond those held before."""
    before = anonymous()
    words = [sys.executable, "-S", "-c", WATCH, str(os.getpid())]
    watch = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
    yield
    most, _ = watch.communicate("")
    found |= {"peak": (int(most) << 10) - before, "held": anonymous() - before}


def give_back() -> None:
    """Gives freed memory back to the kernel, so that what is allocated next counts."""
    ctypes.CDLL(None).malloc_trim(0)
