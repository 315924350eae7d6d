"""Groups that are scored while others are still sampled."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import numpy
import pytest
from helpers.scoring import SOME_FAIL, gone, group, totals
from helpers.waiting import until

from rlgen.errors import RewardError
from rlgen.rewards.score import EarlyScoring
from rlgen.types import ids_of


@pytest.mark.parametrize("prefix", ["", "async "])
def test_calls_run_before_the_last_group_is_there(scorer, tmp_path, prefix):
    source = f"""
        from pathlib import Path

        {prefix}def f(completion):
            (Path("{tmp_path}") / f"ran_{{completion}}").touch()
            return float(len(completion))
    """
    build = scorer(source)
    with closing(EarlyScoring(build)) as scoring:
        scoring.open(1)
        groups = [group("a", "bb", group_id=0), group("ccc", "d", group_id=1)]
        for one in groups:
            scoring.add(1, one)
            until(lambda one=one: all((tmp_path / f"ran_{sample.completion}").exists() for sample in one.samples))
        scored = scoring.result(1, groups)
    assert [one.group_id for one in scored] == [0, 1]
    assert totals(scored) == [[1.0, 2.0], [3.0, 1.0]]


def test_async_calls_of_a_group_join_those_that_run(scorer, tmp_path):
    source = f"""
        import asyncio
        from pathlib import Path
        arrived = []

        async def f(completion):
            arrived.append(completion)
            (Path("{tmp_path}") / f"ran_{{completion}}").touch()
            while len(arrived) < 4:  # the second group is added when the first one waits here
                await asyncio.sleep(0.01)
            return float(completion)
    """
    build = scorer(source, scoring={"concurrency": 4})
    with closing(EarlyScoring(build)) as scoring:
        scoring.open(1)
        groups = [group("1", "2", group_id=1), group("3", "4", group_id=2)]
        scoring.add(1, groups[0])
        until(lambda: (tmp_path / "ran_2").exists())
        scoring.add(1, groups[1])
        assert totals(scoring.result(1, groups)) == [[1.0, 2.0], [3.0, 4.0]]


def test_groups_of_many_threads_give_the_same_as_together(scorer):
    source = SOME_FAIL + "def g(completions): return [float(sum(map(ord, ''.join(completions))))] * len(completions)\n"
    settings = {"on_error": "skip", "max_error_fraction": 1.0}
    build = scorer(source, {"use": "f", **settings}, {"use": "g", "weight": 0.5}, scoring={"workers": 2})
    groups = [group("a" * number, f"x{number}", group_id=number) for number in range(1, 41)]
    together = build.score(groups, 3)
    assert totals(together)[0] == [1 + 0.5 * sum(b"ax1"), None]
    with closing(EarlyScoring(build)) as scoring:
        scoring.open(3)
        threads = [threading.Thread(target=scoring.add, args=(3, one)) for one in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert scoring.result(3, groups) == together


def test_the_budget_is_of_all_calls_of_the_step(scorer):
    """2 of the first 2 fail, and at the end 2 of 10: as many as 0.2 of them. One more call that fails is too many."""
    build = scorer(SOME_FAIL, {"use": "f", "on_error": "skip", "max_error_fraction": 0.2})
    for last, ends in (("c", False), ("x", True)):
        with closing(EarlyScoring(build)) as scoring:
            scoring.open(1)
            groups = [group("x", "x"), group(*"abcdefg", last, group_id=18)]
            scoring.add(1, groups[0])
            until(lambda: not build.pools[0]._busy)
            scoring.add(1, groups[1])
            if not ends:
                assert totals(scoring.result(1, groups)) == [[None] * 2, [1.0] * 8]
                continue
            with pytest.raises(RewardError, match=r"3 calls of this step failed, more than max_error_fraction 0\.2"):
                scoring.result(1, groups)


@pytest.fixture
def hanging(scorer, tmp_path):
    """Opens a scorer that hangs at "hang", and a function that waits for that and returns the process's id."""

    def build(prefix=""):
        source = f"""
            import os, time
            from pathlib import Path

            {prefix}def f(completion):
                if completion == "hang":
                    Path("{tmp_path}/began").write_text(str(os.getpid()))
                    os.rename("{tmp_path}/began", "{tmp_path}/pid")
                    time.sleep(100_000)
                return 1.0
        """
        return scorer(source, {"use": "f", "timeout": 50_000.0}), began

    def began():
        until((tmp_path / "pid").exists)
        return int((tmp_path / "pid").read_text())

    return build


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_step_that_is_given_up_leaves_no_call_behind(hanging, prefix):
    build, began = hanging(prefix)
    scoring = EarlyScoring(build)
    scoring.open(1)
    scoring.add(1, group("a", "hang", "b"))
    process = began()
    scoring.close()
    assert gone([process])
    for step in (1, 2):  # as by a thread that has not heard of it
        scoring.add(step, group("c"))
    assert not build.pools[0]._busy and not scoring._waiting
    assert totals(build.score([group("d")], 2)) == [[1.0]]


def test_a_closed_scorer_ends_a_step_that_runs(hanging):
    build, began = hanging()
    scoring, hangs = EarlyScoring(build), group("hang")
    scoring.open(1)
    scoring.add(1, hangs)
    process = began()
    build.close()
    assert gone([process])
    with pytest.raises(RuntimeError, match="closed"):
        scoring.result(1, [hangs])
    with pytest.raises(RuntimeError, match="closed"):
        scoring.open(2)


def test_ctrl_c_while_rewards_are_waited_for_ends_them(hanging, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    build, began = hanging()

    def interrupt():
        began()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        build.score([group("hang")], 1)
    assert gone([began()])
    assert totals(build.score([group("d")], 2)) == [[1.0]]


def test_two_steps_are_not_scored_at_once(scorer):
    build = scorer("def f(completion): return 1.0\n")
    with closing(build.open()) as stream, pytest.raises(RuntimeError, match="another step"):
        EarlyScoring(build).open(2)
    stream.add(build.calls_of(group("c"), 1, 0)[1])  # too late: it does nothing
    assert not build.pools[0]._busy
    assert totals(build.score([group("a")], 2)) == [[1.0]]


@pytest.mark.parametrize("kind", [lambda ids: ids, lambda ids: numpy.repeat(ids, 2)[::2]], ids=["array", "part of another"])
def test_token_ids_are_plain_lists_of_ints(scorer, tmp_path, kind):
    source = """
        def plain(ids, expected):
            return type(ids) is list and {type(id) for id in ids} == {int} and ids == expected

        def f(prompt_ids, completion_ids):
            return float(plain(prompt_ids, [1, 2]) and plain(completion_ids, [0, 151643, 2**31 - 1]))

        def g(completions, completion_ids):
            return [float(type(completion_ids) is list and plain(ids, [0, 151643, 2**31 - 1])) for ids in completion_ids]

        def h(completion_ids): raise ValueError
    """
    (before,) = [group("a", "b")]
    ids = {"prompt_ids": kind(ids_of((1, 2))), "completion_ids": kind(ids_of((0, 151643, 2**31 - 1)))}
    before = replace(before, samples=tuple(replace(one, **ids) for one in before.samples))
    (after,) = scorer(source, "f", "g").score([before], 1)
    assert [dict(sample.rewards) for sample in after.samples] == [{"f": 1.0, "g": 1.0}] * 2
    with pytest.raises(RewardError):
        scorer(source, "h", failures=tmp_path / "failed").score([before], 1)
    (saved,) = (tmp_path / "failed").iterdir()
    assert '"completion_ids": [\n      0,\n      151643,\n      2147483647\n    ]' in saved.read_text()


def test_a_group_that_has_changed_is_scored_anew_and_its_failures_do_not_count(scorer):
    """As when one of its samples is too old by the time that it is trained: a reward of the group sees those that are left."""
    source = SOME_FAIL + "def g(completions): return [float(len(completions)) for _ in completions]\n"
    build = scorer(source, {"use": "f", "on_error": "skip", "max_error_fraction": 0.0}, "g")
    before, other = group("a", "x", "b"), group("c", group_id=18)
    with closing(EarlyScoring(build)) as scoring:
        scoring.open(1)
        scoring.add(1, other)
        scoring.add(1, before)
        until(lambda: not build.pools[0]._busy)
        left = replace(before, samples=(before.samples[0], before.samples[2]))
        scored = scoring.result(1, [left, other])
    assert scored == build.score([left, other], 1)
    assert [[sample.rewards for sample in one.samples] for one in scored] == [[{"f": 1.0, "g": 2.0}] * 2, [{"f": 1.0, "g": 1.0}]]


def test_groups_of_the_next_step_wait_until_this_one_is_scored(scorer, tmp_path):
    source = f"""
        def f(completion, step):
            with open("{tmp_path}/calls", "a") as calls:
                calls.write(f"{{completion}} of {{step}}\\n")
            return float(step)
    """
    build = scorer(source)
    early, calls = EarlyScoring(build), tmp_path / "calls"
    early.add(1, group("a"))  # before anybody has opened the step
    early.open(1)
    until(calls.exists)
    early.add(2, group("b", group_id=18))
    until(lambda: not build.pools[0]._busy)
    assert totals(early.result(1, [group("a")])) == [[1.0]]
    assert calls.read_text() == "a of 1\n"
    early.open(2)
    until(lambda: calls.read_text() == "a of 1\nb of 2\n")
    early.add(2, group("c", group_id=19))
    assert totals(early.result(2, [group("c", group_id=19), group("b", group_id=18)])) == [[2.0], [2.0]]
    assert sorted(calls.read_text().splitlines()) == ["a of 1", "b of 2", "c of 2"], "each is called once"
    assert totals(early.result(2, [group("d")])) == [[2.0]], "a further call of the same step"
