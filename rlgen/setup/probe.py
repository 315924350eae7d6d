"""Builds what the sentinel compares: completions of a few prompts on both sides, and the gradient of the recipe's own loss."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from rlgen.engines.base import Settings
from rlgen.models.half import FP8, nudged
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.sentinel.bounds import Bounds, most_for
from rlgen.sentinel.probe import PROMPTS, Probe, TrainerSide
from rlgen.sentinel.rungs import Gradient
from rlgen.setup.train_state import build_updater
from rlgen.setup.trainer_and_engine import TrainerAndEngine
from rlgen.trainers.train_batch import TrainBatch
from rlgen.types import Sample, one_span

TOY_ROWS, TOY_TOKENS = 8, 5  # rows of the train batch of `toy_gradient`; tokens of its shortest row


def probe_of(both: TrainerAndEngine) -> Probe:
    recipe = both.data.recipe
    policy, dtypes = both.state.policy, (recipe.model.dtype, recipe.engine.dtype or recipe.model.dtype)
    quantization, own = both.engine.facts().quantization, recipe.sentinel
    held = {None: getattr(torch, dtypes[1]), "fp8": FP8}.get(quantization) if recipe.model.quantization is None else None
    return Probe(
        trainer=TrainerSide(
            policy=policy,
            budget=recipe.optim.micro_batch_tokens,
            processes=both.processes,
            engine_dtype=None if held is None else getattr(torch, dtypes[1]),
            engine_holds=held,
        ),
        engine=both.engine,
        engine_share=both.engine_share,
        expected=Settings(
            dtype=dtypes[1],
            head_dtype="float32" if recipe.model.fp32_head else dtypes[1],
            logprobs_mode="processed_logprobs",
            vocab_size=policy.head.weight.shape[0],
        ),
        tokenizer=both.data.tokenizer,
        template=both.data.tokenizer.chat_template if recipe.data.chat_template is not None else None,
        prompts=both.data.prompts.take(0, PROMPTS),
        sampling=both.sampling,
        given=Bounds(mean_delta=own.mean_delta, max_delta=own.max_delta) if own.mean_delta or own.max_delta else None,
        most=most_for(dtypes, quantization is not None),
        noise=None,
        seed=recipe.run.seed,
        version=both.position.step,
    )


def toy_gradient(both: TrainerAndEngine, probe: Probe) -> Gradient:
    """Returns a function from the tokens of a micro-batch to the gradient of the recipe's own loss on made-up rewards.

    `rungs.loss_split` calls it, in all processes together; each holds some of the data. These are pairs of completions of unequal
    lengths, one of each with a higher reward.
    """
    algorithm, update = both.state.algorithm, build_updater(both.state, both.sampling, both.processes, None)
    rank, world = both.processes.rank, both.processes.world

    @cache
    def toys() -> Samples:
        sampled = probe.sample(probe.sampling.distribution, TOY_TOKENS + 3 * TOY_ROWS)[:TOY_ROWS]
        samples = Samples.of([toy_sample(sample, place) for place, sample in enumerate(sampled)])
        return samples.take((samples.group_id % world == rank).nonzero()[0])

    def gradient(budget: int, other_rounding: bool) -> Tensor:
        samples = toys()
        table = RowTable.gather(samples, both.processes)
        kl = torch.zeros(len(table)) if algorithm.reference == "reward" else None
        advantages = algorithm.advantages(table.scores({"toy": 1.0}, kl))
        train_batch = TrainBatch.of(table, samples, advantages, 0.0, budget, both.processes)
        if algorithm.reference == "loss":
            train_batch.frozen["ref_logp"] = torch.from_numpy(train_batch.samples.sampler_logp.values)
        with nudged(both.state.policy.model, 0, 2) if other_rounding else nullcontext():
            return update.gradient(train_batch)

    return gradient


def toy_sample(sample: Sample, place: int) -> Sample:
    """Returns the sample cut to unequal lengths, as the worse (even `place`) or the better (odd) one of a pair."""
    tokens = min(len(sample.completion_ids), TOY_TOKENS + 3 * place)
    return replace(
        sample,
        group_id=place // 2,
        sample_index=place % 2,
        completion_ids=sample.completion_ids[:tokens],
        sampler_logp=sample.sampler_logp[:tokens],
        spans=one_span(tokens, sample.weight_version),
        rewards={"toy": float(place % 2)},
        reward=float(place % 2),
        finish_reason="stop",
    )
