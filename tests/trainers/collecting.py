"""A collector of three prompts, two completions each, on an engine that a test scripts."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.engines import engine_info
from helpers.samples import completion

from rlgen.engines.base import Finished, FollowUpQueue
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import EngineShare, Processes
from rlgen.recipe.models import RolloutRecipe
from rlgen.rewards.score import EarlyScoring, Scorer
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Sampler
from rlgen.run.clock import PhaseClock
from rlgen.run.signals import StopRequest
from rlgen.trainers.collect import Collected, Collector
from rlgen.trainers.groups import Stream
from rlgen.types import Completion, Prompt, Request, Sampling, ids_of

SIZE, PROMPTS = 2, 3


class Prompts:
    def take(self, position: int, count: int) -> list[Prompt]:
        places = range(position, position + count)
        return [Prompt(position=at, row=at, text="", prompt_ids=ids_of([at]), columns={}) for at in places]

    def __len__(self) -> int:
        return 100


class ScriptedEngine:
    """Answers each request with its place, in the order of places, after a call of `before` with it; writes down what happens."""

    def __init__(self, before: Callable[[int, FollowUpQueue | None], None], events: list[str] | None = None) -> None:
        self.before, self.events = before, [] if events is None else events
        self.version = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, finished: Finished, further: FollowUpQueue | None = None
    ) -> list[Completion]:
        answers = []
        self.events.append(f"begin in {threading.current_thread().name}")
        try:
            for place, request in enumerate(requests):
                self.before(place, further)
                answers.append(completion((place, 257), (-1.0, -0.5), request.prompt_ids, version=self.version))
                self.events.append(f"answer {place}")
                finished(place, answers[-1])
        except BaseException as error:
            self.events.append(f"ended by {type(error).__name__}")
            raise
        return answers

    def sleep(self) -> None:
        pass


def collector(engine: Any, scorer: Scorer, folder: Path, early_pays: bool = True, groups: Any = None) -> Collector:
    """With `groups` it streams to them."""
    alone, prompts, early, streams = Processes.alone(), Prompts(), EarlyScoring(scorer), groups is not None
    journal = Journal.open(folder / "journal", 0, alone, engine_info(), ["judge"], print)
    journal.starts_from(0, "w0")
    sampler = Sampler(
        engine=engine,
        sampling=Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,)),
        group_size=SIZE,
        run_seed=0,
        tokenizer=byte_tokenizer(),
        journal=journal,
        all_or_none=False,
        group_finished=early.add if early_pays else None,
        interruptible=streams,
    )
    parts: dict[str, Any] = {"prompts": prompts, "algorithm": SimpleNamespace()}
    return Collector(
        recipe=RolloutRecipe(prompts_per_step=PROMPTS, group_size=SIZE, stream=streams),
        processes=alone,
        engine_share=EngineShare.of(alone, 1),
        sampler=sampler,
        scorer=scorer,
        early=early,
        stream=Stream(processes=alone, sampler=sampler, early=early, labels=("f",), groups=groups) if streams else None,
        **parts,
    )


def collected(collect: Collector) -> Collected:
    """What the loop collects for step 1."""
    with collect.drawing(1, 0, PhaseClock(), StopRequest(False)) as draw:
        while draw.wanted:
            collect.score(draw, collect.sampled(draw))
        return collect.collected(draw)
