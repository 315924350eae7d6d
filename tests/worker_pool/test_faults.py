"""Functions that misbehave in a worker: each costs one call, in bounded time, and the others are what they were."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import islice

import pytest
from helpers.scoring import SKIPS, alive, gone, group, overdue, totals, without_haste
from helpers.waiting import HANGS, until

from rlgen.errors import RewardError
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.score import open_scorer
from rlgen.worker_pool import pool

MISBEHAVING = """
import ctypes, os, re, signal, sys, time

def fails(error):
    raise error

def without_line(act):  # the line has the number that it has in the trainer
    for descriptor in range(3, 1 << 16):
        try:
            act(descriptor)
        except OSError:
            pass
    time.sleep(100_000)

CALLS = {
    "sleep": lambda: time.sleep(100_000),
    "power": lambda: 9**9**9**9,
    "regex": lambda: re.fullmatch("(a+)+b", "a" * 60),
    "segfault": lambda: ctypes.string_at(0),
    "_exit": lambda: os._exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "allocate": lambda: len(bytearray(50 << 30)),
    "raise": lambda: fails(KeyError("digits")),
    "sys.exit": lambda: sys.exit(0),
    "interrupt": lambda: fails(KeyboardInterrupt()),
    "close": lambda: without_line(os.close),
    "spoil": lambda: without_line(lambda descriptor: os.write(descriptor, b"nonsense\\n")),
    "recurse": lambda: f("recurse"),
}

def f(completion):
    return float(CALLS.get(completion, lambda: len(completion))())
"""
LIMIT = 1.0  # seconds that a call which hangs is given
# name -> cause, a part of the message, whether it is killed at the deadline
FAULTS = {
    "sleep": ("timeout", "rewards.py:16", True),
    "power": ("timeout", "rewards.py:17", True),
    "regex": ("timeout", "rewards.py:18", True),
    "segfault": ("died", "rewards.py:19)", False),
    "_exit": ("died", "exit code 1", False),
    "kill": ("died", "SIGKILL", False),
    "close": ("died", "closed its connection", False),
    "spoil": ("died", "sent invalid data", False),
    "allocate": ("memory", "rewards.py:22", False),
    "raise": ("error", "KeyError: 'digits' (", False),
    "sys.exit": ("error", "SystemExit: 0", False),
    "interrupt": ("error", "KeyboardInterrupt", False),
    "recurse": ("error", "RecursionError", False),
}
NUMBERS = {"sleep": 30, "power": 31, "regex": 31, "raise": 28}
EXITS = "import os\ndef f(completion):\n    if completion == 'exit': os._exit(1)\n    return {value}\n"
PID = "import os\ndef f(completion): return float(os.getpid())\n"


def pids_in(folder):
    return [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]


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
    workers, before = misbehaving.pools[0], (misbehaving.pools[0].killed, misbehaving.pools[0].lost)
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
def test_while_a_call_hangs_those_beside_it_go_on(scorer, proof):
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
    asks, calls = build.calls_of(group("power", *"a" * 20), 2, 0)
    start = time.monotonic()
    with closing(build.run(calls)) as outcomes:  # none of the twenty waits for the deadline
        beside = list(islice((one for one in outcomes if asks[one.id].samples[0].completion == "a"), 20))
    seconds = time.monotonic() - start
    assert len(beside) == 20 and seconds < HANGS
    proof(f"20 calls beside one with the interpreter's lock took {seconds:.1f} s")


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

    overdue(monkeypatch, lambda completion: 0.0 if completion == "bomb" and len(pids_in(tmp_path)) == 50 else None)
    build = scorer(source, SKIPS)
    try:
        assert totals(build.score([group("a", "bomb", "c")], 1)) == [[1.0, None, 1.0]]
        assert len(pids_in(tmp_path)) == 50 and gone(pids_in(tmp_path)) and build.pools[0].killed == 1
    finally:
        for pid in filter(alive, pids_in(tmp_path)):
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
    until(lambda: len(pids_in(tmp_path)) == 3)
    assert gone(pids_in(tmp_path))
    proof("3 forked children returned from the call and ended")


@pytest.mark.fault(32)
def test_memory_is_limited(scorer, proof):
    source = "def f(completion):\n    return float(len(bytearray(int(completion) << 20)) >> 20)\n"
    build = scorer(source, SKIPS, scoring={"memory_gib": 0.5, "workers": 1})
    (scored,) = build.score([group("100", "1000", "200")], 1)
    assert totals([scored]) == [[100.0, None, 200.0]]
    assert scored.samples[1].reward_errors["f"].startswith("memory: MemoryError (")
    proof("1000 MiB of 512: MemoryError; 100 and 200 MiB were given")


@pytest.mark.fault(78)
def test_workers_die_with_a_trainer_that_is_killed(tmp_path, proof):
    (tmp_path / "rewards.py").write_text(
        f"import os\ndef f(completion):\n    open('{tmp_path}/pid' + str(os.getpid()), 'w').close()\n    while True: 9**9**6\n"
    )
    code = (
        "from rlgen.recipe.models import RewardRecipe, ScoringRecipe\nfrom rlgen.rewards.score import open_scorer\n"
        f"scorer = open_scorer([RewardRecipe(use='{tmp_path}/rewards.py:f')], set(), 20, ScoringRecipe())\n"
        "from rlgen.worker_pool.worker import WorkerCall\nlist(scorer.run([WorkerCall(0, 0, {'completion': ''}, None)]))\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: pids_in(tmp_path) or trainer.poll() is not None)
    (worker,) = pids_in(tmp_path)
    assert alive(worker)
    trainer.kill()
    trainer.wait()
    assert gone([worker])
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
    build = scorer(EXITS.format(value=1.0), SKIPS, scoring={"workers": 1})
    (tmp_path / "rewards.py").write_text(EXITS.format(value=2.0))
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
            wanted = {{"wait": 4, "more": len(list(folder.glob("start*"))) + 1}}.get(completion, 0)
            while len(list(folder.glob("start*"))) < wanted:
                time.sleep(0.01)
            if completion == "wait":
                time.sleep(1.0)
            return 1.0
    """

    def build(plan, **scoring):
        (tmp_path / "plan").write_text(plan)
        return scorer(source, {**SKIPS, "timeout": HANGS}, scoring=scoring)

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
    assert 4 <= starts <= 7 and sum(worker.ready for worker in build.pools[0]._workers) == 1
    (tmp_path / "plan").write_text("ok")
    build.score([group("more", *"a" * 11)], 2)
    assert len(list(tmp_path.glob("start*"))) > starts
    proof(f"{starts - 1} additional workers were killed in the import while one worked; in the next step they started")


@pytest.mark.fault(27)
def test_a_process_that_cannot_be_started_is_an_error_of_the_reward(scorer, monkeypatch, caplog, proof):
    build = scorer(EXITS.format(value=1.0), SKIPS, scoring={"workers": 1})
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
    assert build.pools[0].killed >= 2
    proof(f"{build.pools[0].killed} loops killed: one blocked, one deaf to its cancellation")


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
    (processes,) = totals(build.score([group(*"abcdefghijkl")], 1))
    assert 2 <= len(set(processes)) <= 3
    monkeypatch.setattr(pool, "GROW_AFTER", HANGS)
    quick = scorer(PID, scoring={"workers": 3})
    (processes,) = totals(quick.score([group(*"abcdefghijkl")], 1))
    assert len(set(processes)) == len(quick.pools[0]._workers) == 1, "quick ones are not worth a second process"


def test_workers_end_with_the_scorer_and_are_replaced_if_they_die_between_steps(scorer):
    build = scorer(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100_000,)).start()\n" + PID, scoring={"workers": 1}
    )
    ((before,),) = totals(build.score([group("a")], 1))
    os.kill(int(before), signal.SIGKILL)
    ((after,),) = totals(build.score([group("a")], 2))
    assert after != before and alive(int(after))
    build.close()
    assert not alive(int(after))


def test_a_worker_needs_neither_torch_nor_transformers(scorer):
    source = """
        import sys
        heavy = {"torch", "transformers", "vllm", "pydantic", "asyncio"}
        def f(completion): return float(len(heavy & set(sys.modules)))
    """
    assert totals(scorer(source).score([group("a")], 1)) == [[0.0]]
