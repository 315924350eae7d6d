"""Runs functions of the user, rewards or tools, in a process of their own, which is killed when a call takes too long, and dies
with the trainer.

The user's code is imported only here: it may hang, hold the interpreter's lock, allocate memory, print, exit or crash, and the
trainer loses one call. Messages from the trainer are pickled. Messages to the trainer are one JSON object a line, so that the
trainer never unpickles anything that the user's code made. This module imports little, so that a new worker starts quickly.

{"facts": [...]}                              after the imports, or {"refused": "why"}
{"began": 3}                                  an async call, or the first of a list of calls, has begun: its timeout starts
{"done": 3, "value": [1.0], "seconds": 0.1}  or with "cause", "message" and "traceback" instead of a value

The trainer sends the sources first, and then lists of calls. Lists of async calls may arrive while earlier ones run; lists
of other calls arrive only when the last list is done. Calls of such a list run one after the other, and the answer to one means
that the next has begun: so the trainer knows during which call a worker has hung or crashed.
"""

import ctypes
import faulthandler
import io
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rlgen.errors import RlgenError, redacted
from rlgen.worker_pool.failures import Failed, user_line
from rlgen.worker_pool.source import FunctionSource, Loaded

LONGEST_LINE = 1 << 16  # characters without a line end after which they are written anyway
LENGTH = 8  # bytes of the length that precedes each message to a worker
BLOCK = 1 << 20  # bytes read at a time
PR_SET_PDEATHSIG = 1
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One call of a function, as it is sent to a worker."""

    id: int
    source: int  # index into the list of sources
    arguments: dict[str, Any]
    size: int | None  # of a group's reward: the values that it returns; of a tool: the most characters; None: a single value


def message(record: object) -> bytes:
    """Returns the bytes that are sent to a worker: the length in LENGTH bytes, then the pickled record."""
    data = pickle.dumps(record)
    return len(data).to_bytes(LENGTH) + data


def ids_from(data: bytes) -> list[int]:
    """Returns token ids from int32 bytes; `SentIds` unpickles to this list."""
    return array("i", data).tolist()


@dataclass(slots=True)
class TrainerSocket:
    """The worker's end of the socket to the trainer. A child process that the user's code forked exits when it uses it."""

    socket: socket.socket
    pid: int

    def receive(self) -> Any:
        """Waits for the next message and returns it; None: the trainer has closed the socket."""
        self.end_forked()
        length = self.read(LENGTH)
        return pickle.loads(self.read(int.from_bytes(length))) if length else None

    def read(self, size: int) -> bytes:
        """Returns exactly `size` bytes, b"" at the end of the stream. Reads no further: a selector must see later bytes."""
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(BLOCK, size - len(data)))
            if not part:
                return b""
            data += part
        return bytes(data)

    def say(self, **record: Any) -> None:
        self.end_forked()
        self.socket.sendall(json.dumps(record).encode() + b"\n")

    def end_forked(self) -> None:
        """Exits if this process is a fork of the worker: it must not read or write the worker's socket."""
        if os.getpid() != self.pid:
            os._exit(0)


def answer(call: WorkerCall, outcome: Any, start: float) -> dict[str, Any]:
    """Returns the record with the result of a call that began at `start` (`time.perf_counter`)."""
    record = {"done": call.id, "seconds": time.perf_counter() - start}
    return record | (asdict(outcome) if isinstance(outcome, Failed) else {"value": outcome})


def run_in_order(calls: Sequence[WorkerCall], loaded: Sequence[Loaded], line: TrainerSocket) -> None:
    """Calls functions that are not async one after the other, and sends each result."""
    line.say(began=calls[0].id)
    for call in calls:
        one, start = loaded[call.source], time.perf_counter()
        outcome: Any
        try:
            outcome = one.value(one.function(**call.arguments), call.size)
        except BaseException as error:  # user code may raise anything; an error is no answer
            outcome = one.failure(error)
        line.say(**answer(call, outcome, start))


async def run_async(call: WorkerCall, one: Loaded, timeout: float, line: TrainerSocket) -> None:
    """Calls an async function, cancels it at its timeout, and sends the result."""
    import asyncio

    line.say(began=call.id)
    start = time.perf_counter()
    outcome: Any
    clock, where = asyncio.timeout(timeout), ""
    try:
        async with clock:
            returned = await one.function(**call.arguments)
        outcome = one.value(returned, call.size)
    except BaseException as error:
        where = user_line(error.__cause__ or error, one.facts.file)
        outcome = one.failure(error)
    if clock.expired():  # true even if the function caught the cancellation
        outcome = Failed("timeout", f"no answer within {timeout:g} s {where}".rstrip())
    line.say(**answer(call, outcome, start))


async def run_at_once(
    calls: Sequence[WorkerCall], loaded: Sequence[Loaded], timeouts: Sequence[float], line: TrainerSocket
) -> None:
    """Runs async calls concurrently, and also those that the trainer sends until the last of them is answered."""
    import asyncio

    loop, unanswered = asyncio.get_running_loop(), len(calls)

    async def run(call: WorkerCall) -> None:
        nonlocal unanswered
        await run_async(call, loaded[call.source], timeouts[call.source], line)
        unanswered -= 1

    def take() -> None:
        nonlocal unanswered
        if unanswered:  # else the message is left to `answer_calls`, as it may be calls of functions that are not async
            further = line.receive() or ()
            unanswered += len(further)
            for call in further:
                group.create_task(run(call))
            if not further:  # the trainer has closed the socket
                loop.remove_reader(line.socket)

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(run(call))
        loop.add_reader(line.socket, take)
    loop.remove_reader(line.socket)


def answer_calls(line: TrainerSocket) -> None:
    """Imports the functions, reports their facts, and answers calls until the trainer closes the socket."""
    sources: list[FunctionSource] = line.receive() or []
    try:
        loaded = [source.load() for source in sources]
    except RlgenError as error:
        line.say(refused=str(error))
        return
    line.say(facts=[asdict(one.facts) for one in loaded])
    runner: Any = None
    while calls := line.receive():
        if not loaded[calls[0].source].facts.is_async:
            run_in_order(calls, loaded, line)
            continue
        if runner is None:
            import asyncio

            runner = asyncio.Runner()  # kept for all steps: clients that the user's code opened live in its loop
        runner.run(run_at_once(calls, loaded, [source.timeout for source in sources], line))
    if runner is not None:
        runner.close()


class Printed(io.TextIOBase):
    """Standard output of the worker: writes line by line, without secrets, also those that calls put into its environment."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        whole, _, self._rest = (self._rest + text).rpartition("\n")
        if whole or text.endswith("\n"):
            self._put(f"{whole}\n")
        if len(self._rest) > LONGEST_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        self._put(rest)

    def fileno(self) -> int:
        return self._descriptor

    def _put(self, text: str) -> None:
        unsaid = "\n".join(map(redacted, text.split("\n"))).encode("utf-8", "backslashreplace")
        with suppress(OSError):  # a full disk loses the output, not the answer
            while unsaid:
                unsaid = unsaid[os.write(self._descriptor, unsaid) :]


def run_worker(line: int, stack: int, parent: int, memory: int) -> None:
    """Runs a worker process.

    Args:
        line: open file: the socket to the trainer.
        stack: open file, in which the process writes its position when it hangs or crashes.
        parent: process id of the trainer.
        memory: bytes that this process may use; UNLIMITED: a reward limits them after it has loaded its model.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl took effect
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory != UNLIMITED:
        # RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space that they never use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    for descriptor in (line, stack):
        os.set_inheritable(descriptor, False)
    # faulthandler writes without the interpreter's lock, which the call may hold.
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.stdout, sys.stderr = Printed(1), Printed(2)
    answer_calls(TrainerSocket(socket.socket(fileno=line), os.getpid()))
