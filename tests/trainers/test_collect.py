"""When the rewards of a step are computed: beside sampling that takes place elsewhere, and after sampling in this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from collecting import PROMPTS, collected, collector
from helpers.samples import completion
from helpers.waiting import until

from rlgen.engines.base import Finished
from rlgen.errors import Fault, SentinelError
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.run.signals import StopNow
from rlgen.types import Completion, Request, Sampling

REWARD = """
import os, time
from pathlib import Path

def f(completion_ids):
    (Path("{folder}") / f"called_{{completion_ids[0]}}").write_text(str(os.getpid()))
    while (Path("{folder}") / "hang").exists():
        time.sleep(0.01)
    return float(completion_ids[0])
"""


class Engine:
    """Answers each request with its place, the last one when `before_last` returns."""

    def __init__(self, before_last: Callable[[], None]) -> None:
        self.before_last = before_last
        self.version = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished) -> list[Completion]:
        answers = []
        for place, request in enumerate(requests):
            if place == len(requests) - 1:
                self.before_last()
            answers.append(completion((place, 257), (-1.0, -0.5), request.prompt_ids, version=self.version))
            finished(place, answers[-1])
        return answers

    def sleep(self) -> None:
        pass


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Scorer]:
    (tmp_path / "rewards.py").write_text(REWARD.format(folder=tmp_path))
    entry = RewardRecipe(use=f"{tmp_path}/rewards.py:f", timeout=50_000.0)
    opened = open_scorer([entry], set(), 20, ScoringRecipe(workers=2))
    yield opened
    opened.close()


def called(folder: Path) -> list[int]:
    """Places of the answers that the reward was called for."""
    return sorted(int(path.name.partition("_")[2]) for path in folder.glob("called_*"))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_rewards_run_beside_sampling_only_where_that_is_elsewhere(scorer: Scorer, tmp_path: Path, elsewhere: bool) -> None:
    before: list[list[int]] = []

    def before_last() -> None:
        if elsewhere:
            until(lambda: called(tmp_path) == [0, 1, 2, 3])
        before.append(called(tmp_path))

    collect = collector(Engine(before_last), scorer, tmp_path, elsewhere)
    got = collected(collect)
    assert before == [[0, 1, 2, 3] if elsewhere else []]
    assert [sample.reward for sample in got.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert got.samples.group_id.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_was_scored_early_is_taken_from_the_journal_after_a_kill(scorer: Scorer, tmp_path: Path) -> None:
    first = collected(collector(Engine(lambda: None), scorer, tmp_path, True))
    for path in tmp_path.glob("called_*"):
        path.unlink()
    again = collector(Engine(lambda: None), scorer, tmp_path, True)
    assert collected(again).samples == first.samples
    assert called(tmp_path) == []


@pytest.mark.parametrize("why", ["fault", "stop", "Ctrl-C"])
def test_a_step_that_is_given_up_ends_the_calls_of_its_rewards(scorer: Scorer, tmp_path: Path, why: str) -> None:
    (tmp_path / "hang").touch()

    def before_last() -> None:
        until(lambda: called(tmp_path) != [] and all(path.read_text() for path in tmp_path.glob("called_*")))
        if why == "stop":
            raise StopNow
        if why == "Ctrl-C":
            raise KeyboardInterrupt
        engine.version = 1  # of the last answer: newer than the trainer

    engine = Engine(before_last)
    collect = collector(engine, scorer, tmp_path, True)
    with pytest.raises((SentinelError, KeyboardInterrupt)) as caught:
        collected(collect)
    if why == "fault":
        assert isinstance(caught.value, SentinelError) and caught.value.fault is Fault.STALE_ROLLOUTS
    workers = {int(path.read_text()) for path in tmp_path.glob("called_*")}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    engine.before_last, engine.version = lambda: None, 1
    collect.sampler.journal.starts_from(1, "w1")
    # A thread that has not heard of it hands these over, too.
    later, _ = collect.sampler.groups(2, collect.prompts.take(PROMPTS, PROMPTS))
    assert not scorer.pools[0]._busy
    (tmp_path / "hang").unlink()
    assert [sample.reward for group in scorer.score(later, 2) for sample in group.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
