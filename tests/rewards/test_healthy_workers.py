"""Reward workers that are well, on a machine that stops processes between any two instructions: none of them is killed."""

import json
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from scoring import group, opened, scorer, totals

from rlgen.rewards import pool
from rlgen.rewards.pool import Limits, Pool, Queue, Worker
from rlgen.rewards.worker import NO_CALL, Call, Chunk, Present, Source

__all__ = ["opened", "scorer"]

CALLS = tuple(Call(number, 0, {}, None) for number in range(3))


@pytest.fixture
def asked():
    """A pool, and a worker that is at a chunk of three calls; the other end of its line."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(process=None, line=ours, present=Present(0.0, NO_CALL), stack=None, mark="", started=0.0, ready=True)
        worker.ask(Chunk(CALLS, side_by_side=False))
        yield Pool([Source("exact_match", 60.0)], Limits(workers=1, memory=1, import_timeout=1.0), None), worker, theirs


def ago(worker, seconds):
    """As if everything so far had been so long ago."""
    worker.asked -= seconds
    worker.heard -= seconds
    worker.present.since -= seconds


def is_overdue(workers, worker):
    return workers._deadline(worker, worker.began) < time.monotonic()


def test_a_worker_between_two_calls_of_a_chunk_that_takes_long_is_not_overdue(asked):
    workers, worker, theirs = asked
    worker.present.begin(0)
    ago(worker, pool.PATIENCE + 1)
    theirs.sendall(json.dumps({"done": 0, "values": [1.0], "seconds": 21.0}).encode() + b"\n")
    assert [outcome.id for outcome in workers._heard(worker)] == [0]
    assert not worker.began
    assert not is_overdue(workers, worker)
    ago(worker, pool.PATIENCE + 1)
    assert is_overdue(workers, worker)


def test_a_worker_that_has_just_ended_a_chunk_that_took_long_is_not_overdue(asked):
    """The last answers are on their way, and the trainer looked just before they came."""
    workers, worker, _ = asked
    worker.present.begin(1)
    ago(worker, pool.PATIENCE + 1)
    worker.present.begin(NO_CALL)
    assert not is_overdue(workers, worker)


def test_a_worker_that_has_not_left_its_last_chunk_is_not_overdue_in_the_next(asked):
    """Ids begin anew with each step: its last call may have had the id of one that it is asked for now."""
    workers, worker, _ = asked
    worker.present.begin(0)
    worker.present.since -= 100
    assert not worker.began
    assert not is_overdue(workers, worker)


def test_the_call_that_was_overdue_is_to_blame_and_not_the_one_after_it(scorer):
    """The overdue one may end, and the next begin, while the trainer looks."""
    build = scorer("def f(completion): return 1.0\n")
    workers = build.pool
    worker, queue = workers._workers[0], Queue([], [False], [0.0])
    worker.chunk, worker.waiting = Chunk(CALLS, side_by_side=False), {call.id: call for call in CALLS}
    now = time.monotonic()
    worker.present = SimpleNamespace(read=iter([(0, now - 100), (1, now), (1, now)]).__next__, since=now)
    (outcome,) = workers._overdue(worker, queue)
    assert (outcome.id, outcome.values.cause) == (0, "timeout")
    assert [call.id for chunk in queue.chunks for call in chunk.calls] == [1, 2]


def test_time_in_which_all_processes_were_stopped_is_nobodys(scorer, monkeypatch):
    """As by a scheduler that suspends a job: the trainer wakes up when the deadline of the call is over."""
    build = scorer(
        """
        import time

        def f(completion):
            for _ in range(8):
                time.sleep(0.1)
            return 1.0
        """,
        {"use": "f", "timeout": 1.5},
    )
    worker, look = build.pool._workers[0], pool.wait
    stops = iter([False, True])

    def stopped(lines, timeout):
        if next(stops, False):
            os.kill(worker.process.pid, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(worker.process.pid, signal.SIGCONT)
        return look(lines, timeout)

    monkeypatch.setattr(pool, "wait", stopped)
    assert totals(build.score([group("a")], 1)) == [[1.0]]
    assert build.pool.killed == 0


def test_async_calls_that_end_a_little_late_cost_no_worker(scorer):
    """All of a server that is down: on a machine that is busy, their ends take their time. Killed, each would be asked alone."""
    build = scorer(
        """
        import asyncio, time

        async def f(completion):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                time.sleep(0.2)
                raise
        """,
        {"use": "f", "timeout": 0.5, "on_error": "skip", "max_error_fraction": 1.0},
    )
    assert totals(build.score([group(*"abcd")], 1)) == [[None] * 4]
    assert build.pool.killed == 0
