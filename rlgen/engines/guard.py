"""Runs a command that ends when its owner ends. Started as a file, by the system's own Python library alone.

    python guard.py OWNER_PID FOLDER COMMAND...

The command gets a process group of its own. When the owner is gone, however it went, or this process is asked to stop, the
group is asked to stop and then killed, whoever is left in it; FOLDER is removed. Ends with the command's exit code.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds between asking and killing
POLL = 0.2
PR_SET_PDEATHSIG = 1


def main(owner: int, folder: str, command: list[str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    child = subprocess.Popen(command, process_group=0, preexec_fn=end_with_guard)
    try:
        while child.poll() is None and not asked and os.getppid() == owner:
            time.sleep(POLL)
        if child.poll() is None:
            child.terminate()
            end = time.monotonic() + GRACE
            while child.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
    finally:
        # Its children are in its group: an engine outlives a server that crashed.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = child.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end_with_guard() -> None:
    """Should this guard itself be killed, the kernel asks the command to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
