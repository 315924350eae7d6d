"""When the rewards of a step are computed: beside sampling that takes place elsewhere, and after sampling in this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.samples import completion
from helpers.waiting import until

from rlgen.engines.base import EngineInfo, Finished, Settings
from rlgen.errors import Fault, SentinelError
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import EngineShare, Processes
from rlgen.recipe.models import RewardRecipe, RolloutRecipe, ScoringRecipe
from rlgen.rewards.early import EarlyScoring
from rlgen.rewards.score import Scorer, open_scorer
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Sampler
from rlgen.run.clock import Clock
from rlgen.run.signals import StopNow, StopRequest
from rlgen.trainers.collect import Collector
from rlgen.types import Completion, Prompt, Request, Sampling, ids_of

SIZE, PROMPTS = 2, 3
SAMPLING = Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,))
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


class Prompts:
    def take(self, position: int, count: int) -> list[Prompt]:
        return [
            Prompt(position=at, row=at, text="", prompt_ids=ids_of([at]), columns={}) for at in range(position, position + count)
        ]

    def __len__(self) -> int:
        return 100


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Scorer]:
    (tmp_path / "rewards.py").write_text(REWARD.format(folder=tmp_path))
    entry = RewardRecipe(use=f"{tmp_path}/rewards.py:f", timeout=50_000.0)
    opened = open_scorer([entry], set(), 20, ScoringRecipe(workers=2))
    yield opened
    opened.close()


def collector(engine: Engine, scorer: Scorer, folder: Path, elsewhere: bool) -> Collector:
    settings = Settings(dtype="float32", head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=260)
    facts = EngineInfo(
        engine="e 1", plan="p", model="m", revision=None, settings=settings, stop_ids=(), max_model_len=None, cache_block=None
    )
    alone, prompts, early = Processes.alone(), Prompts(), EarlyScoring(scorer)
    journal = Journal.open(folder / "journal", 0, alone, facts, ["judge"], print)
    journal.starts_from(0, "w0")
    sampler = Sampler(
        engine=engine,  # type: ignore[arg-type]
        prompts_of=lambda step: prompts.take((step - 1) * PROMPTS, PROMPTS),
        sampling=SAMPLING,
        group_size=SIZE,
        run_seed=0,
        tokenizer=byte_tokenizer(),
        submit_to=None,
        max_staleness=1,
        ahead=0,
        in_flight=False,
        journal=journal,
        journals=True,
        all_or_none=False,
        say=print,
        group_finished=early.add if elsewhere else None,
    )
    parts: dict[str, Any] = {"engine": engine, "prompts": prompts, "algorithm": SimpleNamespace()}
    return Collector(
        recipe=RolloutRecipe(prompts_per_step=PROMPTS, group_size=SIZE),
        processes=alone,
        engine_share=EngineShare.of(alone, 1),
        sampler=sampler,
        scorer=scorer,
        early=early,
        journal=journal,
        **parts,
    )


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
    got = collect(1, 0, Clock(), StopRequest(False))
    assert before == [[0, 1, 2, 3] if elsewhere else []]
    assert [sample.reward for sample in got.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert got.samples.group_id.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_was_scored_early_is_taken_from_the_journal_after_a_kill(scorer: Scorer, tmp_path: Path) -> None:
    first = collector(Engine(lambda: None), scorer, tmp_path, True)(1, 0, Clock(), StopRequest(False))
    for path in tmp_path.glob("called_*"):
        path.unlink()
    again = collector(Engine(lambda: None), scorer, tmp_path, True)
    assert again(1, 0, Clock(), StopRequest(False)).samples == first.samples
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
        collect(1, 0, Clock(), StopRequest(False))
    if why == "fault":
        assert isinstance(caught.value, SentinelError) and caught.value.fault is Fault.STALE_ROLLOUTS
    workers = {int(path.read_text()) for path in tmp_path.glob("called_*")}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    engine.before_last, engine.version = lambda: None, 1
    collect.journal.starts_from(1, "w1")
    later, _ = collect.sampler.groups(2)  # a thread that has not heard of it hands these over, too
    assert not scorer.pool._busy
    (tmp_path / "hang").unlink()
    assert [sample.reward for group in scorer.score(later, 2) for sample in group.samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
