"""What failed calls of rewards cost: a value, a sum, or the run."""

import json

import pytest
from helpers.scoring import SKIPS, SOME_FAIL, group, totals

from rlgen.errors import RewardError
from rlgen.processes import Processes
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.records import sample_metrics


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
    assert (zero.samples[1].rewards, skip.samples[1].rewards) == ({"f": 0.0}, {"f": None})
    metrics = sample_metrics(RowTable.gather(Samples.of(skip.samples), Processes.alone()))
    assert (metrics["reward/f/failed"], metrics["reward/f/errors"], metrics["reward/f/timeouts"]) == (1, 1, 0)
    assert (metrics["reward/unscored"], metrics["reward/f/mean"]) == (1, 1.0)
    proof("raised on 1 of 3: counted once, None under skip, 0 under zero, both with the error in the record")


@pytest.mark.fault(28, 34)
@pytest.mark.parametrize(
    ("source", "others", "fails", "goes_on"),
    [
        (SOME_FAIL + "def g(completion): return 5.0\n", ["g"], [{"f": None, "g": 5.0}] * 2, 6.0),
        ("def f(completions):\n    return [1 / (c[0] != 'x') for c in completions]\n", [], [{"f": None}] * 2, 1.0),
    ],
    ids=["each call of a group", "the call of a group"],
)
def test_a_group_that_fails_has_no_sum_and_leaves_the_others(scorer, proof, source, others, fails, goes_on):
    build = scorer(source, {**SKIPS, "max_error_fraction": 0.5}, *others)
    scored = build.score([group("x", "xx"), group("a", "b", group_id=18)], 1)
    assert totals(scored) == [[None, None], [goes_on, goes_on]]
    assert [dict(sample.rewards) for sample in scored[0].samples] == fails
    proof("f failed on both samples of a group: no reward, also where g applies; the other group is kept")


def test_a_failure_of_a_reward_that_is_only_measured_costs_no_sum(scorer):
    build = scorer(SOME_FAIL + "def g(completion): return 5.0\n", {**SKIPS, "weight": 0.0}, "g")
    (scored,) = build.score([group("x", "a")], 1)
    assert totals([scored]) == [[5.0, 5.0]]
    assert [sample.rewards["f"] for sample in scored.samples] == [None, 1.0] and "f" in scored.samples[0].reward_errors


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
    with pytest.raises(RewardError, match="1 calls of this step failed"):
        scorer(SOME_FAIL, {**settings, "on_error": "zero", "max_error_fraction": 0.0}).score([group("a", "x")], 1)
    proof("2 of 8 failed: went on; 3 of 8 failed: RewardError")


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


def test_arguments_of_any_kind_reach_the_function(scorer):
    from datetime import date
    from decimal import Decimal

    answer = [date(2024, 1, 1), Decimal("1.5"), None, {"a": b"\x00"}, "\ud800"]
    build = scorer("def f(completion, answer): return float([type(a).__name__ for a in answer] == completion.split())")
    assert totals(build.score([group("date Decimal NoneType dict str", answer=answer)], 1)) == [[1.0]]
