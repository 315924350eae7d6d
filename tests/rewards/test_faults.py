"""Reward functions that misbehave: each costs one call, in bounded time, and the others are what they were."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from io import FileIO
from itertools import islice, pairwise
from pathlib import Path

import pytest
from helpers.judge_server import HANG, serving
from helpers.waiting import HANGS, until
from scoring import SKIPS, SOME_FAIL, alive, gone, group, opened, overdue, scorer, totals, without_haste

from rlgen.errors import CheckpointError, RewardError
from rlgen.processes import Processes
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.score import open_scorer
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.records import sample_metrics
from rlgen.worker_pool import pool

__all__ = ["opened", "scorer"]

MISBEHAVING = """
import ctypes, os, re, signal, sys, time

def f(completion):
    if completion == "sleep":
        time.sleep(100_000)
    if completion == "power":
        9**9**9**9
    if completion == "regex":
        re.fullmatch("(a+)+b", "a" * 60)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "_exit":
        os._exit(1)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "allocate":
        return float(len(bytearray(50 << 30)))
    if completion == "raise":
        raise KeyError("digits")
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "close":
        os.closerange(3, 1 << 16)  # the line has the number that it has in the trainer
        time.sleep(100_000)
    if completion == "spoil":
        for descriptor in range(3, 1 << 16):
            try:
                os.write(descriptor, b"nonsense\\n")
            except OSError:
                pass
        time.sleep(100_000)
    if completion == "recurse":
        return f(completion)
    return float(len(completion))
"""
LIMIT = 1.0  # seconds that a call which hangs is given
# name -> cause, a part of the message, whether it is killed at the deadline
FAULTS = {
    "sleep": ("timeout", "rewards.py:6", True),
    "power": ("timeout", "rewards.py:8", True),
    "regex": ("timeout", "rewards.py:10", True),
    "segfault": ("died", "rewards.py:12)", False),
    "_exit": ("died", "exit code 1", False),
    "kill": ("died", "SIGKILL", False),
    "close": ("died", "closed its connection", False),
    "spoil": ("died", "sent invalid data", False),
    "allocate": ("memory", "rewards.py:18", False),
    "raise": ("error", "KeyError: 'digits' (", False),
    "sys.exit": ("error", "SystemExit: 0", False),
    "interrupt": ("error", "KeyboardInterrupt", False),
    "recurse": ("error", "RecursionError", False),
}
NUMBERS = {"sleep": 30, "power": 31, "regex": 31, "raise": 28}


@pytest.fixture(scope="module")
def shared_scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("misbehaving")
    (folder / "rewards.py").write_text(MISBEHAVING)
    entry = RewardRecipe(use=f"{folder}/rewards.py:f", timeout=LIMIT, on_error="skip", max_error_fraction=1.0)
    recipe = ScoringRecipe(workers=1)
    with closing(open_scorer([entry], {"answer"}, 20, recipe, folder / "rewards.log", folder / "failed")) as scorer:
        yield scorer


@pytest.fixture
def misbehaving(shared_scorer, monkeypatch):
    without_haste(monkeypatch)
    overdue(monkeypatch, lambda completion: LIMIT if FAULTS.get(completion, ("", "", False))[2] else None)
    return shared_scorer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fault(NUMBERS.get(name, 32))) for name in FAULTS], ids=list(FAULTS)
)
def test_a_call_that_misbehaves_costs_that_call_only(misbehaving, monkeypatch, proof, name):
    cause, part, hangs = FAULTS[name]
    workers, before = misbehaving.pool, (misbehaving.pool.killed, misbehaving.pool.lost)
    if name in ("close", "spoil"):  # it goes on without its line
        monkeypatch.setattr(pool, "ENDING", 0.1)
    start = time.monotonic()
    (scored,) = misbehaving.score([group("a", "bb", name, "dddd", "eeeee")], 1)
    seconds = time.monotonic() - start
    assert totals([scored]) == [[1.0, 2.0, None, 4.0, 5.0]]
    said = scored.samples[2].reward_errors["f"]
    assert said.startswith(f"{cause}: ") and part in said
    assert [sample.reward_errors for sample in scored.samples if sample.sample_index != 2] == [{}] * 4
    assert (workers.killed - before[0], workers.lost - before[1]) == (int(hangs), int(cause == "died"))
    assert (LIMIT if hangs else 0) <= seconds < HANGS
    # What is asked next is answered.
    assert totals(misbehaving.score([group("a", "bb")], 2)) == [[1.0, 2.0]]
    proof(f"{name}: {cause} {part!r}; 4 of 4 others kept, {seconds:.1f} s")


@pytest.mark.fault(31)
def test_while_a_call_hangs_those_beside_it_and_the_trainer_go_on(scorer, proof):
    source = """
        import time

        def f(completion):
            if completion == "power":
                9**9**9**9
            time.sleep(0.03)
            return 1.0
    """
    build = scorer(source, {"use": "f", "timeout": 2 * HANGS}, scoring={"workers": 2})
    build.score([group(*"a" * 20)], 1)  # two workers are there, and know how long a call takes
    ticks, ended = [time.monotonic()], threading.Event()

    def tick():
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    def score(first):
        """Seconds of twenty calls, and of all until they are answered."""
        asks, calls = build.calls_of(group(first, *"a" * 20), 2, 0)
        start = time.monotonic()
        with closing(build.run(calls)) as outcomes:
            done = list(islice((one for one in outcomes if asks[one.id].samples[0].completion == "a"), 20))
        return [outcome.seconds for outcome in done], time.monotonic() - start

    thread = threading.Thread(target=tick)
    thread.start()
    usual, seconds = score("b")
    beside, hanging = score("power")
    ended.set()
    thread.join()
    late = max(after - before for before, after in pairwise(ticks))
    assert len(usual) == len(beside) == 20 and max(hanging, late) < HANGS, "none of them waits for the deadline"
    proof(f"20 calls beside it took {hanging:.1f} s (without it {seconds:.1f} s); the trainer's longest pause was {late:.2f} s")


@pytest.mark.fault(32)
def test_a_fork_bomb_ends_with_its_worker(scorer, tmp_path, monkeypatch, proof):
    source = f"""
        import os, time

        def f(completion):
            if completion == "bomb":
                for child in range(50):
                    if os.fork() == 0:
                        if child % 2:
                            os.setsid()
                        open("{tmp_path}/pid" + str(os.getpid()), "w").close()
                        time.sleep(100_000)
                time.sleep(100_000)
            return 1.0
    """

    def children():
        return [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]

    overdue(monkeypatch, lambda completion: 0.0 if completion == "bomb" and len(children()) == 50 else None)
    build = scorer(source, SKIPS)
    try:
        assert totals(build.score([group("a", "bomb", "c")], 1)) == [[1.0, None, 1.0]]
        assert len(children()) == 50 and gone(children()) and build.pool.killed == 1
    finally:
        for pid in filter(alive, children()):
            os.kill(pid, signal.SIGKILL)
    proof("50 children forked, half of them in sessions of their own; all are gone")


@pytest.mark.fault(32)
def test_a_child_that_comes_back_answers_nothing(scorer, tmp_path, proof):
    source = f"""
        import os

        def f(completion):
            if os.fork() == 0:
                open("{tmp_path}/pid" + str(os.getpid()), "w").close()
                return 100.0
            return float(len(completion))
    """
    build = scorer(source)
    assert totals(build.score([group("a", "bb", "ccc")], 1)) == [[1.0, 2.0, 3.0]]
    until(lambda: len(list(tmp_path.glob("pid*"))) == 3)
    children = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert gone(children)
    proof(f"{len(children)} forked children returned from the call and ended")


@pytest.mark.fault(32)
def test_memory_is_limited(scorer, proof):
    source = "def f(completion):\n    return float(len(bytearray(int(completion) << 20)) >> 20)\n"
    build = scorer(source, SKIPS, scoring={"memory_gib": 0.5, "workers": 1})
    (scored,) = build.score([group("100", "1000", "200")], 1)
    assert totals([scored]) == [[100.0, None, 200.0]]
    assert scored.samples[1].reward_errors["f"].startswith("memory: MemoryError (")
    proof("1000 MiB of 512: MemoryError; 100 and 200 MiB were given")


@pytest.mark.fault(32)
def test_what_a_reward_prints_goes_to_the_log(scorer, tmp_path, capfd, monkeypatch, proof):
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    source = """
        import os, sys

        def f(completion):
            print("printed" * 1000)
            print("to the other", file=sys.stderr)
            os.system("echo by a child")
            return float(sys.stdin.read() == "")
    """
    build = scorer(source, output=tmp_path / "rewards.log")
    assert totals(build.score([group(*"ab" * 50)], 1)) == [[1.0] * 100]
    build.close()
    text = (tmp_path / "rewards.log").read_text()
    assert (text.count("printed"), text.count("to the other"), text.count("by a child")) == (100_000, 100, 100)
    assert capfd.readouterr() == ("", "")
    proof("700 kB were printed, all in the log, none on the screen")


def test_a_log_that_grows_too_long_starts_anew(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr("rlgen.worker_pool.process.LONGEST_LOG", 1000)
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    log = tmp_path / "rewards.log"
    build = scorer("def f(completion):\n    print(completion * 50)\n    return 1.0\n", output=log)
    build.score([group(*"abcdefghijklmnopqrstuvwxyz")], 1)
    until(lambda: "z" * 50 in log.read_text())
    build.score([group("y")], 2)
    build.close()
    text = log.read_text()
    assert "left out" in text and "y" * 50 in text and "a" * 50 not in text


@pytest.mark.fault(32)
def test_no_way_of_printing_holds_anything_up(scorer, tmp_path, monkeypatch, proof):
    source = f"""
        import os, subprocess

        def f(completion):
            if completion == "much":
                os.system("yes 0123456789 2>/dev/null | head -c 1100000")
            if completion == "killed":
                os.system("echo before it was killed; sleep 100000")
            if completion == "stray":  # out of reach: neither the group nor the mark of its worker
                subprocess.run("env -i setsid sleep 100000 & echo $! > {tmp_path}/stray", shell=True)
            return 1.0
    """
    log = tmp_path / "log"
    overdue(monkeypatch, lambda completion: 0.0 if completion == "killed" and "it was killed" in log.read_text() else None)
    build = scorer(source, SKIPS, output=log)
    assert totals(build.score([group("much", "stray")], 1)) == [[1.0, 1.0]]
    assert totals(build.score([group("killed", "a")], 2)) == [[None, 1.0]]
    until(lambda: log.read_text().count("0123456789\n") == 100_000)
    stray, start = int((tmp_path / "stray").read_text()), time.monotonic()
    build.close()
    seconds = time.monotonic() - start
    assert alive(stray)
    os.kill(stray, signal.SIGKILL)
    text = log.read_text()
    assert (text.count("0123456789\n"), text.count("before it was killed\n")) == (100_000, 1) and seconds < HANGS
    proof(f"1.1 MB by a program, a line of a worker that was killed; a stray kept the pipe and {seconds:.1f} s of the end")


@pytest.mark.fault(32)
def test_programs_go_on_printing_after_the_process_they_printed_to_was_killed(scorer, tmp_path, monkeypatch, proof):
    monkeypatch.setattr("rlgen.worker_pool.process.CLOSING", HANGS)
    source = """
        import os, subprocess

        def f(completion):
            if completion == "exit":
                os._exit(1)
            return float(subprocess.run(["echo", completion]).returncode)
    """
    entry = SKIPS
    build = scorer(source, entry, scoring={"workers": 1}, output=tmp_path / "rewards.log")
    printed = build.pool._printer.process
    printed.kill()
    os.waitid(os.P_PID, printed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody was told
    assert totals(build.score([group("exit", "by a program")], 1)) == [[None, 0.0]]
    build.close()
    assert (tmp_path / "rewards.log").read_text() == "by a program\n"
    proof("killed by SIGKILL; what a program of the next worker prints is in the log")


def test_a_full_disk_costs_what_is_printed_and_no_reward(scorer):
    build = scorer("def f(completion):\n    print(completion, flush=True)\n    return 1.0\n", output=Path("/dev/full"))
    assert totals(build.score([group("a", "b")], 1)) == [[1.0, 1.0]]


def test_a_full_folder_of_temporary_files_is_an_error_of_the_disk(scorer, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering=0: FileIO("/dev/full", "r+"))
    with pytest.raises(CheckpointError, match=r"no temporary file can be written: .*No space left.*TMPDIR") as caught:
        scorer("def f(completion): return 1.0\n")
    assert caught.value.exit_code == 8


@pytest.mark.fault(78)
def test_workers_die_with_a_trainer_that_is_killed(tmp_path, proof):
    (tmp_path / "rewards.py").write_text(
        f"import os, time\ndef f(completion):\n    open('{tmp_path}/' + str(os.getpid()), 'w').close()\n    while True: 9**9**6\n"
    )
    code = (
        "from rlgen.recipe.models import RewardRecipe, ScoringRecipe\nfrom rlgen.rewards.score import open_scorer\n"
        f"scorer = open_scorer([RewardRecipe(use='{tmp_path}/rewards.py:f')], set(), 20, ScoringRecipe())\n"
        "from rlgen.worker_pool.worker import WorkerCall\nlist(scorer.run([WorkerCall(0, 0, {'completion': ''}, None)]))\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + HANGS
    while not (workers := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]):
        assert trainer.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert alive(workers[0])
    trainer.kill()
    trainer.wait()
    assert gone(workers)
    proof("trainer killed by SIGKILL while a worker computed with the interpreter's lock held")


@pytest.mark.fault(27)
@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import sys\nsys.exit(0)\n", ["SystemExit", "rewards.py:2"]),
        ("x = 1\ndef f(:\n", ["SyntaxError", "rewards.py:2"]),
        ("import no_such_module\n", ["no_such_module", "rewards.py:1"]),
        pytest.param(
            "import time\n\ntime.sleep(100_000)\n",
            ["did not end within 10 s", "rewards.py:3", "scoring.import_timeout"],
            marks=pytest.mark.slow,
        ),
        pytest.param("x = 1\nx = 9**9**9**9\n", ["did not end within 10 s", "rewards.py:2"], marks=pytest.mark.slow),
        ("import os\nos._exit(0)\n", ["ended with exit code 0"]),
        ("import ctypes\nctypes.string_at(0)\n", ["SIGSEGV", "rewards.py:2"]),
        ("def g(completion): return 1.0\n", ["has no function `f`", "there are g"]),
    ],
    ids=["sys.exit", "syntax", "missing", "sleep", "power", "_exit", "segfault", "other"],
)
def test_an_import_that_fails_or_never_ends(scorer, proof, source, parts):
    hangs = "did not end" in parts[0]  # a busy machine has time to start Python
    with pytest.raises(RewardError) as caught:
        scorer(source, scoring={"import_timeout": 10.0 if hangs else HANGS})
    assert caught.value.exit_code == 5 and all(part in str(caught.value) for part in parts)
    proof(f"{source.splitlines()[-1]}: {parts[0]}")


def test_a_file_that_changes_under_a_run_is_noticed(scorer, tmp_path):
    source = "import os\ndef f(completion):\n    if completion == 'exit': os._exit(1)\n    return {value}\n"
    build = scorer(source.format(value=1.0), SKIPS, scoring={"workers": 1})
    (tmp_path / "rewards.py").write_text(source.format(value=2.0))
    with pytest.raises(RewardError, match="has changed since the run began"):
        build.score([group("exit", "b")], 1)


@pytest.fixture
def starting(scorer, tmp_path):
    """Opens scorers whose workers import as the words of a file say, the last of them for ever; each start leaves a file."""
    source = f"""
        import os, signal, time
        from pathlib import Path

        folder = Path("{tmp_path}")
        (folder / f"start{{os.getpid()}}").touch()
        word, *rest = (folder / "plan").read_text().split()
        if rest:
            (folder / "plan").write_text(" ".join(rest))
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hang":
            time.sleep(100_000)

        def f(completion):
            if completion == "exit":
                os._exit(1)
            deadline = time.monotonic() + {HANGS}
            wanted = {{"wait": 4, "more": len(list(folder.glob("start*"))) + 1}}.get(completion, 0)
            while len(list(folder.glob("start*"))) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            if completion == "wait":
                time.sleep(1.0)
            return 1.0
    """

    def build(plan, **scoring):
        (tmp_path / "plan").write_text(plan)
        entry = {**SKIPS, "timeout": 2 * HANGS}
        return scorer(source, entry, scoring=scoring)

    return build


@pytest.mark.fault(27)
@pytest.mark.slow
def test_an_import_that_worked_before_is_tried_again(starting, caplog, proof):
    build = starting("ok kill hang ok kill kill ok", workers=1, import_timeout=10.0)
    assert totals(build.score([group("exit", "b", "exit", "c")], 1)) == [[None, 1.0, None, 1.0]]
    said = [record.getMessage() for record in caplog.records if record.name == "rlgen.worker_pool.pool"]
    assert len(said) == 4 and "was killed by SIGKILL" in said[0] and "did not end within 10 s" in said[1]
    proof("two starts failed, then one was ready, twice: killed, and hanging in the import")


@pytest.mark.fault(27)
def test_imports_that_fail_again_and_again_end_the_run(starting, tmp_path, proof):
    build = starting("ok kill", workers=1)
    with pytest.raises(RewardError, match=r"the process that imports .* was killed by SIGKILL"):
        build.score([group("exit", "b")], 1)
    assert len(list(tmp_path.glob("start*"))) == 4
    proof("killed in the import three times, after one that worked")


@pytest.mark.fault(27)
def test_additional_workers_that_cannot_import_stop_no_other(starting, tmp_path, proof):
    build = starting("ok kill", workers=3)
    assert totals(build.score([group("wait", *"a" * 11)], 1)) == [[1.0] * 12]
    starts = len(list(tmp_path.glob("start*")))
    assert 4 <= starts <= 7 and sum(worker.ready for worker in build.pool._workers) == 1
    (tmp_path / "plan").write_text("ok")
    build.score([group("more", *"a" * 11)], 2)
    assert len(list(tmp_path.glob("start*"))) > starts
    proof(f"{starts - 1} additional workers were killed in the import while one worked; in the next step they started")


@pytest.mark.fault(27)
def test_a_process_that_cannot_be_started_is_an_error_of_the_reward(scorer, monkeypatch, caplog, proof):
    source = "import os\ndef f(completion):\n    if completion == 'exit': os._exit(1)\n    return 1.0\n"
    build = scorer(source, SKIPS, scoring={"workers": 1})
    fork, files = subprocess._fork_exec, os.listdir("/proc/self/fd")
    errors = iter([errno.EAGAIN, errno.ENOMEM, None, errno.EAGAIN, errno.EAGAIN, errno.EAGAIN])

    def refused(*arguments):
        if (error := next(errors)) is not None:
            raise OSError(error, os.strerror(error))
        return fork(*arguments)

    monkeypatch.setattr(subprocess, "_fork_exec", refused)
    assert totals(build.score([group("exit", "b")], 1)) == [[None, 1.0]]
    assert "Cannot allocate memory" in caplog.text
    with pytest.raises(RewardError, match=r"rewards: no process can be started: .*Resource temporarily unavailable; .*ulimit"):
        build.score([group("exit", "b")], 2)
    assert len(os.listdir("/proc/self/fd")) == len(files) - 2  # the worker's line and its stack
    proof("five forks failed: after two a worker started, after three the run ended; no file was left open")


@pytest.mark.fault(28)
def test_zero_only_where_it_is_written(scorer, proof):
    settings = {"use": "f", "max_error_fraction": 1.0}
    (zero,) = scorer(SOME_FAIL, {**settings, "on_error": "zero"}).score([group("a", "x", "b")], 1)
    (skip,) = scorer(SOME_FAIL, {**settings, "on_error": "skip"}).score([group("a", "x", "b")], 1)
    assert totals([zero, skip]) == [[1.0, 0.0, 1.0], [1.0, None, 1.0]]
    # Apart from a zero and from None that the function returned, in both.
    said = [dict(sample.reward_errors) for sample in (*zero.samples, *skip.samples)]
    assert [bool(errors) for errors in said] == [False, True, False] * 2
    assert said[1] == said[4] and said[1]["f"].startswith("error: ValueError: no x (")
    assert not zero.samples[1].failed and skip.samples[1].failed
    metrics = sample_metrics(RowTable.gather(Samples.of(skip.samples), Processes.alone()))
    assert (metrics["reward/f/failed"], metrics["reward/f/errors"], metrics["reward/f/timeouts"]) == (1, 1, 0)
    assert (metrics["reward/unscored"], metrics["reward/f/mean"]) == (1, 1.0)
    proof("raised on 1 of 3: counted once, None under skip, 0 under zero, both with the error in the record")


@pytest.mark.fault(28, 34)
def test_a_reward_that_fails_on_a_whole_group_leaves_no_sum(scorer, proof):
    source = SOME_FAIL + "def g(completion): return 5.0\n"
    build = scorer(source, SKIPS, "g")
    scored = build.score([group("x", "xx"), group("a", "b", group_id=18)], 1)
    assert totals(scored) == [[None, None], [6.0, 6.0]]
    assert [dict(sample.rewards) for sample in scored[0].samples] == [{"f": None, "g": 5.0}] * 2
    proof("f failed on both samples of a group: no reward, though g applies")


@pytest.mark.fault(28)
def test_a_group_that_fails_leaves_the_other_groups(scorer, proof):
    source = "def f(completions):\n    return [1 / (c != 'x') for c in completions]\n"
    build = scorer(source, {"use": "f", "on_error": "skip", "max_error_fraction": 0.5})
    scored = build.score([group("a", "x"), group("a", "b", group_id=18)], 1)
    assert totals(scored) == [[None, None], [1.0, 1.0]]
    proof("ZeroDivisionError on a group of two: both left out, the other group kept")


@pytest.mark.fault(29)
def test_the_first_failure_ends_the_run_unless_the_recipe_says_otherwise(scorer, tmp_path, proof):
    build = scorer(SOME_FAIL, failures=tmp_path / "failed_rewards")
    with pytest.raises(RewardError) as caught:
        build.score([group("a", "x y", "b")], 12)
    (saved,) = (tmp_path / "failed_rewards").iterdir()
    for part in ("reward f, prompt at position 17, sample 1", "ValueError: no x y", "rewards.py:3", str(saved), "Traceback"):
        assert part in str(caught.value)
    record = json.loads(saved.read_text())
    assert saved.name == "step_000012_f_17_1.json" and record["arguments"] == {"completion": "x y"}
    assert record["cause"] == "error" and "raise ValueError" in record["traceback"]
    # What was under way is gone, and the next step begins with workers that are free.
    assert totals(build.score([group("a", "b")], 13)) == [[1.0, 1.0]]
    proof("the saved sample holds the arguments that it failed at")


@pytest.mark.fault(29)
def test_more_failures_than_the_budget_end_the_run(scorer, tmp_path, proof):
    settings = {"use": "f", "on_error": "skip", "max_error_fraction": 0.2}
    build = scorer(SOME_FAIL, settings, failures=tmp_path / "failed_rewards", scoring={"workers": 1})
    # 0.2 of 8 calls, rounded up: two may fail, in each step anew
    for step in (1, 2):
        assert totals(build.score([group(*"axbxcdef")], step))[0].count(None) == 2
    assert len(list((tmp_path / "failed_rewards").iterdir())) == 1, "the first failure is kept"
    with pytest.raises(RewardError, match=r"3 calls of this step failed, more than max_error_fraction 0\.2") as caught:
        build.score([group(*"axbxcxef")], 3)
    assert caught.value.exit_code == 5 and "step_000003_f_17_5.json" in str(caught.value) and "Traceback" in str(caught.value)
    proof("2 of 8 failed: went on; 3 of 8 failed: RewardError")


def test_a_budget_of_nothing(scorer):
    build = scorer(SOME_FAIL, {"use": "f", "on_error": "zero", "max_error_fraction": 0.0})
    with pytest.raises(RewardError, match="1 calls of this step failed"):
        build.score([group("a", "x")], 1)


@pytest.mark.fault(87)
def test_no_message_holds_a_secret_of_the_environment(scorer, tmp_path, monkeypatch, proof):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-secret-1234567")
    source = """
        import os

        def f(completion):
            raise ConnectionError("401 for Bearer " + os.environ["JUDGE_API_KEY"] + "\\ud800")
    """
    build = scorer(source, failures=tmp_path / "failed")
    with pytest.raises(RewardError) as caught:
        build.score([group("a")], 1)
    (saved,) = (tmp_path / "failed").iterdir()
    assert "Bearer [redacted]" in str(caught.value) and "planted-secret" not in str(caught.value) + saved.read_text()
    str(caught.value).encode()  # printable
    proof("the exception held the key; message and saved sample hold [redacted]")


@pytest.mark.slow
@pytest.mark.fault(35)
def test_a_function_that_asks_a_server_loses_the_calls_that_fail(scorer, monkeypatch, proof):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-secret-1234567")
    said = {"fine": "0.5", "down": (500, "out"), "busy": (429, ""), "nonsense": "rather good", "hang": HANG}
    with serving(lambda question: said.get(question, (429, "") if server.questions.count(question) < 3 else "0.25")) as server:
        source = f"""
            import asyncio, httpx, os
            client = httpx.AsyncClient(params={{"key": os.environ["JUDGE_API_KEY"]}}, trust_env=False, timeout=100_000)

            async def f(completion):
                body = {{"messages": [{{"content": completion}}]}}
                while (answer := await client.post("{server.url}/chat/completions", json=body)).status_code == 429:
                    await asyncio.sleep(0.2)
                answer.raise_for_status()
                return float(answer.json()["choices"][0]["message"]["content"])
        """
        build = scorer(source, {**SKIPS, "timeout": 10.0})
        (scored,) = build.score([group(*said, "third")], 1)
    assert [sample.reward for sample in scored.samples] == [0.5, None, None, None, None, 0.25]
    errors = {sample.completion: sample.reward_errors.get("f", "") for sample in scored.samples}
    assert errors["down"].startswith("error: HTTPStatusError: Server error '500") and "[redacted]" in errors["down"]
    assert errors["nonsense"].startswith("error: ValueError") and "'rather good'" in errors["nonsense"]
    assert all(errors[name].startswith("timeout: no answer within 10 s") for name in ("busy", "hang"))
    assert "planted-secret" not in "".join(errors.values())
    assert build.pool.killed == 0, "a call that can be cancelled costs no process"
    proof(f"a server answered {len(server.bodies)} requests: 500, 429 twice and for ever, nonsense, never")


@pytest.mark.slow
@pytest.mark.fault(30, 31)
def test_an_event_loop_that_is_stuck_is_killed_and_the_others_are_asked_again(scorer, proof):
    source = """
        import asyncio, time

        async def f(completion):
            await asyncio.sleep(0)
            if completion == "block":
                time.sleep(1000)
            if completion == "deaf":
                while True:
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        pass
            await asyncio.sleep(0)
            return float(len(completion))
    """
    build = scorer(source, {**SKIPS, "timeout": 10.0})
    (scored,) = build.score([group("a", "bb", "block", "cccc", "deaf")], 1)
    assert [sample.reward for sample in scored.samples] == [1.0, 2.0, None, 4.0, None]
    assert all(scored.samples[i].reward_errors["f"].startswith("timeout: no answer within 10 s (") for i in (2, 4))
    assert build.pool.killed >= 2
    proof(f"{build.pool.killed} loops killed: one blocked, one deaf to its cancellation")


def test_slow_calls_are_spread_over_workers(scorer, tmp_path, monkeypatch):
    source = f"""
        import os, time
        from pathlib import Path

        def f(completion):
            Path("{tmp_path}/ran_" + str(os.getpid())).touch()
            while len(list(Path("{tmp_path}").glob("ran_*"))) < 2:  # until another worker has begun
                time.sleep(0.01)
            return float(os.getpid())
    """
    build = scorer(source, {"use": "f", "timeout": HANGS}, scoring={"workers": 3})
    (scored,) = build.score([group(*"abcdefghijkl")], 1)
    assert 2 <= len({sample.reward for sample in scored.samples}) <= 3
    monkeypatch.setattr(pool, "GROW_AFTER", HANGS)
    quick = scorer("import os\ndef f(completion): return float(os.getpid())\n", scoring={"workers": 3})
    (scored,) = quick.score([group(*"abcdefghijkl")], 1)
    assert len({sample.reward for sample in scored.samples}) == len(quick.pool._workers) == 1, (
        "quick ones are not worth a second process"
    )


def test_closing_leaves_no_process(scorer):
    build = scorer("import os, threading, time\nthreading.Thread(target=time.sleep, args=(100_000,)).start()\n"
                   "def f(completion): return float(os.getpid())\n")  # fmt: skip
    pid = int(totals(build.score([group("a")], 1))[0][0])
    assert alive(pid)
    build.close()
    assert not alive(pid)


def test_a_worker_that_died_between_steps_is_replaced(scorer):
    build = scorer("import os\ndef f(completion): return float(os.getpid())\n", scoring={"workers": 1})
    before = totals(build.score([group("a")], 1))[0][0]
    os.kill(int(before), signal.SIGKILL)
    assert totals(build.score([group("a")], 2))[0][0] != before


def test_a_worker_needs_neither_torch_nor_transformers(scorer):
    source = """
        import sys
        heavy = {"torch", "transformers", "vllm", "pydantic", "asyncio"}
        def f(completion): return float(len(heavy & set(sys.modules)))
    """
    assert totals(scorer(source).score([group("a")], 1)) == [[0.0]]


def test_arguments_of_any_kind_reach_the_function(scorer):
    from datetime import date
    from decimal import Decimal

    answer = [date(2024, 1, 1), Decimal("1.5"), None, {"a": b"\x00"}, "\ud800"]
    build = scorer("def f(completion, answer): return float([type(a).__name__ for a in answer] == completion.split())")
    assert totals(build.score([group("date Decimal NoneType dict str", answer=answer)], 1)) == [[1.0]]
