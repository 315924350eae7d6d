import pytest
from scoring import group, opened, scorer

from rlgen.errors import RewardError

__all__ = ["opened", "scorer"]


def values(scored):
    return [sample.reward for sample in scored[0].samples]


def test_a_plain_function_may_run_an_event_loop_of_its_own(scorer):
    build = scorer(
        """
        import asyncio

        async def ask(): return 2.0

        def f(completion): return asyncio.run(ask())

        async def g(completion): return 1.0
        """,
        "f",
        "g",
    )
    scored = build.score([group("a", "b")], 1)
    assert values(scored) == [3.0, 3.0]
    assert list(scored[0].samples[0].rewards) == ["f", "g"]


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
    assert [values(build.score([group("a", "b")], step)) for step in (1, 2)] == [[1.0, 1.0]] * 2


def test_the_order_of_rewards_is_the_recipes(scorer):
    build = scorer("async def f(completion): return 1.0\ndef g(completion): return 2.0\n", "f", "g")
    assert list(build.score([group("a")], 1)[0].samples[0].rewards) == ["f", "g"]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_exit_is_a_failure_of_the_reward(scorer, prefix):
    build = scorer(f"import sys\n{prefix}def f(completion):\n    sys.exit(0)\n")
    with pytest.raises(RewardError, match=r"sample 0: SystemExit.*rewards\.py:3"):
        build.score([group("a")], 1)


def test_the_line_is_the_users_when_a_library_raises(scorer):
    with pytest.raises(RewardError, match=r"JSONDecodeError.*rewards\.py:3"):
        scorer("import json\ndef f(completion):\n    return json.loads(completion)\n").score([group("a")], 1)


def test_a_syntax_error_is_located_in_the_file(scorer):
    with pytest.raises(RewardError, match=r"rewards\.py:2"):
        scorer("x = 1\ndef f(:\n")


def test_a_positional_only_parameter_is_refused_at_once(scorer):
    with pytest.raises(RewardError, match="`completion` is positional-only"):
        scorer("def f(completion, /): return 1.0\n")


def test_finish_reasons_may_be_asked_for_in_the_plural(scorer):
    build = scorer("def f(completions, finish_reasons): return [float(r == 'stop') for r in finish_reasons]\n")
    assert values(build.score([group("a", "b")], 1)) == [1.0, 0.0]


def test_calls_of_either_kind_follow_each_other_in_one_worker(scorer):
    """The one worker leaves its event loop for each plain call, which is sent as soon as the last async one is answered."""
    build = scorer(
        "async def f(completion): return 1.0\ndef g(completion): return 2.0\n", "f", "g", scoring={"workers": 1, "concurrency": 2}
    )
    for step in range(100):
        assert values(build.score([group("a", "b")], step)) == [3.0, 3.0]
