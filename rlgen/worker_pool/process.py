"""Starts one worker process, exchanges records with it, reads its stack when it hangs, and kills it with its children."""

import json
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlgen.errors import CheckpointError
from rlgen.files import open_log
from rlgen.worker_pool.worker import BLOCK, UNLIMITED, WorkerCall, message

# The worker has the trainer's sys.path, so that imports find the same files; -P keeps the working directory out of it.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlgen.worker_pool.{0} import {1}; {1}(*map(int, sys.argv[2:]))"
)
MARK = "RLGEN_WORKER"  # environment variable of a worker and of everything that it starts
NOT_USERS = re.compile("importlib|/rlgen/(worker_pool|rewards|tools)/")  # files that a stack passes before the user's
TELLING = 0.2  # seconds that a hanging worker has to write its stack
STACK_ENDS = (b" in <module>\n", b"  ...\n")  # last line of a whole stack, and of one that is cut off after many frames
CLOSING = 1.0  # seconds that processes have to end by themselves
LONGEST_LOG = 64 << 20  # bytes of the log of what the user's code prints; a longer one is emptied


class WorkerLost(Exception):
    """Raised when a worker closed its socket, or sent something that is not a record."""


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """One worker process, as the trainer sees it."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    stack: IO[bytes]  # where the process writes its position when it hangs or crashes
    mark: str
    started: float
    ready: bool = False
    calls: dict[int, WorkerCall] = field(default_factory=dict)  # sent and not answered, in the order of sending
    began: dict[int, float] = field(default_factory=dict)  # call id -> time at which it began, of the calls that run
    takes_more: bool = False  # whether further async calls may be sent while these run
    heard: float = 0.0  # time of its last record, or of the first call sent while it was idle
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytes = b""

    def ask(self, calls: Sequence[WorkerCall], takes_more: bool) -> None:
        """Sends calls and notes that they are unanswered. Raises WorkerLost if the socket fails."""
        if not self.calls:
            self.heard = time.monotonic()
        self.takes_more = takes_more
        self.calls.update((call.id, call) for call in calls)
        self.send(calls)

    def send(self, record: object) -> None:
        """Sends as much of a record as the socket takes now; `flush` sends the rest. Raises WorkerLost if the socket fails."""
        self.unsent += message(record)
        self.flush()

    def flush(self) -> None:
        """Sends as many of the unsent bytes as the socket takes now. Raises WorkerLost if the socket fails."""
        try:
            while self.unsent:
                del self.unsent[: self.line.send(self.unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise WorkerLost(str(error)) from error

    @property
    def waits_for(self) -> int:
        """Returns the selector events to wait for: always READ, and WRITE while bytes are unsent."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the complete records that have arrived. Raises WorkerLost behind them, if the worker closed its socket or sent
        something that is not a JSON object.
        """
        try:
            data = self.line.recv(BLOCK)
        except BlockingIOError:
            return
        except OSError as error:
            raise WorkerLost(f"lost its connection to the trainer: {error}") from error
        if not data:
            raise WorkerLost("closed its connection to the trainer")
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError as error:
                raise WorkerLost(f"sent invalid data to the trainer: {error}") from error
            if not isinstance(record, dict):
                raise WorkerLost("sent invalid data to the trainer")
            yield record

    def excuse(self, seconds: float) -> None:
        """Moves all start times forward by `seconds`: all processes may have been suspended, which must cause no timeout."""
        self.started += seconds
        self.heard += seconds
        self.began = {call: since + seconds for call, since in self.began.items()}

    def place(self, file: str | None) -> str:
        """Returns the position that the process wrote when it hung or crashed, as "(rewards.py:12)", if it can in `file`."""
        written = self._stack().decode("utf-8", "replace")
        frames = re.findall(r'File "(.+?)", line (\d+) in', written)
        frames = [frame for frame in frames if not NOT_USERS.search(frame[0])] or frames
        own = [frame for frame in frames if frame[0] == file] or frames
        return f"({own[0][0]}:{own[0][1]})" if own else ""

    def _stack(self) -> bytes:
        return os.pread(self.stack.fileno(), 1 << 16, 0)

    def place_while_it_hangs(self, file: str | None) -> str:
        """Asks a hanging process to write its stack (SIGUSR1), waits at most TELLING seconds, and returns `place`."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + TELLING
        while time.monotonic() < deadline and not self._stack().endswith(STACK_ENDS):  # it writes frame by frame
            time.sleep(0.005)
        return self.place(file)

    def ended(self) -> bool:
        """Returns whether the process has ended. It is not reaped: its pid must not be reused before its group is killed."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """Kills the process and everything that it started, and returns its exit status."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        for _ in range(20):  # a process that forks meanwhile is found in the next round
            strays = marked(self.mark)
            for pid in strays:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not strays:
                break
            time.sleep(0.01)
        self.line.close()
        self.stack.close()
        return status


class Printer:
    """Runs the process that writes what the workers print to a file, without its secrets (`rlgen.worker_pool.printed`)."""

    def __init__(self, output: Path | None) -> None:
        """Starts nothing: `pipe` does. `output`: the file; None: standard error."""
        self._output = output
        self.process: subprocess.Popen[bytes] | None = None

    def pipe(self) -> IO[bytes]:
        """Returns the pipe to the process, which is started if it does not run: workers would die at a broken pipe."""
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is None:
            with open_log(self._output) if self._output else open(os.dup(2), "wb") as end:
                self.process = subprocess.Popen(
                    python("printed.copy_output", LONGEST_LOG if self._output else 0),
                    stdin=subprocess.PIPE,
                    stdout=end,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        assert self.process.stdin is not None  # a pipe
        return self.process.stdin

    def close(self) -> None:
        """Closes the pipe, waits at most CLOSING seconds for the process to write what it was sent, and kills it."""
        if self.process is None:
            return
        assert self.process.stdin is not None  # a pipe
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSING)  # a process left by the user's code may hold the pipe open
        self.process.kill()
        self.process.wait()
        self.process = None


def start_worker(memory: int | None, printer: Printer) -> WorkerProcess:
    """Starts a worker process, which may use `memory` bytes; None: as many as there are, until it limits itself.

    Raises:
        OSError: no process can be started.
        CheckpointError: the disk is full.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    with ExitStack() as undo:
        printed = printer.pipe()
        stack = undo.enter_context(temporary())  # the worker's kill closes it
        ours, theirs = map(undo.enter_context, socket.socketpair())
        files = (theirs.fileno(), stack.fileno())
        process = subprocess.Popen(
            python("worker.run_worker", *files, os.getpid(), UNLIMITED if memory is None else memory),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=files,
            env={**os.environ, MARK: mark},
            start_new_session=True,  # Ctrl-C reaches only the trainer, and killpg the whole group
        )
        undo.pop_all()
    theirs.close()
    ours.setblocking(False)
    return WorkerProcess(process=process, line=ours, stack=stack, mark=mark, started=time.monotonic())


def python(function: str, *arguments: int) -> list[str]:
    """Returns the command that runs a function of this folder, such as "worker.run_worker", in a new process."""
    return [sys.executable, "-uP", "-c", START.format(*function.split(".")), json.dumps(sys.path), *map(str, arguments)]


def temporary() -> IO[bytes]:
    """Opens a temporary file without a name. Raises CheckpointError if the disk is full or there is no folder for it."""
    try:
        with ExitStack() as undo:
            file = undo.enter_context(tempfile.TemporaryFile(buffering=0))
            file.write(b" ")  # fails where the disk is full
            file.truncate(0)
            file.seek(0)
            undo.pop_all()
            return file
    except OSError as error:
        raise CheckpointError(f"no temporary file can be written: {error}; free space, or set TMPDIR") from error


def marked(mark: str) -> list[int]:
    """Returns the pids of living processes that a worker started, including those that left its session and its process group."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):  # there is no /proc except on Linux: only the process group is killed there
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def exit_text(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
