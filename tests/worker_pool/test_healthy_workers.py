"""Reward workers that are well, on a machine that stops processes between any two instructions: none of them is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.before import before
from helpers.scoring import SKIPS, group, overdue, totals
from helpers.waiting import HANGS, until

from rlgen.worker_pool import pool, process
from rlgen.worker_pool.pool import Pool
from rlgen.worker_pool.process import WorkerProcess


def test_the_time_of_a_call_counts_from_its_own_beginning(scorer, monkeypatch):
    """Calls that are sent together take longer than one of them may, and than a worker has to begin. So in the next step.

    By a clock on which each call takes 300 s more than it does.
    """
    source = """
        import time

        def f(completion):
            time.sleep(float(completion))
            return 1.0
    """
    build = scorer(source, {"use": "f", "timeout": 600.0}, scoring={"workers": 1})
    build.score([group("0")], 1)  # it is known as a quick one: what follows is sent at once
    clock, passed, put, looks = time.monotonic, [0.0], Pool._put, []

    def takes(of, outcome):
        put(of, outcome)
        passed[0] += 300.0

    for module in (pool, process):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock() + passed[0], sleep=time.sleep))
    monkeypatch.setattr(pool, "PATIENCE", 600.0)
    monkeypatch.setattr(Pool, "_put", takes)
    before(Pool, "_look_at", lambda of, worker, now: looks.append(len(worker.calls)), monkeypatch.setattr)
    for step in (2, 3):
        assert totals(build.score([group(*["0.05"] * 8)], step)) == [[1.0] * 8]
    assert (build.pools[0].killed, build.pools[0].lost) == (0, 0)
    assert {1, 2, 3} <= set(looks), "they were looked at between the calls"


def test_the_call_that_was_overdue_has_failed_and_not_the_one_after_it(scorer, monkeypatch, tmp_path):
    """The overdue one may end, and the next begin, while the trainer looks where it hangs."""
    source = f"""
        import time
        from pathlib import Path

        def f(completion):
            if completion == "late":
                while not Path("{tmp_path}/looked").exists():
                    time.sleep(0.01)
            if completion == "next" and not Path("{tmp_path}/next").exists():
                Path("{tmp_path}/next").touch()
                time.sleep(100_000)
            return 1.0
    """
    overdue(monkeypatch, lambda completion: 1.0 if completion == "late" else None)
    build = scorer(source, {**SKIPS, "timeout": 1.0}, scoring={"workers": 1})
    build.score([group("a")], 1)

    def looks(worker, file):
        (tmp_path / "looked").touch()
        until((tmp_path / "next").exists)

    before(WorkerProcess, "place_while_it_hangs", looks, monkeypatch.setattr)
    (scored,) = build.score([group("late", "next", "c")], 2)
    assert totals([scored]) == [[None, 1.0, 1.0]]
    assert scored.samples[0].reward_errors["f"].startswith("timeout: no answer within 1 s")
    assert (build.pools[0].killed, build.pools[0].lost) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "async "])
def test_time_in_which_all_processes_were_stopped_is_nobodys(tmp_path, prefix):
    """As by a scheduler that suspends a job: the trainer wakes up when the deadline of the call is over."""
    (tmp_path / "rewards.py").write_text(
        textwrap.dedent(
            f"""
            import os, time
            from pathlib import Path

            {prefix}def f(completion):
                Path("{tmp_path}/began").write_text(str(os.getpid()))
                os.rename("{tmp_path}/began", "{tmp_path}/pid")
                while not os.path.exists("{tmp_path}/go"):
                    time.sleep(0.01)
                return 1.0
            """
        )
    )
    trains = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from helpers.scoring import group, totals
        from rlgen.recipe.models import RewardRecipe, ScoringRecipe
        from rlgen.rewards.score import open_scorer

        entry = RewardRecipe(use=sys.argv[2] + ":f", timeout=5.0, on_error="skip", max_error_fraction=1.0)
        scorer = open_scorer([entry], set(), 20, ScoringRecipe(workers=1))
        print(totals(scorer.score([group("a")], 1)), scorer.pools[0].killed)
        scorer.close()
    """
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", textwrap.dedent(trains), tests, str(tmp_path / "rewards.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        until((tmp_path / "pid").exists)
        both = [int((tmp_path / "pid").read_text()), trainer.pid]
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8.0)
        for pid in reversed(both):  # the trainer looks before the worker goes on
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        (tmp_path / "go").touch()
        assert trainer.communicate(timeout=HANGS)[0] == "[[1.0]] 0\n"


def test_async_calls_that_end_a_little_late_cost_no_worker(scorer, monkeypatch):
    """All of a server that is down: on a machine that is busy, their ends take their time. Killed, each would be asked alone."""
    monkeypatch.setattr(pool, "GRACE", HANGS)
    build = scorer(
        """
        import asyncio, time

        async def f(completion):
            try:
                await asyncio.sleep(100_000)
            except asyncio.CancelledError:
                time.sleep(0.2)
                raise
        """,
        {**SKIPS, "timeout": 0.5},
    )
    assert totals(build.score([group(*"abcd")], 1)) == [[None] * 4]
    assert build.pools[0].killed == 0
