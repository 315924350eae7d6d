"""Runs the largest micro-batches that a run can have, before step 1, so that too little memory shows at once and not after
hours.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from rlgen.algorithms.base import Advantages
from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.out_of_memory import peak
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.table import RowTable
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import Sample, Samples, one_span


def try_largest(recipe: Recipe, update: Updater, processes: Processes) -> str:
    """Runs forward and backward on each rank for a micro-batch of the longest rows, and for one of the most tokens.

    Weights, gradients, optimizer and random states do not change. If the optimizer has no state yet, memory for it is allocated
    during the attempt. Raises SetupError on all ranks if one of them runs out of memory.
    """
    trained = [parameter for parameter in update.policy.parameters() if parameter.requires_grad]
    tried = []
    packed = update.policy.packed
    for batch in dict.fromkeys((longest(recipe, processes.world, packed), fullest(recipe, processes.world, packed))):
        train_batch, size = (
            made_up(recipe, batch, processes, packed),
            f"{batch.rows} rows of {batch.prompt + batch.completion} tokens",
        )

        def attempt(train_batch: TrainBatch = train_batch) -> None:
            with memory_for("the optimizer's state", update.less_memory("optimizer"), SetupError):
                moments = [] if update.optimizer.state else [torch.empty_like(p, requires_grad=False) for p in trained * 2]
            with torch.random.fork_rng():
                update.attempt(train_batch)
            del moments

        processes.run_all(attempt, has_collectives=update.sharded)
        tried.append(size)
    return f"the largest micro-batches fit: {', '.join(tried)}; {peak()}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A micro-batch of rows of equal lengths."""

    rows: int
    prompt: int  # tokens of each row
    completion: int


def longest(recipe: Recipe, processes: int, packed: bool) -> Shape:
    """Returns a micro-batch of the longest rows: as many as fit, or as a rank has."""
    completion = recipe.rollout.max_completion_tokens
    prompt, budget, most = recipe.max_row_tokens - completion, recipe.optim.micro_batch_tokens, share(recipe, processes)
    rows = most
    while rows and prompts(recipe, rows, packed) * prompt + rows * completion > budget:
        rows -= 1
    return Shape(whole_pairs(recipe, rows), prompt, completion)


def fullest(recipe: Recipe, processes: int, packed: bool) -> Shape:
    """Returns a micro-batch with the most tokens: up to one row more than `longest`, and shorter rows."""
    most, budget = longest(recipe, processes, packed), recipe.optim.micro_batch_tokens
    full = prompts(recipe, most.rows, packed) * most.prompt + most.rows * most.completion >= budget
    rows = whole_pairs(recipe, min(most.rows + (not full), share(recipe, processes)))
    of_rows = prompts(recipe, rows, packed)
    completion = max(1, min(most.completion, (budget - of_rows) // rows))
    return Shape(rows, max(1, min(most.prompt, (budget - rows * completion) // of_rows)), completion)


def prompts(recipe: Recipe, rows: int, packed: bool) -> int:
    """Returns how many prompts a micro-batch of `rows` rows computes: packed rows of a group share theirs."""
    return -(-rows // recipe.rollout.group_size) if packed else rows


def share(recipe: Recipe, processes: int) -> int:
    """Returns the samples of a step that one rank trains on, rounded up."""
    return -(-recipe.samples_per_step // processes)


def whole_pairs(recipe: Recipe, rows: int) -> int:
    """Rounds down to an even number for online_dpo, whose rows come in pairs; to one row or pair at least."""
    return max(2, rows - rows % 2) if recipe.trainer.kind == "online_dpo" else max(1, rows)


def made_up(recipe: Recipe, batch: Shape, processes: Processes, packed: bool) -> TrainBatch:
    """Returns a train batch of made-up rows, of which each rank has one micro-batch of the shape of `batch`."""
    size, first = recipe.rollout.group_size, batch.rows * processes.rank
    row = Sample(
        group_id=0,
        sample_index=0,
        prompt_ids=np.zeros(batch.prompt, dtype=np.int32),
        completion_ids=np.zeros(batch.completion, dtype=np.int32),
        sampler_logp=np.full(batch.completion, -1.0, dtype=np.float32),
        spans=one_span(batch.completion, 0),
        finish_reason="length",
        seed=0,
        completion="",
        rewards={},
        reward=None,
    )
    rows = range(first, first + batch.rows)
    held = Samples.of([replace(row, group_id=place // size, sample_index=place % size) for place in rows])
    table = RowTable.gather(held, processes)
    place = torch.arange(len(table))
    everyone = torch.ones(len(table), dtype=torch.bool)
    advantages = Advantages(
        advantages=1.0 - 2.0 * (place % 2).double(),
        counted=everyone,
        trained=everyone,
        pair_id=place // 2 if recipe.trainer.kind == "online_dpo" else torch.full_like(place, -1),
    )
    # All rows have one length, so that the plan puts them into one micro-batch.
    budget = batch.rows * (batch.prompt + batch.completion)
    train_batch = TrainBatch.of(table, held, advantages, 0.0, budget, processes, packed=packed)
    train_batch.frozen["ref_logp"] = torch.from_numpy(train_batch.samples.sampler_logp.values)
    return train_batch
