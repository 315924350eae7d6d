"""Runs the largest micro-batches that a run can have, before step 1, so that too little memory shows at once and not after
hours.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from rlgen.algorithms.base import Advantages
from rlgen.errors import SetupError
from rlgen.models.memory_errors import memory_for
from rlgen.out_of_memory import peak_memory
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import Sample, one_span


@dataclass(frozen=True, slots=True)
class Shape:
    """A micro-batch of rows of equal lengths."""

    rows: int
    prompt: int  # tokens of each row
    completion: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.prompt + self.completion} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What bounds the micro-batches of a run."""

    prompt: int  # most tokens
    completion: int
    group_size: int
    rows: int  # most samples of a step for the ranks that compute a pass together
    budget: int  # tokens of these ranks' micro-batches
    sharing: int  # number of these ranks, see `Policy.sharing`
    paired: bool  # rows come in pairs
    packed: bool  # rows of a group share their prompt
    offloads: bool  # moments are in memory only during an optimizer step, without activations
    moments: torch.dtype | None  # None: that of the weights

    @classmethod
    def of(cls, recipe: Recipe, processes: int, packed: bool, sharing: int) -> "Largest":
        completion = recipe.rollout.max_completion_tokens
        return cls(
            prompt=recipe.max_row_tokens - completion,
            completion=completion,
            group_size=recipe.rollout.group_size,
            rows=-(-recipe.samples_per_step * sharing // processes),
            budget=recipe.optim.micro_batch_tokens * sharing,
            sharing=sharing,
            paired=recipe.trainer.kind == "online_dpo",
            packed=packed,
            offloads=recipe.optim.offload and torch.cuda.is_available(),
            moments=torch.uint8 if recipe.optim.kind == "adamw_8bit" else None,
        )

    def longest(self) -> Shape:
        """Returns a micro-batch of the longest rows: as many as fit, or as a rank has."""
        rows = self.rows
        while rows and self.prompts(rows) * self.prompt + rows * self.completion > self.budget:
            rows -= 1
        return Shape(self.whole_pairs(rows), self.prompt, self.completion)

    def fullest(self) -> Shape:
        """Returns a micro-batch with the most tokens: up to one row more than `longest`, and shorter rows."""
        most = self.longest()
        full = self.prompts(most.rows) * most.prompt + most.rows * most.completion >= self.budget
        rows = self.whole_pairs(min(most.rows + (not full), self.rows))
        of_rows = self.prompts(rows)
        completion = max(1, min(most.completion, (self.budget - of_rows) // rows))
        return Shape(rows, max(1, min(most.prompt, (self.budget - rows * completion) // of_rows)), completion)

    def prompts(self, rows: int) -> int:
        """Returns how many prompts a micro-batch of `rows` rows computes."""
        return -(-rows // self.group_size) if self.packed else rows

    def whole_pairs(self, rows: int) -> int:
        """Rounds down to an even number if rows come in pairs; to one row or pair at least."""
        return max(2, rows - rows % 2) if self.paired else max(1, rows)


def try_largest(most: Largest, update: Updater, processes: Processes) -> str:
    """Runs forward and backward on each rank for a micro-batch of the longest rows, and for one of the most tokens.

    Weights, gradients, optimizer and random states do not change. If the optimizer has no state yet, memory for it is allocated
    during the attempt. Raises SetupError on all ranks if one of them runs out of memory.
    """
    trained = [parameter for parameter in update.policy.parameters() if parameter.requires_grad]

    def attempt(train_batch: TrainBatch) -> None:
        with memory_for("the optimizer's state", update.less_memory("optimizer"), SetupError):
            needed = most.offloads or not update.optimizer.state
            made = [torch.empty_like(one, dtype=most.moments, requires_grad=False) for one in trained * (2 * needed)]
            # Where moments are here only while the optimizer steps, gradients are beside them, but no activations.
            made += [torch.empty_like(one, requires_grad=False) for one in trained * most.offloads]
        if most.offloads:
            made.clear()
        with torch.random.fork_rng():
            update.attempt(train_batch)
        del made

    shapes = list(dict.fromkeys((most.longest(), most.fullest())))
    for shape in shapes:
        processes.run_all(partial(attempt, made_up(most, shape, processes)), has_collectives=update.sharded)
    return f"the largest micro-batches fit: {', '.join(map(str, shapes))}; {peak_memory()}"


def made_up(most: Largest, batch: Shape, processes: Processes) -> TrainBatch:
    """Returns a train batch of made-up rows. The ranks that compute a pass together have one of the shape of `batch`.

    They share no prompt with other ranks, which would then compute it once more than the shape has it.
    """
    size, (group, rank) = most.group_size, divmod(processes.rank, most.sharing)
    first = group * -(-batch.rows // size)
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
    rows = range(batch.rows)[rank :: most.sharing]
    held = Samples.of([replace(row, group_id=first + place // size, sample_index=place % size) for place in rows])
    table = RowTable.gather(held, processes)
    place = torch.arange(len(table))
    everyone = torch.ones(len(table), dtype=torch.bool)
    advantages = Advantages(
        advantages=1.0 - 2.0 * (place % 2).double(),
        counted=everyone,
        trained=everyone,
        pair_id=place // 2 if most.paired else torch.full_like(place, -1),
    )
    # All rows have one length, so that the plan puts them into one micro-batch.
    budget = -(-batch.rows * (batch.prompt + batch.completion) // most.sharing)
    train_batch = TrainBatch.of(table, held, advantages, 0.0, budget, processes, packed=most.packed, sharing=most.sharing)
    train_batch.frozen["ref_logp"] = torch.from_numpy(train_batch.samples.sampler_logp.values)
    return train_batch
