import os
import time
from mmap import mmap

import pytest
from scoring import group, opened, scorer

from rlgen.errors import RewardError
from rlgen.rewards.pool import Worker
from rlgen.rewards.worker import NO_CALL, PRESENT, Call, Chunk, Speaker

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


def test_a_worker_that_is_interrupted_while_it_says_where_it_is_has_all_its_time():
    """The system may stop it between any two stores; read then, no call has begun before it was asked for."""
    call, present = Call(7, 0, {}, None), mmap(-1, PRESENT.size)
    worker = Worker(process=None, line=None, present=present, stack=None, mark="", started=0.0)
    worker.chunk, worker.waiting = Chunk((call,), False), {call.id: call}
    before, asked = PRESENT.pack(0.0, NO_CALL), time.monotonic()
    Speaker(None, present, os.getpid()).at(call.id)
    after = present[:]
    for stored in range(0, PRESENT.size + 1, 8):
        present[:] = after[:stored] + before[stored:]
        assert all(since >= asked for since in worker.began.values()), stored
    assert list(worker.began) == [call.id]
