"""Runs a command and ends it when its owner process ends. Runs as a script and uses only Python's standard library.

    python guard.py OWNER_PID LOCK FOLDER COMMAND...
    python guard.py OWNER_PID FOLDER                    only removes FOLDER when its owner has ended

The command gets its own process group. When the owner has ended, in whatever way, or this process gets SIGTERM or SIGINT, the
command gets SIGTERM; after GRACE seconds every process left in the group is killed, and FOLDER and the group's shared memory are
removed. The exit code is the command's. Linux only.

LOCK is a file descriptor of the locked file FOLDER/lock, which owner, guard and command keep open. If all of them are killed at
once, the next owner finds FOLDER with a lock that no process holds, and removes it with the shared memory listed in
FOLDER/shared (`sweep`).
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

GRACE = 10.0  # seconds between SIGTERM and SIGKILL
POLL = 0.2
NOTE = 10  # polls between two scans of the group's shared memory
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Prefixes of Python's and vLLM's shared memory in /dev/shm. Other files there, such as weights in transfer, are not removed.
SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
prctl = ctypes.CDLL(None).prctl


def run_guarded(owner: int, lock: int, folder: str, command: list[str]) -> int:
    """Runs the command until it ends, the owner ends or a signal arrives, then cleans up. Returns the command's exit code."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # this process becomes the parent of the command's orphans, to wait for them
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
    finally:
        # Kills the command's children too: an engine keeps running after its server crashed.
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
    """Removes the folder when its owner has ended, unless the owner has."""
    while os.getppid() == owner and os.path.isdir(folder):
        time.sleep(POLL)
    shutil.rmtree(folder, ignore_errors=True)


def end_with_guard() -> None:
    """Makes the kernel send SIGTERM to the calling process when this guard is killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shared_memory(group: int) -> dict[str, int]:
    """Returns the files in /dev/shm that processes of a group have mapped as shared memory, with their inodes."""
    inodes: set[str] = set()  # inodes, because a semaphore is mapped under another name than its file's
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
    """Writes the list of the group's shared memory to FOLDER/shared, for `sweep` if all processes are killed."""
    with contextlib.suppress(OSError):
        with open(f"{folder}/shared.new", "w", encoding="utf-8") as file:
            json.dump(shared, file)
        os.rename(f"{folder}/shared.new", f"{folder}/shared")


def remove(folder: str, shared: dict[str, int]) -> None:
    """Removes a folder and the group's shared memory. A file is removed only if its inode is still the same."""
    # vLLM names this shared memory after its rendezvous file.
    for name in glob.glob("vllm_dist_*", root_dir=folder):
        shared |= {path: os.stat(path).st_ino for path in glob.glob(f"/dev/shm/{name}*")}
    for path, inode in shared.items():
        with contextlib.suppress(OSError):
            if path.startswith(SHARED) and os.stat(path).st_ino == inode:
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def locked(folder: str) -> int:
    """Creates and locks FOLDER/lock and returns its file descriptor; processes that inherit it hold the lock too."""
    lock = os.open(f"{folder}/lock.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{folder}/lock.new", f"{folder}/lock")  # atomic rename: the file is locked from the start
    return lock


def is_locked(folder: str) -> bool:
    """Returns whether a running process holds FOLDER/lock; False, too, if there is no such file."""
    try:
        lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def sweep(parent: str) -> None:
    """Removes the folders that servers of this user left in `parent` when owner, guard and command were all killed."""
    for folder in glob.glob(f"{glob.escape(parent)}/rlgen-????????"):
        with contextlib.suppress(OSError, ValueError):  # no lock file: incomplete or not rlgen's
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
        sys.exit(run_guarded(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
