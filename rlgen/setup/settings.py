"""What the trainer's side takes from a recipe. It is built once; the builders of model, optimizer and update get no recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rlgen.models.memory_errors import Phase, memory_advice
from rlgen.recipe import Recipe
from rlgen.recipe.models import ModelRecipe, OptimRecipe, RolloutRecipe, RunRecipe
from rlgen.recipe.processes import ProcessesRecipe
from rlgen.recipe.trainers import TrainerRecipe

# A group with a completion of more than this share of max_completion_tokens is trained on last (`rollout.stream`).
LATE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    location: str  # of the model: folder or hub id
    prompts: Sequence[NDArray[np.int32]]  # [T] each; packed rows are tried on them
    run: RunRecipe
    model: ModelRecipe
    rollout: RolloutRecipe
    trainer: TrainerRecipe
    optim: OptimRecipe
    processes: ProcessesRecipe
    shares_cores: bool  # the engine computes on the cores of this machine, as the trainer does
    late_from: int | None  # as `Groups.late_from`
    memory_advice: Callable[[Phase], Sequence[str]]  # settings to suggest if memory does not suffice

    @classmethod
    def of(cls, recipe: Recipe, location: str, prompts: Sequence[NDArray[np.int32]] = ()) -> "TrainSettings":
        engine, shares_cores = recipe.engine, recipe.engine.shares_cores and not torch.cuda.is_available()
        # No completion of a step waits for others: the longest are then the last ones.
        all_at_once = recipe.samples_per_step <= engine.max_num_seqs * engine.copies
        return cls(
            location=location,
            prompts=prompts,
            run=recipe.run,
            model=recipe.model,
            rollout=recipe.rollout,
            trainer=recipe.trainer,
            optim=recipe.optim,
            processes=recipe.processes,
            shares_cores=shares_cores,
            # Where the engine is elsewhere, a group that waits gains nothing.
            late_from=math.ceil(LATE * recipe.rollout.max_completion_tokens) if shares_cores and all_at_once else None,
            memory_advice=partial(memory_advice, recipe),
        )
