from dataclasses import replace

import pytest
from helpers.scoring import group, totals

from rlgen.errors import RewardError
from rlgen.rewards.score import weighted_sums


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("table", "weights", "sums"),
    [
        # 1*1 + .5*.5 = 1.25 and 1*0 + .5*2 = 1 (algorithms.md 1.1)
        ([{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 2.0}], {"a": 1.0, "b": 0.5}, [1.25, 1.0]),
        # One that applies to no sample is left out of the group; one that applies to a part makes the others unscorable.
        ([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}], {"a": 2.0, "b": 1.0}, [2.0, 6.0]),
        ([{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": None}, {"a": 3.0, "b": 0.0}], {"a": 1.0, "b": 1.0}, [2.0, None, 3.0]),
        ([{"a": None}, {"a": None}], {"a": 1.0}, [None, None]),
        # One of weight 0 is only measured: it decides neither which samples have a sum nor, alone, that there is one.
        ([{"a": 1.0, "b": None}, {"a": 3.0, "b": 9.0}], {"a": 1.0, "b": 0.0}, [1.0, 3.0]),
        ([{"a": None, "b": 5.0}, {"a": None, "b": 7.0}], {"a": 1.0, "b": 0.0}, [None, None]),
    ],
)
def test_the_sum_is_weighted_and_there_is_none_where_no_reward_applies(proof, table, weights, sums):
    assert weighted_sums(table, weights) == sums
    proof(f"{table}: {sums}, and never 0 for None")


def test_the_other_groups_do_not_decide_what_applies(scorer):
    only_odd = scorer("def f(completion, answer): return None if answer == '8' else float(len(completion))")
    scored = only_odd.score([group("a", "bb"), group("c", "d", group_id=18, answer="8")], 1)
    assert totals(scored) == [[1.0, 2.0], [None, None]]


def test_each_sample_gets_its_own_values_and_nothing_else_changes(scorer):
    before = group("a", "bbb")
    (after,) = scorer(
        """
        def f(prompt, completion, prompt_ids, completion_ids, finish_reason, step, answer, k):
            assert prompt == "3+4=" and list(prompt_ids) == [1, 2] and answer == "7"
            return step * 1000 + len(completion) * 100 + len(completion_ids) * 10 + (finish_reason == "stop") + k
        """,
        {"use": "f", "weight": 2.0, "args": {"k": 0.5}},
    ).score([before], step=3)
    assert [dict(sample.rewards) for sample in after.samples] == [{"f": 3111.5}, {"f": 3320.5}]
    assert [sample.reward for sample in after.samples] == [6223.0, 6641.0]
    assert after.prompt is before.prompt
    assert [replace(s, rewards={}, reward=None) for s in after.samples] == list(before.samples)
    assert before.samples[0].rewards == {} and before.samples[0].reward is None


def test_a_reward_of_a_group_gets_lists_and_gives_a_list(scorer):
    build = scorer(
        """
        def f(prompts, completions, completion_ids, finish_reason, finish_reasons, answer, step):
            assert prompts == ["3+4="] * len(completions) and answer == ["7"] * len(completions)
            assert finish_reason == finish_reasons == ["stop", "length"] and step == 2
            return [None if c == "x" else float(len(ids)) for c, ids in zip(completions, completion_ids)]
        """
    )
    (scored,) = build.score([group("a", "b")], 2)
    assert [sample.rewards["f"] for sample in scored.samples] == [1.0, 2.0]
    (scored,) = build.score([group("x", "b")], 2)
    assert [sample.rewards["f"] for sample in scored.samples] == [None, 2.0]
    assert [sample.reward for sample in scored.samples] == [None, 2.0]


def test_a_reward_of_a_group_is_not_called_for_a_group_whose_samples_were_all_too_old(scorer):
    build = scorer("def f(completions): return [float(max(map(len, completions)))] * len(completions)")
    dropped, scored = build.score([replace(group("a"), samples=()), group("abc", "b", group_id=18)], 2)
    assert dropped.samples == () and [sample.reward for sample in scored.samples] == [3.0, 3.0]


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions, **kwargs): return [float(a == '7') for a in kwargs['answer']]",
        "def f(completion, **rest): return float(sorted(rest) == NAMES)",
        "import asyncio\nasync def g(): return 1.0\ndef f(completion): return asyncio.run(g())",  # a loop of its own
        "def f(completion): return {'a': True}.get(completion, 1)",  # booleans and integers are numbers
    ],
)
def test_these_functions_work(scorer, source):
    given = "answer completion_ids finish_reason max_completion_tokens prompt prompt_ids prompt_messages step"
    assert totals(scorer(f"NAMES = {given.split()}\n{source}").score([group("a", "b")], 1)) == [[1.0, 1.0]]


def test_async_calls_run_side_by_side_and_keep_their_places(scorer):
    build = scorer(
        """
        import asyncio
        arrived = []

        async def f(completion):
            arrived.append(completion)
            while len(arrived) < 4:  # each waits for the others: one after the other would never end
                await asyncio.sleep(0)
            return float(completion)

        def g(completion):
            return -float(completion)
        """,
        {"use": "f"},
        {"use": "g", "weight": 0.5},
    )
    scored = build.score([group("1", "2"), group("3", "4", group_id=18)], 1)
    assert totals(scored) == [[0.5, 1.0], [1.5, 2.0]]
    assert list(scored[1].samples[1].rewards.items()) == [("f", 4.0), ("g", -4.0)], "in the recipe's order"


def test_async_rewards_of_all_steps_share_one_event_loop(scorer):
    build = scorer(
        """
        import asyncio
        loops = set()

        async def f(completion):
            loops.add(asyncio.get_running_loop())
            return float(len(loops))
        """
    )
    assert [totals(build.score([group("a", "b")], step)) for step in (1, 2)] == [[[1.0, 1.0]]] * 2


def test_calls_of_either_kind_follow_each_other_in_one_worker(scorer):
    """The one worker leaves its event loop for each plain call, which is sent as soon as the last async one is answered."""
    source = "async def f(completion): return 1.0\ndef g(completion): return 2.0\n"
    build = scorer(source, "f", "g", scoring={"workers": 1, "concurrency": 2})
    for step in range(100):
        assert totals(build.score([group("a", "b")], step)) == [[3.0, 3.0]]


@pytest.mark.parametrize(("scoring", "most"), [({}, 64), ({"concurrency": 3}, 3), ({"concurrency": 100}, 100)])
def test_no_more_async_calls_run_at_once_than_the_recipe_says(scorer, scoring, most):
    build = scorer(
        f"""
        import asyncio
        now = most = 0

        async def f(completion):
            global now, most
            now += 1
            most = max(most, now)
            while most < {most}:  # none of them ends before so many have begun
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            now -= 1
            return float(most)
        """,
        scoring=scoring,
    )
    scored = build.score([group(*"abc" * 50)], 1)
    assert max(totals(scored)[0]) == most


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(completion): return float('nan')", "returned nan; a reward is a finite number, or None"),
        ("def f(completion): return float('inf')", "inf"),
        ("def f(completion): return -1e39", "returned -1e+39; a reward is a finite number"),
        ("def f(completion): return '1.0'", "sample 0: returned '1.0'"),
        ("def f(completion): return [1.0]", "[1.0]"),
        ("def f(completions): return [1.0]", "a list of 2"),
        ("def f(completions): return [1.0, 2.0, 3.0]", "a list of 2"),
        ("def f(completions): return 1.0", "a list of 2"),
        ("def f(completions): return '12'", "a list of 2"),
        ("def f(completions): return [1.0, float('nan')]", "nan"),
    ],
)
def test_what_is_no_reward_is_an_error_and_never_zero(scorer, body, said):
    with pytest.raises(RewardError) as caught:
        scorer(body).score([group("a", "b")], 1)
    assert "reward f" in str(caught.value) and "17" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "line", "said"),
    [
        ("async ", "raise KeyError('digits')", "KeyError: 'digits'"),
        ("async ", "__import__('sys').exit(0)", "SystemExit: 0"),
        ("", "__import__('json').loads(completion)", "JSONDecodeError"),  # raised in a library
    ],
)
def test_a_failure_names_reward_place_and_line_of_the_user(scorer, prefix, line, said):
    source = f"{prefix}def f(completion):\n    if completion == 'b':\n        {line}\n    return 1.0\n"
    with pytest.raises(RewardError) as caught:
        scorer(source).score([group("a", "b")], 1)
    for part in ("reward f, prompt at position 17, sample 1: ", said, "rewards.py:3"):
        assert part in str(caught.value)
