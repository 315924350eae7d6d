"""One training step on every engine: the same weights and prompts lead to the same pairs, rewards, losses and new weights.

Greedy on all engines; with seeds on those of vLLM, which draw alike (`transformers` draws in its own way). Three trainers, 2
and 4 completions of a prompt, prompts of unequal lengths, one of them a single token, one there twice, and completions of one
token.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from helpers.recipes import recipe_for
from helpers.slow import slow_but
from step_rewards import PLACES, by_text
from torch import Tensor

from rlgen.algorithms.base import Algorithm
from rlgen.engines.base import Engine, Finished
from rlgen.engines.open import build_engine
from rlgen.models.load import locate
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score
from rlgen.rollout.table import RowTable
from rlgen.run.checkpoint_folder import ChosenCheckpoint
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.sentinel.sync import send_weights
from rlgen.setup import trainer as opening
from rlgen.setup import trainer_and_engine
from rlgen.trainers.train_batch import TrainBatch
from rlgen.types import Completion, Distribution, Request, Sample, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["7", "sort 3 1 2: ", "The quick brown fox jumps over the lazy dog. ", "sort 3 1 2: ", "once upon a time"]
TWINS = 1, 3  # places of the prompt that is there twice
WORST = {2: 0, 4: 2}
BETA = 0.1
TRAINERS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "beta": BETA, "updates_per_rollout": 2},
    "rloo": {"kind": "rloo", "beta": BETA, "entropy_bonus": 0.1, "updates_per_rollout": 2},
    "online_dpo": {"kind": "online_dpo", "beta": BETA, "updates_per_rollout": 2},
}
TEMPERATURE = {"greedy": 0.0, "sampled": 0.8}
VERSION = 1  # of the weights that sample: others than those the engines are opened with


def recipe_of(mode: str = "sampled", trainer: str = "grpo", size: int = 4, engine: dict[str, Any] | None = None) -> Recipe:
    """Without the rules of a whole recipe, which refuse to train on greedy completions: equal ones teach little."""
    rollout = {"prompts_per_step": len(PROMPTS), "group_size": size, "max_completion_tokens": 12}
    return recipe_for(
        "tiny:qwen3",
        engine=engine or {"kind": "colocated"},
        run={"name": "equivalence", "steps": 2},
        data={"source": "prompts.jsonl", "shuffle": False, "max_prompt_tokens": 48},
        rewards=[{"use": "step_rewards:by_place"}, {"use": "step_rewards:by_text", "weight": 2.0}],
        rollout={**rollout, "temperature": TEMPERATURE[mode]},
        trainer=TRAINERS[trainer],
        optim={"micro_batch_tokens": 100},  # several micro-batches
    )


def open_engine(**engine: Any) -> Engine:
    recipe = recipe_of(engine=engine)
    return build_engine(recipe.engine_needs, locate(recipe.model.path), Processes.alone(), Path(mkdtemp()), print)


# Each is opened once and takes the weights of every case by a sync.
ENGINES: dict[str, Callable[[], Engine]] = {
    "transformers": lambda: open_engine(kind="transformers", max_num_seqs=8),
    "colocated": lambda: open_engine(kind="colocated"),
    "server": lambda: open_engine(kind="server", launch=True),
}
# How completions are chosen, the engine that says what is right, and the one that is compared with it.
COMPARED = [
    ("greedy", "transformers", "colocated"),
    ("greedy", "transformers", "colocated, in another order"),
    ("greedy", "transformers", "server"),
    ("sampled", "colocated", "colocated, in another order"),
    ("sampled", "colocated", "server"),
]
PAIRS = {(mode, engine) for mode, *both in COMPARED for engine in both}


@dataclass(frozen=True)
class OtherOrder:
    """An engine that is asked backwards and in small batches."""

    engine: Engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        backwards = list(requests)[::-1]
        answers = [self.engine.generate(backwards[start : start + 3], sampling) for start in range(0, len(backwards), 3)]
        return [answer for few in answers for answer in few][::-1]


@dataclass(frozen=True)
class Overheard:
    """The algorithm, and every loss that it computed."""

    algorithm: Algorithm
    losses: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def loss(self, x: Any) -> Any:
        loss, stats = self.algorithm.loss(x)
        self.losses.append(loss.item())
        return loss, stats


@dataclass(frozen=True, kw_only=True)
class Step:
    """All that a step has been led to; one entry a sample, in the order of prompts and of places in their groups."""

    samples: list[Sample]  # scored
    advantages: list[float]
    pairs: set[frozenset[tuple[int, int]]]  # (group, place in it) of the two rows that a loss joins, as trained
    logp: list[Tensor]  # [L] of the policy before the step, at the temperature of the loss
    ref_logp: list[Tensor]  # [L] of the reference
    losses: list[float]  # of each update
    metrics: dict[str, Any]
    before: Tensor  # [N] all weights
    moved: Tensor  # [N] by how much


def take_step(recipe: Recipe, engine: Engine, folder: Path, further_stops: Sequence[int]) -> Step:
    """A step as a run takes it, on an engine that is open: every part is built from the recipe by the code that builds a run."""
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": str(folder / "prompts.jsonl")})})
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_and_engine, "build_engine", lambda *_: engine)
        patch.setattr(opening, "climb", lambda probe: [])  # the engine's weights are still those of the case before
        patch.setattr(opening, "record_attempt", lambda *_: None)
        directory = RunDirectory.create(Path(mkdtemp(dir=folder)), "", "")  # with a journal of its own
        console, processes = Console(2, quiet=True), Processes.alone()
        attempt = opening.RunContext(
            recipe=recipe, directory=directory, console=console, processes=processes, start=ChosenCheckpoint()
        )
        trainer, _ = opening.open_trainer(attempt)
    learn, collect = trainer.learn, trainer.collect
    policy, reference = learn.update.policy, learn.builder.reference
    # Changed weights: engine and policy are no copies of the reference any more.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    before = flat(policy)
    # Adam divides a gradient by its own size: of one that is zero by construction it would make steps of rounding errors.
    heard = Overheard(collect.algorithm)
    update = replace(learn.update, algorithm=heard, optimizer=torch.optim.SGD(policy.parameters(), lr=0.1))
    sampling = collect.sampler.sampling
    sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *further_stops))
    collect = replace(collect, sampler=replace(collect.sampler, sampling=sampling))

    send_weights(engine, policy.model, VERSION, Processes.alone(), hashed=True)
    prompts = collect.prompts.take(0, len(PROMPTS))
    groups, dropped = collect.sample(VERSION + 1, prompts, last=True)
    assert dropped == 0
    samples = [sample for group in collect.scorer.score(groups, step=VERSION + 1) for sample in group.samples]
    held = Samples.of(samples)
    train_batch, advantages, _ = learn.builder.build(RowTable.gather(held, Processes.alone()), held, epoch=0.0)
    temperature = 1.0 if recipe.trainer.kind == "online_dpo" else recipe.rollout.temperature or 1.0
    distribution = Distribution(temperature=temperature)
    logp, ref_logp = (score(model, samples, distribution, 4096, Processes.alone()) for model in (policy, reference))
    metrics, _ = update(train_batch, step=VERSION + 1)
    collect.scorer.close()
    pieces = len(train_batch.micro_batches) + len(train_batch.idle)
    assert pieces > 1 and len(heard.losses) == 2 * pieces
    return Step(
        samples=samples,
        advantages=advantages.advantages.tolist(),
        pairs=joined(train_batch),
        logp=logp,
        ref_logp=ref_logp,
        losses=[sum(heard.losses[:pieces]), sum(heard.losses[pieces:])],
        metrics=metrics,
        before=before,
        moved=flat(policy) - before,
    )


def flat(policy: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in policy.parameters()])


def joined(train_batch: TrainBatch) -> set[frozenset[tuple[int, int]]]:
    rows: dict[int, list[tuple[int, int]]] = {}
    samples = train_batch.samples
    for group_id, sample_index, pair in zip(samples.group_id, samples.sample_index, train_batch.pair_id.tolist(), strict=True):
        if pair >= 0:
            rows.setdefault(pair, []).append((int(group_id), int(sample_index)))
    assert all(len(pair) == 2 for pair in rows.values())
    return set(map(frozenset, rows.values()))


Steps = Callable[[str, str, str, int], Step]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """(mode, engine, trainer, group size) -> the step; each is taken once."""
    opened: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        base, _, other_order = name.partition(", ")
        if base not in opened:
            opened[base] = ENGINES[base]()
        return OtherOrder(opened[base]) if other_order else opened[base]

    @cache
    def further_stops(mode: str) -> tuple[int, ...]:
        """An id that ends a completion with its first token, and one that ends another later on."""
        folder = tmp_path_factory.mktemp("stops")
        samples = take_step(recipe_of(mode, size=2), engine("colocated"), folder, ()).samples
        first = samples[2 * TWINS[0]].completion_ids[0]
        later = (
            token
            for ids in (sample.completion_ids for sample in samples)
            for place, token in enumerate(ids)
            if place >= 2 and not {first, token} & set(ids[:place]) and token != first
        )
        return int(first), int(next(later))

    @cache
    def taken(mode: str, name: str, trainer: str, size: int) -> Step:
        return take_step(recipe_of(mode, trainer, size), engine(name), tmp_path_factory.mktemp("run"), further_stops(mode))

    yield taken
    for one in opened.values():
        one.close()


def all_cases(function: Any) -> Any:
    # rloo differs from grpo in its advantages alone, which no engine sees.
    trainers = pytest.mark.parametrize("trainer", slow_but(TRAINERS, "grpo", "online_dpo"))
    return trainers(pytest.mark.parametrize("size", slow_but([2, 4], 4))(function))


EXACT = ("group_id", "sample_index", "prompt_ids", "completion_ids", "finish_reason", "seed", "loss_mask", "rewards", "reward")


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("mode, right, compared", slow_but(COMPARED, COMPARED[0], COMPARED[3]))
@all_cases
def test_a_step_is_the_same_on_every_engine(step: Steps, mode: str, right: str, compared: str, trainer: str, size: int) -> None:
    one, other = step(mode, right, trainer, size), step(mode, compared, trainer, size)
    for name in (*EXACT, "completion", "weight_version"):
        assert [plain(getattr(s, name)) for s in other.samples] == [plain(getattr(s, name)) for s in one.samples], name
    assert other.pairs == one.pairs
    for ours, theirs in zip(one.samples, other.samples, strict=True):
        assert theirs.sampler_logp.tolist() == pytest.approx(ours.sampler_logp.tolist(), abs=1e-5)
    assert other.advantages == pytest.approx(one.advantages, abs=1e-5)
    assert other.losses == pytest.approx(one.losses, abs=1e-5)
    assert torch.equal(other.before, one.before)
    # Of equal completions the larger parts of the gradient cancel, and their rounding stays.
    part = 1e-4 if mode == "greedy" else 1e-5
    assert (other.moved - one.moved).norm() <= part * one.moved.norm() + 1e-9 * one.before.norm()


@pytest.mark.parametrize("mode, engine", slow_but(sorted(PAIRS), ("sampled", "colocated")))
@all_cases
def test_what_a_step_is_made_of(step: Steps, mode: str, engine: str, trainer: str, size: int) -> None:
    """What is known without any engine to compare with."""
    taken = step(mode, engine, trainer, size)
    samples = taken.samples
    # Groups: every prompt has its own, also the one that is there twice.
    assert [(s.group_id, s.sample_index) for s in samples] == [(g, i) for g in range(len(PROMPTS)) for i in range(size)]
    assert [s.prompt_ids.tolist() for s in samples] == [byte_tokenizer()(text).input_ids for text in PROMPTS for _ in range(size)]
    assert len(samples[0].prompt_ids) == 1 and len({len(s.prompt_ids) for s in samples}) == 4
    assert len({s.seed for s in samples}) == len(samples)
    assert {s.weight_version for s in samples} == {VERSION}
    twins = [[tuple(s.completion_ids.tolist()) for s in samples if s.group_id == place] for place in TWINS]
    assert (twins[0] == twins[1]) == (mode == "greedy")
    assert (len(set(twins[0])) == 1) == (mode == "greedy")
    # Completions: of one token, of all tokens, and of lengths between.
    lengths = {len(s.completion_ids) for s in samples}
    assert {1, 12} < lengths
    assert all(s.finish_reason == "stop" for s in samples if len(s.completion_ids) < 12)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    # Log-probs: the trainer's own.
    assert 0 < taken.metrics["sampler/delta_max"] < 1e-5 and not taken.metrics["sentinel/drift"]
    # Rewards.
    for s in samples:
        assert s.rewards == {"by_place": PLACES[s.sample_index], "by_text": by_text(s.completion)}
        assert s.reward == pytest.approx(PLACES[s.sample_index] + 2 * by_text(s.completion))
    # Advantages and pairs.
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    if trainer == "online_dpo":
        check_pairs(taken, groups, mode)
    else:
        assert taken.pairs == set()
        check_grpo(taken, groups) if trainer == "grpo" else check_rloo(taken, groups, mode)
    # Of equal completions one pair's gradient is zero; the others move the weights.
    moved = (taken.moved.norm() / taken.before.norm()).item()
    assert moved < 1e-6 if (mode, trainer) == ("greedy", "online_dpo") else moved > 1e-4


def check_pairs(taken: Step, groups: list[list[Sample]], mode: str) -> None:
    """The best and the worst completion of each prompt are a pair, and nothing else is."""
    reward = attrgetter("reward")
    ends = [(max(group, key=reward), min(group, key=reward)) for group in groups]
    if mode == "greedy":  # the texts are equal, and the place alone decides
        size = len(groups[0])
        assert [(best.sample_index, worst.sample_index) for best, worst in ends] == [(1, WORST[size])] * len(groups)
    assert all(best.reward > worst.reward and best.group_id == worst.group_id for best, worst in ends)
    assert taken.pairs == {frozenset([key(best), key(worst)]) for best, worst in ends}
    signs = {key(best): 1.0 for best, _ in ends} | {key(worst): -1.0 for _, worst in ends}
    assert taken.advantages == [signs.get(key(sample), 0.0) for group in groups for sample in group]
    # The loss joins the same rows: computed here from the pairs alone.
    ratios = [(ours - theirs).sum().item() for ours, theirs in zip(taken.logp, taken.ref_logp, strict=True)]
    ratio = dict(zip([key(sample) for group in groups for sample in group], ratios, strict=True))
    margins = [BETA * (ratio[key(best)] - ratio[key(worst)]) for best, worst in ends]
    assert taken.losses[0] == pytest.approx(statistics.mean(math.log1p(math.exp(-margin)) for margin in margins), abs=1e-5)
    if mode == "greedy":
        assert taken.losses == pytest.approx([math.log(2)] * 2, abs=1e-5)
    else:
        assert abs(taken.losses[0] - math.log(2)) > 1e-3 and taken.losses[1] < taken.losses[0]


def check_grpo(taken: Step, groups: list[list[Sample]]) -> None:
    expected = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        expected += [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    assert taken.advantages == pytest.approx(expected, abs=1e-9)
    # The loss, of all tokens alike: the ratio is 1 before the weights have moved, and the KL is k3.
    parts = [
        -advantage + BETA * ((ref_logp - logp).exp() + logp - ref_logp - 1)
        for advantage, logp, ref_logp in zip(expected, taken.logp, taken.ref_logp, strict=True)
    ]
    assert taken.losses[0] == pytest.approx(torch.cat(parts).mean().item(), abs=1e-5)


def check_rloo(taken: Step, groups: list[list[Sample]], mode: str) -> None:
    # The KL in the rewards is the same for equal completions, and cancels.
    kl = [(logp - ref_logp).sum().item() for logp, ref_logp in zip(taken.logp, taken.ref_logp, strict=True)]
    beta, size, expected = 0.0 if mode == "greedy" else BETA, len(groups[0]), []
    for number, group in enumerate(groups):
        rewards = [sample.reward - beta * kl[number * size + place] for place, sample in enumerate(group)]
        expected += [reward - (sum(rewards) - reward) / (size - 1) for reward in rewards]
    assert taken.advantages == pytest.approx(expected, abs=1e-5)


def key(sample: Sample) -> tuple[int, int]:
    return sample.group_id, sample.sample_index
