"""Runs functions of the user in worker processes: a thread sends calls to the workers, collects the results as they arrive, and
kills workers that hang.

A worker that is killed or dies loses the call that it was running. The other calls that it was sent and had not answered are sent
to another worker, and the answers that it had already given stay valid. A thread of the trainer serves the workers, so that calls
run while the trainer samples. While calls run, nothing in that thread waits without a timeout.

Why no pool of a library: `concurrent.futures` and loky fail all open calls when one worker dies; none shows where a call hangs.
"""

import logging
import os
import selectors
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlgen.processes import cores
from rlgen.recipe.models import ScoringRecipe
from rlgen.worker_pool.failures import Failed
from rlgen.worker_pool.process import CLOSING, Printer, WorkerLost, WorkerProcess, exit_text, start_worker
from rlgen.worker_pool.source import FunctionFacts, FunctionSource
from rlgen.worker_pool.stream import CallOutcome, CallStream
from rlgen.worker_pool.worker import WorkerCall

AHEAD = 128  # most calls that a worker is sent at a time
AHEAD_SECONDS = 0.05  # most time that calls sent together should take, by earlier calls: they wait behind one that hangs
GROW_AFTER = 0.2  # seconds that calls wait before another worker is started; most rewards finish sooner
GRACE = 2.0  # seconds after its timeout that an async call has to end; then its worker is killed, with the other calls in it
PATIENCE = 20.0  # seconds within which a worker must report that it has begun a call
POLL = 0.1  # seconds between checks for workers that have died without closing their socket, or have timed out
ENDING = 0.1  # seconds for a worker that has closed its socket to end, so that its exit status can be reported
STARTS = 3  # starts of workers that may fail in a row, after imports have worked once, before the run ends
ATTEMPTS = 3  # workers that may die before they begin any call; then a call that they were sent fails
STOPPED = 1.0  # seconds of delay that mean that this process was suspended, and perhaps the workers with it
MOST_WORKERS = 8  # default limit: each worker holds the user's imports in memory
CLOSED = "the workers are closed"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    workers: int
    memory: int | None  # bytes of each; None: it limits itself
    import_timeout: float  # seconds
    concurrency: int  # async calls that run at once


def limits_of(scoring: ScoringRecipe) -> WorkerLimits:
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # trainer processes on this machine: each has its own workers
    return WorkerLimits(
        workers=scoring.workers or max(1, min(MOST_WORKERS, cores() // beside)),
        memory=int(scoring.memory_gib * 2**30),
        import_timeout=scoring.import_timeout,
        concurrency=scoring.concurrency,
    )


class Pool:
    """Holds the workers of one trainer process. Workers are started when they are needed, and serve all steps."""

    def __init__(self, sources: Sequence[FunctionSource], limits: WorkerLimits, output: Path | None) -> None:
        """Starts no process. What the user's code prints goes to the file `output`; None: to standard error."""
        self._sources = list(sources)
        self._trade = sources[0].trade
        self._limits = limits
        self._printer = Printer(output)
        self._workers: list[WorkerProcess] = []
        self._facts: Future[list[FunctionFacts]] = Future()  # what the first worker found out
        self._seconds: dict[int, float] = {}  # mean seconds of a call by function, an exponential moving average
        self._failed, self._failed_at = 0, 0.0  # failed starts in a row, and the time of the last one
        self.killed = self.lost = 0  # number of workers since the pool was made
        self._stream: CallStream | None = None
        self._plain: deque[WorkerCall] = deque()  # queued calls of functions that are not async
        self._async: deque[WorkerCall] = deque()
        self._alone: deque[WorkerCall] = deque()  # async calls, one of which may have killed a worker: each runs alone
        self._attempts: Counter[int] = Counter()  # workers that died before they began a call, by its id
        self._none_waited = 0.0  # last time that no call was queued, or a worker was started
        self._looked = 0.0  # last time that all workers were checked
        # The thread is never replaced: a worker dies with the thread that started it (PR_SET_PDEATHSIG).
        self._thread = threading.Thread(target=self._serve, name=self._trade.plural, daemon=True)
        self._changed = threading.Condition()  # guards all fields above between the thread and the callers
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def start(self) -> None:
        """Starts the first worker, unless it runs, and does not wait for it."""
        with self._changed:
            if not self._thread.ident:
                self._thread.start()

    def facts(self) -> list[FunctionFacts]:
        """Waits for what the first worker found out about the functions. Raises RlgenError if an import fails or does not end."""
        self.start()
        return self._facts.result()

    def join(self, stream: CallStream) -> None:
        """Opens the pool for calls of a stream, which other pools may serve too. Only one is open at a time.

        Raises as `facts` does, and RuntimeError in a closed pool.
        """
        self.facts()
        with self._changed:
            if self._closed:
                raise RuntimeError(CLOSED)
            if self._stream is not None:
                raise RuntimeError("the calls of another step are still open")
            self._failed = 0  # each step may try again to start workers
            self._attempts.clear()
            self._stream = stream

    def add(self, stream: CallStream, calls: Sequence[WorkerCall]) -> None:
        """Queues calls of `stream` until workers are free. Does nothing if `stream` is not the open one."""
        with self._changed:
            if self._stream is stream:
                for call in calls:
                    self._queue_of(call).append(call)
                self._notify()

    def end(self, stream: CallStream) -> None:
        """Cancels the calls of `stream` by killing their workers. Does nothing if `stream` is not the open one."""
        with self._changed:
            if self._stream is stream:
                self._abandon()

    def close(self) -> None:
        """Stops the thread and ends the workers: idle ones have CLOSING seconds to end by themselves, others are killed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._stream is not None:
                self._stream.came.put(RuntimeError(CLOSED))
            self._notify()
        if self._thread.ident:
            self._thread.join()
        for worker in self._workers:
            with suppress(OSError):
                worker.line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + CLOSING
        for worker in list(self._workers):
            with suppress(subprocess.TimeoutExpired):
                # A worker that imports or runs a call does not notice that the socket is closed.
                worker.process.wait(max(0.0, deadline - time.monotonic()) if worker.ready and not worker.calls else 0)
            self._end(worker)
        for opened in (self._printer, self._selector, self._wake, self._woken):
            opened.close()

    def _queue_of(self, call: WorkerCall) -> deque[WorkerCall]:
        return self._async if self._is_async(call) else self._plain

    def _is_async(self, call: WorkerCall) -> bool:
        return self._facts.result()[call.source].is_async  # there are no calls before it is known

    def _notify(self) -> None:
        """Wakes the thread, whether it waits for the condition or in the selector."""
        self._changed.notify_all()
        with suppress(BlockingIOError):  # the socket's buffer is full of wake-ups already
            self._wake.send(b"!")

    def _abandon(self) -> None:
        """Kills the workers that run calls, drops all queued calls and closes the stream."""
        for worker in [worker for worker in self._workers if worker.calls]:
            self._end(worker)
        for waiting in (self._plain, self._async, self._alone):
            waiting.clear()
        self._stream = None

    @property
    def _waiting(self) -> bool:
        return bool(self._plain or self._async or self._alone)

    @property
    def _busy(self) -> bool:
        """Returns whether calls wait or run, or the first import is not done. Between steps nothing is, and the thread sleeps."""
        return self._waiting or any(worker.calls for worker in self._workers) or not self._facts.done()

    def _serve(self) -> None:
        """Runs the thread: waits for an event on a worker's socket and handles it, until the pool is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._busy)
            began = time.monotonic()
            events = self._selector.select(POLL)
            late = time.monotonic() - began - POLL
            with self._changed:
                if self._closed:
                    return
                if late > STOPPED:
                    for worker in self._workers:
                        worker.excuse(late)
                stream = self._stream
                try:
                    self._step(events)
                except Exception as error:  # raised again in the thread that waits for the outcomes, or for the facts
                    self._abandon()
                    if stream is not None:
                        stream.came.put(error)
                    elif not self._facts.done():
                        self._facts.set_exception(error)

    def _step(self, events: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Reads the messages of workers, checks workers for death and timeouts, and sends out calls."""
        for key, mask in events:
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
            elif key.data in self._workers:  # it may have been killed meanwhile
                self._exchange(key.data, mask)
        now = time.monotonic()
        if now - self._looked >= POLL:
            self._looked = now
            for worker in list(self._workers):
                self._look_at(worker, now)
        if not self._facts.done() or self._stream is not None:
            self._hand_out()

    def _exchange(self, worker: WorkerProcess, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._hear(worker)
            if mask & selectors.EVENT_WRITE:
                worker.flush()
                self._selector.modify(worker.line, worker.waits_for, worker)
        except WorkerLost as how:
            self._replace_lost(worker, how)

    def _hear(self, worker: WorkerProcess) -> None:
        """Handles the records that a worker has sent. Raises WorkerLost for what is no valid record, and RlgenError if it could
        not import the functions, or imported other code than the first one.
        """
        for record in worker.read():
            worker.heard = time.monotonic()
            try:
                if "refused" in record:
                    self._end(worker)
                    raise self._trade.error(str(record["refused"]))
                if "facts" in record:
                    self._learn(worker, record["facts"])
                elif "began" in record:
                    worker.began[worker.calls[record["began"]].id] = worker.heard
                else:
                    failed = Failed(record["cause"], record["message"], record["traceback"]) if "cause" in record else None
                    outcome = CallOutcome(record["done"], failed or record["value"], float(record["seconds"]))
                    call = worker.calls.pop(outcome.id)
                    worker.began.pop(call.id, None)
                    if worker.calls and not self._is_async(call):  # its calls run one after the other
                        worker.began[next(iter(worker.calls))] = worker.heard
                    seconds = self._seconds.setdefault(call.source, outcome.seconds)
                    self._seconds[call.source] = 0.9 * seconds + 0.1 * outcome.seconds
                    self._put(outcome)
            except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
                raise WorkerLost("sent invalid data to the trainer") from error

    def _learn(self, worker: WorkerProcess, found: Any) -> None:
        """Stores what a worker found. Raises RlgenError if the code's hashes differ from the first worker's."""
        worker.ready, self._failed = True, 0
        facts = msgspec.convert(found, list[FunctionFacts])
        if not self._facts.done():
            self._facts.set_result(facts)
        elif [fact.sha256 for fact in facts] != [fact.sha256 for fact in self._facts.result()]:
            one = self._trade.one
            raise self._trade.error(f"{self._trade.plural}: the code of a {one} has changed since the run began; start it again")

    def _put(self, outcome: CallOutcome) -> None:
        assert self._stream is not None  # calls run only while a stream is open
        self._stream.came.put(outcome)

    def _hand_out(self) -> None:
        """Sends calls to workers that may take more, and starts another worker if calls have waited longer than GROW_AFTER."""
        for worker in [worker for worker in self._workers if worker.ready]:
            try:
                if worker is self._workers[0] and (self._async or self._alone):
                    self._send_async(worker)
                elif not worker.calls and self._plain:
                    worker.ask(self._next_plain(), takes_more=False)
                if worker.unsent:
                    self._selector.modify(worker.line, worker.waits_for, worker)
            except WorkerLost as how:
                self._replace_lost(worker, how)
        now = time.monotonic()
        if not self._plain:
            self._none_waited = now
        more = len(self._workers) < self._limits.workers and self._failed < STARTS
        if self._workers:
            start = more and now - self._none_waited > GROW_AFTER and all(w.calls or not w.ready for w in self._workers)
        else:
            start = not self._facts.done() or self._waiting
        if start:
            self._none_waited = now
            self._start()

    def _send_async(self, worker: WorkerProcess) -> None:
        """Sends async calls to the first worker: clients that the user's code opened live in its event loop."""
        if self._alone:
            if not worker.calls:
                worker.ask([self._alone.popleft()], takes_more=False)
        elif not worker.calls or worker.takes_more:
            room = min(len(self._async), self._limits.concurrency - len(worker.calls))
            if room:
                worker.ask([self._async.popleft() for _ in range(room)], takes_more=True)

    def _next_plain(self) -> list[WorkerCall]:
        """Returns the call that has waited longest, and further ones as long as all of them should take at most AHEAD_SECONDS."""
        calls, seconds = [self._plain.popleft()], 0.0
        while self._plain and len(calls) < AHEAD:
            seconds += self._seconds.get(calls[-1].source, AHEAD_SECONDS)
            if seconds + self._seconds.get(self._plain[0].source, AHEAD_SECONDS) > AHEAD_SECONDS:
                break
            calls.append(self._plain.popleft())
        return calls

    def _start(self) -> None:
        try:
            worker = start_worker(self._limits.memory, self._printer)
        except OSError as error:
            hint = "free memory, lower scoring.workers, or raise the limits of processes and open files (ulimit -u, -n)"
            self._not_started(time.monotonic(), f"{self._trade.plural}: no process can be started: {error}; {hint}")
            return
        self._workers.append(worker)
        with suppress(WorkerLost):  # `_look_at` notices its death
            worker.send(self._sources)
        self._selector.register(worker.line, worker.waits_for, worker)

    def _end(self, worker: WorkerProcess) -> int:
        """Kills a worker, removes it from the pool, and returns its exit status."""
        self._workers.remove(worker)
        with suppress(KeyError):
            self._selector.unregister(worker.line)
        return worker.kill()

    def _look_at(self, worker: WorkerProcess, now: float) -> None:
        """Replaces a worker that has died without closing its socket, and kills one whose import or call has timed out."""
        try:
            if worker.ended():
                self._hear(worker)  # reads what it sent before it died
                raise WorkerLost("ended")
        except WorkerLost as how:
            self._replace_lost(worker, how)
            return
        if not worker.ready:
            if now > worker.started + self._limits.import_timeout:
                within = f"{self._limits.import_timeout:g} s {self._kill(worker)}"
                remedy = "make it shorter, or raise scoring.import_timeout"
                why = f"{self._trade.plural}: the import of {self._uses()} did not end within {within}; {remedy}"
                self._not_started(worker.started, why)
            return
        overdue = next((call for call, since in worker.began.items() if now > since + self._allowed(worker.calls[call])), None)
        if overdue is None and (worker.began or not worker.calls or now < worker.heard + PATIENCE):
            return
        where = self._kill(worker)
        if overdue is None:
            failed = Failed("died", f"the process of the {self._trade.one} began no call within {PATIENCE:g} s {where}".rstrip())
        else:
            limit = self._sources[worker.calls[overdue].source].timeout
            failed = Failed("timeout", f"no answer within {limit:g} s {where}".rstrip())
        self._settle(worker, failed)

    def _allowed(self, call: WorkerCall) -> float:
        return self._sources[call.source].timeout + (GRACE if self._is_async(call) else 0.0)

    def _kill(self, worker: WorkerProcess) -> str:
        self.killed += 1
        where = worker.place_while_it_hangs(self._file(worker))
        self._end(worker)
        return where

    def _uses(self) -> str:
        return ", ".join(source.use for source in self._sources)

    def _replace_lost(self, worker: WorkerProcess, lost: WorkerLost) -> None:
        """Removes a worker that has died, and fails or requeues its calls."""
        deadline = time.monotonic() + ENDING
        while not (ended := worker.ended()) and time.monotonic() < deadline:
            time.sleep(0.005)
        where = worker.place(self._file(worker))
        self.lost += 1
        status = self._end(worker)
        how = f"{exit_text(status) if ended else lost} {where}".rstrip()
        if not worker.ready:
            self._not_started(worker.started, f"{self._trade.plural}: the process that imports {self._uses()} {how}")
        else:
            self._settle(worker, Failed("died", f"the process of the {self._trade.one} {how}"))

    def _settle(self, worker: WorkerProcess, failed: Failed) -> None:
        """Fails the call that an ended worker was running, and queues its other calls again.

        If it was running several async calls, any of them may be the cause: each of them runs again, alone in a worker. A call
        that was sent to more than ATTEMPTS workers which died before they began any call fails.
        """
        running = [worker.calls[call] for call in worker.began]
        others = [call for call in worker.calls.values() if call.id not in worker.began]
        if len(running) == 1:
            self._put(CallOutcome(running[0].id, failed, time.monotonic() - worker.began[running[0].id]))
        else:
            self._alone.extend(running)
        if not running:
            self._attempts.update(call.id for call in others)
        for call in reversed(others):
            if self._attempts[call.id] <= ATTEMPTS:
                self._queue_of(call).appendleft(call)
            else:
                self._put(CallOutcome(call.id, Failed("died", f"{failed.message}, each time before the call began"), 0.0))

    def _not_started(self, since: float, why: str) -> None:
        """Counts a failed start. Raises RlgenError if none ever worked, or STARTS have failed in a row and no worker is left."""
        if since > self._failed_at:  # workers started at the same time fail for the same reason: count once
            self._failed, self._failed_at = self._failed + 1, time.monotonic()
        if not self._facts.done() or (self._failed >= STARTS and not self._workers):
            raise self._trade.error(why)
        log.warning("%s; it has worked before, and the run goes on", why)

    def _file(self, worker: WorkerProcess) -> str | None:
        """Returns the user's file whose lines are preferred when a worker's stack is read; None: not known."""
        if worker.ready:
            return next((self._facts.result()[worker.calls[call].source].file for call in worker.began), None)
        files = (source.use.rpartition(":")[0] for source in self._sources)
        return next((file for file in files if file.endswith(".py")), None)
