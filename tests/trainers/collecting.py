"""A collector of three prompts, two completions each, on an engine that a test scripts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlgen.engines.base import EngineInfo, Settings
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
from rlgen.types import Prompt, Sampling, ids_of

SIZE, PROMPTS = 2, 3
SETTINGS = Settings(dtype="float32", head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=260)
FACTS = EngineInfo(
    engine="e 1", plan="p", model="m", revision=None, settings=SETTINGS, stop_ids=(), max_model_len=None, cache_block=None
)


class Prompts:
    def take(self, position: int, count: int) -> list[Prompt]:
        places = range(position, position + count)
        return [Prompt(position=at, row=at, text="", prompt_ids=ids_of([at]), columns={}) for at in places]

    def __len__(self) -> int:
        return 100


def collector(engine: Any, scorer: Scorer, folder: Path, early_pays: bool = True, groups: Any = None) -> Collector:
    """With `groups` it streams to them."""
    alone, prompts, early, streams = Processes.alone(), Prompts(), EarlyScoring(scorer), groups is not None
    journal = Journal.open(folder / "journal", 0, alone, FACTS, ["judge"], print)
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
