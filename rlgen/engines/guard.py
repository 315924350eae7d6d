"""Runs a command that ends when its owner ends. Started as a file, by the system's own Python library alone.

    python guard.py OWNER_PID FOLDER COMMAND...

The command gets a process group of its own. When the owner is gone, however it went, or this process is asked to stop, the
command is asked to stop; then whoever is left in the group is killed, and FOLDER and the group's shared memory are removed.
Ends with the command's exit code. Linux only.
"""

import contextlib
import ctypes
import glob
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds between asking and killing
POLL = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Names that Python's and vLLM's shared memory has in /dev/shm. Files of others, such as weights in transfer, are theirs.
SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
prctl = ctypes.CDLL(None).prctl


def main(owner: int, folder: str, command: list[str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command come to us, so that their end is seen
    child = subprocess.Popen(command, process_group=0, preexec_fn=end_with_guard)
    shared: set[str] = set()
    try:
        while child.poll() is None and not asked and os.getppid() == owner:
            time.sleep(POLL)
        shared |= shared_memory(child.pid)
        if child.poll() is None:
            child.terminate()
            end = time.monotonic() + GRACE
            while child.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
    finally:
        # The command's children: an engine outlives a server that crashed.
        shared |= shared_memory(child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        # vLLM names it after its rendezvous file.
        for name in glob.glob("vllm_dist_*", root_dir=folder):
            shared |= set(glob.glob(f"/dev/shm/{name}*"))
        for path in shared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end_with_guard() -> None:
    """Should this guard itself be killed, the kernel asks the command to stop."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shared_memory(group: int) -> set[str]:
    """Files in /dev/shm that the processes of a group have open as shared memory."""
    inodes: set[str] = set()  # a semaphore is mapped under another name than it has
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/maps", encoding="utf-8") as maps:
                    inodes |= {line.split()[4] for line in maps if " /dev/shm/" in line}
    found: set[str] = set()
    for path in glob.glob("/dev/shm/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.startswith(SHARED) and str(os.stat(path).st_ino) in inodes:
                found.add(path)
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
