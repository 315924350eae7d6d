"""Worker processes for reward functions: calls go out in chunks, results come back one by one, what hangs is killed.

A worker that is killed or dies costs the call that it was at. The rest of its chunk is asked of another one, and what it had
answered stands. Nothing here waits without a limit.
"""

import json
import logging
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from ctypes import sizeof
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from rlgen.errors import CheckpointError, RewardError
from rlgen.files import open_log
from rlgen.rewards.worker import NO_CALL, Call, Chunk, Facts, Failed, Present, Source

# The paths of the trainer, so that the same names mean the same files; -P: nothing of the working directory comes before them.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlgen.rewards.{} import main; main(*map(int, sys.argv[2:]))"
)
MARK = "RLGEN_REWARD_WORKER"  # in the environment of a worker and of all that it starts
LONGEST_CHUNK = 256  # calls
CHUNK_SECONDS = 0.05  # that a chunk is to take: long beside the way there and back, short beside what others would wait
GUESS = CHUNK_SECONDS / 4  # seconds of a call of a reward that was never called
GROW_AFTER = 0.2  # seconds that calls wait before another worker is started: most rewards are done by then
GRACE = 2.0  # seconds that an async call has for its end beyond its deadline, before the worker is killed: others pay for that
PATIENCE = 20.0  # seconds that a worker has to take a chunk, or to say that it began
POLL = 0.1  # seconds between looks at workers that may have died without closing their line
STARTS = 3  # of workers that fail one after the other, though the imports have worked, before that ends the run
STOPPED = 1.0  # seconds that a look comes too late, after which this process was stopped, and the workers perhaps with it
LAST_WORDS = 0.2  # seconds that a hanging worker has to write where it is
CLOSING = 1.0  # seconds that workers have to end by themselves
LONGEST_LOG = 64 << 20  # bytes of what the user's code prints; beyond, it starts anew
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What worker processes may use."""

    workers: int
    memory: int  # bytes of each
    import_timeout: float  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    id: int
    values: tuple[float | None, ...] | Failed  # one value a sample
    seconds: float


class WorkerLost(Exception):
    """A worker closed its line, or sent something else than records."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process, seen from the trainer."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    present: Present
    stack: IO[bytes]  # where the process writes its position when it hangs or crashes
    mark: str
    started: float
    ready: bool = False
    chunk: Chunk | None = None
    waiting: dict[int, Call] = field(default_factory=dict)  # of the chunk, not answered yet, in order
    crowd: dict[int, float] = field(default_factory=dict)  # when async calls that are not answered yet began
    asked: float = 0.0  # when the chunk was sent
    heard: float = 0.0  # when it answered last, or was asked
    excused: float = 0.0  # seconds since then for which it may have been stopped
    unread: bytes = b""

    def ask(self, chunk: Chunk) -> None:
        """Raises WorkerLost."""
        self.chunk, self.asked, self.excused = chunk, time.monotonic(), 0.0
        self.heard = self.asked
        self.waiting = {call.id: call for call in chunk.calls}
        self.crowd = {}
        self.send(chunk)

    @property
    def began(self) -> dict[int, float]:
        """The calls that it is at, and since when."""
        if self.chunk is None or self.chunk.side_by_side:
            return self.crowd
        call, since = self.present.read()
        # One of an earlier chunk, which the worker has not yet left, may have the same id.
        return {call: since} if call in self.waiting and since >= self.asked else {}

    @property
    def moved(self) -> float:
        """When it was last seen to do something: to answer, to begin a call or to end its last one."""
        return max(self.heard, self.present.since)

    def send(self, record: object) -> None:
        self.line.settimeout(PATIENCE)
        try:
            self.line.sendall(pickle.dumps(record))
        except OSError as error:  # also a timeout
            raise WorkerLost(str(error)) from error

    def read(self) -> list[dict[str, Any]]:
        """What it has said. Raises WorkerLost."""
        self.line.settimeout(0)
        try:
            data = self.line.recv(1 << 20)
            if not data:
                raise WorkerLost("closed its line")
            *lines, self.unread = (self.unread + data).split(b"\n")
            records = [json.loads(line) for line in lines]
        except BlockingIOError:
            return []
        except (OSError, ValueError) as error:
            raise WorkerLost(f"spoilt its line to the trainer: {error}") from error
        if not all(isinstance(record, dict) for record in records):
            raise WorkerLost("spoilt its line to the trainer")
        return records

    def place(self, file: str | None) -> str:
        """ "(rewards.py:12)": where the process wrote that it was; preferably in `file`."""
        written = os.pread(self.stack.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        frames = re.findall(r'File "(.+?)", line (\d+) in', written)
        frames = [frame for frame in frames if "importlib" not in frame[0] and "/rlgen/rewards/" not in frame[0]] or frames
        own = [frame for frame in frames if frame[0] == file] or frames
        return f"({own[0][0]}:{own[0][1]})" if own else ""

    def hanging_at(self, file: str | None) -> str:
        """Asks a process that does not answer where it is."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + LAST_WORDS
        while time.monotonic() < deadline and not os.fstat(self.stack.fileno()).st_size:
            time.sleep(0.005)
        time.sleep(0.005)  # it writes frame by frame
        return self.place(file)

    def ended(self) -> bool:
        """Whether it has ended by itself. It is not reaped, so that its number stays its own until its group is killed."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """Ends it and all that it started; its exit status."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        for _ in range(20):  # what is about to fork is caught in the next round
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


def python(module: str, *arguments: int) -> list[str]:
    """The command of a process that runs `main` of a module of this folder."""
    return [sys.executable, "-uP", "-c", START.format(module), json.dumps(sys.path), *map(str, arguments)]


def temporary(content: bytes) -> IO[bytes]:
    """A file without a name. Raises CheckpointError: the disk is full, or there is no folder for it."""
    try:
        with ExitStack() as undo:
            file = undo.enter_context(tempfile.TemporaryFile(buffering=0))
            file.write(content)
            undo.pop_all()
            return file
    except OSError as error:
        raise CheckpointError(f"rewards: no temporary file can be written: {error}; free space, or set TMPDIR") from error


def marked(mark: str) -> list[int]:
    """Living processes that a worker started, also those that left its session and its process group."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):  # elsewhere than on Linux there is none: the process group is all
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


class Pool:
    """The workers of one trainer process. They are started when they are needed, and serve all steps."""

    def __init__(self, sources: Sequence[Source], limits: Limits, output: Path | None) -> None:
        """`output`: file for what the user's code prints; None: standard error."""
        self._sources = list(sources)
        self._limits = limits
        self._output = output
        self._workers: list[Worker] = []
        self._printed: subprocess.Popen[bytes] | None = None  # the process to which they print
        self._facts: list[Facts] | None = None
        self._seconds: dict[int, float] = {}  # of a call, by reward: of the last ones more than of the first
        self._failed, self._failed_at = 0, 0.0  # starts of workers in a row, and when the last of them did
        self.killed = self.lost = 0  # workers, since the start

    def facts(self) -> list[Facts]:
        """What the functions are, from the first worker's imports.

        Raises:
            RewardError: an import fails or does not end.
        """
        if self._facts is None:
            self._start()
            while self._facts is None:
                self._step(None)
        return self._facts

    def run(self, calls: Sequence[Call]) -> Generator[Outcome, None, None]:
        """The outcome of each call, in the order in which they come. Ended early, it kills what still runs.

        Raises:
            RewardError: workers that were started cannot import the functions.
        """
        facts = self.facts()
        self._failed = 0  # where too many failed while others worked, it is tried again
        expected = [self._seconds.get(reward, GUESS) for reward in range(len(facts))]
        queue = Queue(calls, [fact.is_async for fact in facts], expected)
        try:
            left, last = len(calls), time.monotonic()
            while left:
                if not self._workers or (len(self._workers) < self._limits.workers and self._wanted(queue, last)):
                    self._start()
                    last = time.monotonic()
                for outcome in self._step(queue):
                    left -= 1
                    yield outcome
        finally:
            for worker in [worker for worker in self._workers if worker.chunk is not None]:
                self._end(worker)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            with suppress(OSError):
                worker.line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + CLOSING
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                # One that imports or runs a call does not see that the line is closed.
                worker.process.wait(max(0.0, deadline - time.monotonic()) if worker.ready and worker.chunk is None else 0)
            worker.kill()
        self._workers = []
        if self._printed is not None:
            assert self._printed.stdin is not None  # a pipe
            self._printed.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._printed.wait(CLOSING)  # it writes what it was sent; a stray of the user's may hold the pipe open
            self._printed.kill()
            self._printed.wait()
            self._printed = None

    def _wanted(self, queue: "Queue", last: float) -> bool:
        """Whether calls wait, and have waited for some time."""
        if not queue.chunks or self._failed >= STARTS:
            return False
        return time.monotonic() - last > GROW_AFTER and all(w.chunk or not w.ready for w in self._workers)

    def _start(self) -> None:
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with ExitStack() as undo, temporary(bytes(Present(0.0, NO_CALL))) as shared:
                printed = self._prints_to()
                stack = undo.enter_context(temporary(b""))  # closed with the worker
                ours, theirs = map(undo.enter_context, socket.socketpair())
                present = Present.from_buffer(mmap(shared.fileno(), sizeof(Present)))
                files = (theirs.fileno(), shared.fileno(), stack.fileno())
                process = subprocess.Popen(
                    python("worker", *files, os.getpid(), self._limits.memory),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=files,
                    env={**os.environ, MARK: mark},
                    start_new_session=True,  # Ctrl-C is for the trainer, and a kill reaches the whole group
                )
                undo.pop_all()
        except OSError as error:
            hint = "free memory, lower scoring.workers, or raise the limits of processes and open files (ulimit -u, -n)"
            self._not_started(time.monotonic(), f"rewards: no process can be started: {error}; {hint}")
            return
        theirs.close()
        worker = Worker(process=process, line=ours, present=present, stack=stack, mark=mark, started=time.monotonic())
        self._workers.append(worker)
        with suppress(WorkerLost):  # it is seen to be dead
            worker.send(self._sources)

    def _prints_to(self) -> IO[bytes]:
        """The pipe to the process that leaves secrets out of what is printed."""
        if self._printed is not None and self._printed.poll() is not None:  # killed: programs would die of writing to its pipe
            assert self._printed.stdin is not None  # a pipe
            self._printed.stdin.close()
            self._printed = None
        if self._printed is None:
            with open_log(self._output) if self._output else open(os.dup(2), "wb") as end:
                self._printed = subprocess.Popen(
                    python("printed", LONGEST_LOG if self._output else 0),
                    stdin=subprocess.PIPE,
                    stdout=end,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        assert self._printed.stdin is not None  # a pipe
        return self._printed.stdin

    def _end(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _step(self, queue: "Queue | None") -> list[Outcome]:
        """Hands out chunks, waits for something to happen, and says what has come of it."""
        outcomes: list[Outcome] = []
        for worker in [worker for worker in self._workers if worker.ready and worker.chunk is None]:
            chunk = queue.next(alone=worker is self._workers[0]) if queue else None
            if chunk is None:
                continue
            try:
                worker.ask(chunk)
            except WorkerLost as how:
                outcomes += self._bury(worker, queue, how)
        patience, now = self._patience(), time.monotonic()
        readable = wait([worker.line for worker in self._workers], patience)
        late = time.monotonic() - now - patience
        for worker in self._workers if late > STOPPED else ():
            worker.excused += late
        for worker in list(self._workers):
            try:
                if worker.line in readable:
                    outcomes += self._heard(worker)
                elif worker.ended():
                    outcomes += self._heard(worker)  # its last words
                    raise WorkerLost("ended")
            except WorkerLost as how:
                outcomes += self._bury(worker, queue, how)
        for worker in list(self._workers):
            outcomes += self._overdue(worker, queue)
        return outcomes

    def _patience(self) -> float:
        """Seconds until the next deadline."""
        now = time.monotonic()
        ends = [self._deadline(worker, worker.began) for worker in self._workers]
        return max(0.0, min([POLL, *(end - now for end in ends if end is not None)]))

    def _deadline(self, worker: Worker, began: dict[int, float]) -> float | None:
        """When it is to be killed, for calls that it is at and since when."""
        if not worker.ready:
            return worker.started + self._limits.import_timeout + worker.excused
        if worker.chunk is None:
            return None
        if not began:
            return worker.moved + PATIENCE + worker.excused
        grace = worker.excused + (GRACE if worker.chunk.side_by_side else 0.0)
        return min(since + self._sources[worker.waiting[call].reward].timeout for call, since in began.items()) + grace

    def _heard(self, worker: Worker) -> list[Outcome]:
        """Takes in what a worker says. Raises WorkerLost, RewardError."""
        outcomes: list[Outcome] = []
        for record in worker.read():
            worker.heard = time.monotonic()
            if "refused" in record:
                self._end(worker)
                raise RewardError(str(record["refused"]))
            if "facts" in record:
                worker.ready, self._failed = True, 0
                facts = [
                    Facts(tuple((name, kind, required) for name, kind, required in fact.pop("parameters")), **fact)
                    for fact in record["facts"]
                ]
                if self._facts is None:
                    self._facts = facts
                elif [fact.sha256 for fact in facts] != [fact.sha256 for fact in self._facts]:
                    raise RewardError("rewards: the code of a reward has changed since the run began; start the run again")
            elif record.get("began") in worker.waiting:
                worker.crowd[record["began"]] = time.monotonic()
            elif record.get("done") in worker.waiting:
                call = worker.waiting.pop(record["done"])
                worker.crowd.pop(call.id, None)
                if not worker.waiting:
                    worker.chunk = None
                outcomes.append(outcome_of(record))
                seconds = self._seconds.setdefault(call.reward, record["seconds"])
                self._seconds[call.reward] = 0.9 * seconds + 0.1 * record["seconds"]
            else:
                raise WorkerLost("spoilt its line to the trainer")
        return outcomes

    def _overdue(self, worker: Worker, queue: "Queue | None") -> list[Outcome]:
        """Kills a worker whose time is over."""
        began = worker.began  # once: it goes on, and the next call is not to blame
        deadline = self._deadline(worker, began)
        if deadline is None or time.monotonic() < deadline:
            return []
        self.killed += 1
        if not worker.ready:
            where = worker.hanging_at(self._file(worker, {}))
            self._end(worker)
            uses = ", ".join(source.use for source in self._sources)
            self._not_started(
                worker.started,
                f"rewards: the import of {uses} did not end within {self._limits.import_timeout:g} s {where};"
                " make it shorter, or raise scoring.import_timeout",
            )
            return []
        guilty = worker.waiting[next(iter(began))] if began else None
        where = worker.hanging_at(self._file(worker, began))
        self._end(worker)
        if guilty is None:
            return blame(
                worker, began, queue, Failed("died", f"the process of the reward did not begin within {PATIENCE:g} s {where}")
            )
        limit = self._sources[guilty.reward].timeout
        return blame(worker, began, queue, Failed("timeout", f"no answer within {limit:g} s {where}".rstrip()))

    def _bury(self, worker: Worker, queue: "Queue | None", lost: WorkerLost) -> list[Outcome]:
        """What follows from the death of a worker. Raises RewardError where too many died while importing."""
        began = worker.began
        deadline = time.monotonic() + POLL
        while not (ended := worker.ended()) and time.monotonic() < deadline:
            time.sleep(0.005)
        where = worker.place(self._file(worker, began))
        self.lost += 1
        status = self._end(worker)
        how = f"{ending(status) if ended else lost} {where}".rstrip()
        if not worker.ready:
            uses = ", ".join(source.use for source in self._sources)
            self._not_started(worker.started, f"rewards: the process that imports {uses} {how}")
            return []
        return blame(worker, began, queue, Failed("died", f"the process of the reward {how}"))

    def _not_started(self, since: float, why: str) -> None:
        """A worker failed before it was ready. Raises RewardError where the imports never worked, or too many failed."""
        if since > self._failed_at:  # those that were started side by side fail of one cause
            self._failed, self._failed_at = self._failed + 1, time.monotonic()
        if self._facts is None or (self._failed >= STARTS and not self._workers):
            raise RewardError(why)
        log.warning("%s; it has worked before, and the run goes on", why)

    def _file(self, worker: Worker, began: dict[int, float]) -> str | None:
        """The user's file in which the worker is looked for."""
        if worker.ready and self._facts is not None:
            return next((self._facts[worker.waiting[call].reward].file for call in began), None)
        files = (source.use.rpartition(":")[0] for source in self._sources)
        return next((file for file in files if file.endswith(".py")), None)


class Queue:
    """Chunks that wait for a worker."""

    def __init__(self, calls: Sequence[Call], is_async: Sequence[bool], expected: Sequence[float]) -> None:
        """`expected`: seconds of a call, by reward."""
        self.chunks: deque[Chunk] = deque()
        self._attempts: dict[int, int] = {}
        if crowd := tuple(call for call in calls if is_async[call.reward]):
            self.chunks.append(Chunk(crowd, side_by_side=True))
        part: list[Call] = []
        seconds = 0.0
        for call in calls:
            if is_async[call.reward]:
                continue
            if part and (seconds + expected[call.reward] > CHUNK_SECONDS or len(part) == LONGEST_CHUNK):
                self.chunks.append(Chunk(tuple(part), side_by_side=False))
                part, seconds = [], 0.0
            part.append(call)
            seconds += expected[call.reward]
        if part:
            self.chunks.append(Chunk(tuple(part), side_by_side=False))

    def next(self, alone: bool) -> Chunk | None:
        """`alone`: for the first worker, to which async calls go: the clients of the user's stay where they are."""
        for chunk in self.chunks:
            if alone or not chunk.side_by_side:
                self.chunks.remove(chunk)
                return chunk
        return None

    def again(self, chunk: Chunk) -> bool:
        """Puts calls that never began back; False after three times."""
        first = chunk.calls[0].id
        self._attempts[first] = self._attempts.get(first, 0) + 1
        if self._attempts[first] > 3:
            return False
        self.chunks.append(chunk)
        return True


def blame(worker: Worker, began: dict[int, float], queue: Queue | None, failed: Failed) -> list[Outcome]:
    """Whose fault the end of a worker is: of the call that it was at. Everything else it was asked is asked again.

    Of several async calls under way any may be the one: each is asked again, alone in a worker.

    Args:
        began: calls that it was at, and since when.
    """
    chunk = worker.chunk
    if chunk is None or queue is None:
        return []
    suspects = [worker.waiting[call] for call in began]
    rest = tuple(call for call in worker.waiting.values() if call.id not in began)
    outcomes: list[Outcome] = []
    if len(suspects) == 1:
        outcomes.append(Outcome(suspects[0].id, failed, time.monotonic() - began[suspects[0].id]))
    else:
        queue.chunks.extend(Chunk((call,), chunk.side_by_side) for call in suspects)
    if rest and suspects:
        queue.chunks.append(Chunk(rest, chunk.side_by_side))
    elif rest and not queue.again(Chunk(rest, chunk.side_by_side)):
        gone = Failed("died", f"{failed.message}, each time before the call began")
        outcomes += [Outcome(call.id, gone, 0.0) for call in rest]
    return outcomes


def outcome_of(record: dict[str, Any]) -> Outcome:
    if "cause" in record:
        failed = Failed(record["cause"], record["message"], record["traceback"])
        return Outcome(record["done"], failed, record["seconds"])
    return Outcome(record["done"], tuple(record["values"]), record["seconds"])


def ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
