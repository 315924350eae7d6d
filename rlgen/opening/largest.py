"""Runs the largest micro-batches that a run can have, before step 1, so that too little memory shows at once and not after
hours.
"""

import numpy as np
import torch

from rlgen.algorithms.base import Signal
from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.out_of_memory import peak
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.table import RowTable
from rlgen.trainers.update import Updater
from rlgen.trainers.window import Window
from rlgen.types import Sample, Samples, one_span


def try_largest(recipe: Recipe, update: Updater, processes: Processes) -> str:
    """Runs forward and backward on each rank for a micro-batch of the longest rows, and for one of the most tokens.

    Weights, gradients, optimizer and random states do not change. If the optimizer has no state yet, memory for it is allocated
    during the attempt.

    Returns:
        A message with the sizes that were tried.

    Raises:
        SetupError: on all ranks, if one of them runs out of memory, as `Updater` raises it.
    """
    trained = [parameter for parameter in update.policy.parameters() if parameter.requires_grad]
    tried = []
    for rows, length in dict.fromkeys((longest(recipe, processes.world), fullest(recipe, processes.world))):
        window, size = made_up(recipe, rows, length, processes), f"{rows} rows of {length} tokens"

        def attempt(window: Window = window) -> None:
            with memory_for("the optimizer's state", update.less_memory("optimizer"), SetupError):
                moments = [] if update.optimizer.state else [torch.empty_like(p, requires_grad=False) for p in trained * 2]
            with torch.random.fork_rng():
                update.attempt(window)
            del moments

        processes.agreed(attempt, waits_for_others=update.sharded)
        tried.append(size)
    return f"the largest micro-batches fit: {', '.join(tried)}; {peak()}"


def longest(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Returns rows and tokens a row of a micro-batch of the longest rows: as many as fit, or as a rank has."""
    rows = min(recipe.optim.micro_batch_tokens // recipe.max_row_tokens, share(recipe, processes))
    return whole_pairs(recipe, rows), recipe.max_row_tokens


def fullest(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Returns rows and tokens a row of a micro-batch with the most tokens, with up to one row more than `longest`."""
    rows = whole_pairs(recipe, min(-(-recipe.optim.micro_batch_tokens // recipe.max_row_tokens), share(recipe, processes)))
    return rows, min(recipe.max_row_tokens, max(2, recipe.optim.micro_batch_tokens // rows))


def share(recipe: Recipe, processes: int) -> int:
    """Returns the number of samples of a step that one rank trains on, rounded up."""
    return -(-recipe.samples_per_step // processes)


def whole_pairs(recipe: Recipe, rows: int) -> int:
    """Rounds the number of rows down to an even number for online_dpo, whose rows come in pairs; returns at least one row or
    pair.
    """
    return max(2, rows - rows % 2) if recipe.trainer.kind == "online_dpo" else max(1, rows)


def made_up(recipe: Recipe, rows: int, length: int, processes: Processes) -> Window:
    """Returns a window of made-up rows, of which each rank has one micro-batch of `rows` rows of `length` tokens."""
    completion = min(recipe.rollout.max_completion_tokens, length - 1)
    held = Samples.of(made_up_samples(rows * processes.rank, rows, length - completion, completion))
    table = RowTable.gather(held, processes)
    place = torch.arange(len(table))
    everyone = torch.ones(len(table), dtype=torch.bool)
    signal = Signal(
        advantages=1.0 - 2.0 * (place % 2).double(),
        counted=everyone,
        trained=everyone,
        pair_id=place // 2 if recipe.trainer.kind == "online_dpo" else torch.full_like(place, -1),
    )
    # All rows have one length, so that the plan puts them into one micro-batch.
    window = Window.of(table, held, signal, 0.0, rows * length, processes)
    window.frozen["ref_logp"] = torch.from_numpy(window.samples.sampler_logp.values)
    return window


def made_up_samples(first: int, count: int, prompt: int, completion: int) -> list[Sample]:
    """Returns `count` samples in groups of two, numbered from row `first`, with `prompt` and `completion` tokens each."""
    return [
        Sample(
            group_id=row // 2,
            sample_index=row % 2,
            prompt_ids=np.zeros(prompt, dtype=np.int32),
            completion_ids=np.zeros(completion, dtype=np.int32),
            sampler_logp=np.full(completion, -1.0, dtype=np.float32),
            spans=one_span(completion, 0),
            finish_reason="length",
            seed=0,
            completion="",
            rewards={},
            reward=None,
        )
        for row in range(first, first + count)
    ]
