"""Runs a command that ends when its owner ends. Started as a file, by the system's own Python library alone.

    python guard.py OWNER_PID LOCK FOLDER COMMAND...
    python guard.py OWNER_PID FOLDER                    only removes FOLDER when its owner is gone

The command gets a process group of its own. When the owner is gone, however it went, or this process is asked to stop, the
command is asked to stop; then whoever is left in the group is killed, and FOLDER and the group's shared memory are removed. Ends
with the command's exit code. Linux only.

LOCK is a descriptor of FOLDER/lock, locked: owner, guard and command hold it. Should all of them be killed at once, the next
owner finds FOLDER with a lock that nobody holds, and removes it with the shared memory that FOLDER/shared names (`sweep`).
"""

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds between asking and killing
POLL = 0.2
NOTE = 10  # polls between two looks at the group's shared memory
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Names that Python's and vLLM's shared memory has in /dev/shm. Files of others, such as weights in transfer, are theirs.
SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
prctl = ctypes.CDLL(None).prctl


def main(owner: int, lock: int, folder: str, command: list[str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command come to us, so that their end is seen
    child = subprocess.Popen(command, process_group=0, preexec_fn=end_with_guard, pass_fds=[lock])
    shared: dict[str, int] = {}
    try:
        polls = 0
        while child.poll() is None and not asked and os.getppid() == owner:
            polls += 1
            if polls % NOTE == 0:
                note(folder, shared_memory(child.pid))
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
        remove(folder, shared)
    return code if code >= 0 else 128 - code


def only_remove(owner: int, folder: str) -> None:
    """Waits until FOLDER's owner is gone, or has removed it."""
    while os.getppid() == owner and os.path.isdir(folder):
        time.sleep(POLL)
    shutil.rmtree(folder, ignore_errors=True)


def end_with_guard() -> None:
    """Should this guard itself be killed, the kernel asks the command to stop."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shared_memory(group: int) -> dict[str, int]:
    """Files in /dev/shm that the processes of a group have open as shared memory, with their inodes."""
    inodes: set[str] = set()  # a semaphore is mapped under another name than it has
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/maps", encoding="utf-8") as maps:
                    inodes |= {line.split()[4] for line in maps if " /dev/shm/" in line}
    found: dict[str, int] = {}
    for path in glob.glob("/dev/shm/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.startswith(SHARED) and str(inode := os.stat(path).st_ino) in inodes:
                found[path] = inode
    return found


def note(folder: str, shared: dict[str, int]) -> None:
    """Keeps what the group has, should nobody live to remove it."""
    with contextlib.suppress(OSError):
        with open(f"{folder}/shared.new", "w", encoding="utf-8") as file:
            json.dump(shared, file)
        os.rename(f"{folder}/shared.new", f"{folder}/shared")


def remove(folder: str, shared: dict[str, int]) -> None:
    """Removes a folder, and the shared memory of its group: files that are still the same ones."""
    # vLLM names it after its rendezvous file.
    for name in glob.glob("vllm_dist_*", root_dir=folder):
        shared |= {path: os.stat(path).st_ino for path in glob.glob(f"/dev/shm/{name}*")}
    for path, inode in shared.items():
        with contextlib.suppress(OSError):
            if path.startswith(SHARED) and os.stat(path).st_ino == inode:
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def locked(folder: str) -> int:
    """A descriptor of FOLDER/lock, locked; whoever inherits it holds it too."""
    lock = os.open(f"{folder}/lock.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{folder}/lock.new", f"{folder}/lock")  # never seen without its lock
    return lock


def sweep(parent: str) -> None:
    """Removes what servers of this user left in `parent` whose owner, guard and command were all killed."""
    for folder in glob.glob(f"{glob.escape(parent)}/rlgen-????????"):
        with contextlib.suppress(OSError, ValueError):  # no lock: it is being made, or another's; locked: it is in use
            if os.lstat(folder).st_uid != os.getuid():
                continue
            lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shared: dict[str, int] = {}
                with contextlib.suppress(FileNotFoundError), open(f"{folder}/shared", encoding="utf-8") as file:
                    shared = {path: inode for path, inode in json.load(file).items() if "/../" not in path}
                remove(folder, shared)
            finally:
                os.close(lock)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        only_remove(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
