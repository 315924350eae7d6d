"""When the rewards of a step are computed: beside sampling that takes place elsewhere, and after sampling in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from collecting import PROMPTS, SIZE, ScriptedEngine, collected, collector
from helpers.waiting import until

from rlgen.errors import Fault, SentinelError
from rlgen.recipe.models import RewardRecipe, ScoringRecipe
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.run.signals import StopNow

LAST = PROMPTS * SIZE - 1  # of the places of a step
REWARD = """
import os, time
from pathlib import Path

def f(completion_ids):
    (Path("{folder}") / f"called_{{completion_ids[0]}}").write_text(str(os.getpid()))
    while (Path("{folder}") / "hang").exists():
        time.sleep(0.01)
    return float(completion_ids[0])
"""


def nothing_before(*_: object) -> None:
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

    def before_last(place: int, _: object) -> None:
        if place == LAST:
            if elsewhere:
                until(lambda: called(tmp_path) == [0, 1, 2, 3])
            before.append(called(tmp_path))

    collect = collector(ScriptedEngine(before_last), scorer, tmp_path, elsewhere)
    got = collected(collect)
    assert before == [[0, 1, 2, 3] if elsewhere else []]
    assert [sample.reward for sample in got.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert got.samples.group_id.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_was_scored_early_is_taken_from_the_journal_after_a_kill(scorer: Scorer, tmp_path: Path) -> None:
    first = collected(collector(ScriptedEngine(nothing_before), scorer, tmp_path, True))
    for path in tmp_path.glob("called_*"):
        path.unlink()
    again = collector(ScriptedEngine(nothing_before), scorer, tmp_path, True)
    assert collected(again).samples == first.samples
    assert called(tmp_path) == []


@pytest.mark.parametrize("why", ["fault", "stop", "Ctrl-C"])
def test_a_step_that_is_given_up_ends_the_calls_of_its_rewards(scorer: Scorer, tmp_path: Path, why: str) -> None:
    (tmp_path / "hang").touch()

    def before_last(place: int, _: object) -> None:
        if place != LAST:
            return
        until(lambda: called(tmp_path) != [] and all(path.read_text() for path in tmp_path.glob("called_*")))
        if why == "stop":
            raise StopNow
        if why == "Ctrl-C":
            raise KeyboardInterrupt
        engine.version = 1  # of the last answer: newer than the trainer

    engine = ScriptedEngine(before_last)
    collect = collector(engine, scorer, tmp_path, True)
    with pytest.raises((SentinelError, KeyboardInterrupt)) as caught:
        collected(collect)
    if why == "fault":
        assert isinstance(caught.value, SentinelError) and caught.value.fault is Fault.STALE_ROLLOUTS
    workers = {int(path.read_text()) for path in tmp_path.glob("called_*")}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    engine.before, engine.version = nothing_before, 1
    collect.sampler.journal.starts_from(1, "w1")
    # A thread that has not heard of it hands these over, too.
    later, _ = collect.sampler.groups(2, collect.prompts.take(PROMPTS, PROMPTS))
    assert not scorer.pools[0]._busy
    (tmp_path / "hang").unlink()
    assert [sample.reward for group in scorer.score(later, 2) for sample in group.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
