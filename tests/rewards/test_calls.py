import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from mmap import mmap

import pytest
from scoring import group, opened, scorer

from rlgen.errors import RewardError
from rlgen.rewards.worker import Present

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


def test_a_call_has_never_begun_before_it_did(tmp_path):
    """A worker says in shared memory where it is. Here call k begins at k: read at whatever instant, it has not begun earlier."""
    says = """
        import sys
        from itertools import count
        from mmap import mmap
        from types import SimpleNamespace
        from rlgen.rewards import worker
        with open(sys.argv[1], "r+b") as file:
            present = worker.Present.from_buffer(mmap(file.fileno(), 0))
        worker.time = SimpleNamespace(monotonic=count(1).__next__)
        for call in count(1):
            present.begin(call)
    """
    place = tmp_path / "present"
    place.write_bytes(bytes(Present(0.0, 0)))
    with place.open("r+b") as file:
        present = Present.from_buffer(mmap(file.fileno(), 0))
    seen: set[int] = set()
    reads, deadline = 0, time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(says), place]) as process, ExitStack() as last:
        last.callback(process.kill)
        while (len(seen) < 10_000 or reads < 200_000) and time.monotonic() < deadline:
            call, since = present.read()
            assert since in (call, call + 1)
            seen.add(call)
            reads += 1
    assert len(seen) >= 10_000
