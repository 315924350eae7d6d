"""What the trainer's side takes from a recipe. It is built once; the builders of model, optimizer and update get no recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rlgen.models.memory_errors import Phase, memory_advice
from rlgen.recipe import Recipe
from rlgen.recipe.models import ModelRecipe, OptimRecipe, ProcessesRecipe

# A group with a completion of more than this share of max_completion_tokens is trained on last (`rollout.stream`).
LATE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How groups are trained on while others are sampled (`rollout.stream`)."""

    shares_cores: bool  # the engine computes on the cores of this machine, as the trainer does
    prompts: int  # of a step
    group_size: int
    max_tokens: int  # of a completion
    late_from: int | None  # as `Groups.late_from`

    @classmethod
    def of(cls, recipe: Recipe) -> "StreamSettings":
        rollout, engine = recipe.rollout, recipe.engine
        shared = engine.shares_cores and not torch.cuda.is_available()
        # No completion of a step waits for others: the longest are then the last ones.
        all_at_once = recipe.samples_per_step <= engine.max_num_seqs * engine.copies
        return cls(
            shares_cores=shared,
            prompts=rollout.prompts_per_step,
            group_size=rollout.group_size,
            max_tokens=rollout.max_completion_tokens,
            # Where the engine is elsewhere, a group that waits gains nothing.
            late_from=math.ceil(LATE * rollout.max_completion_tokens) if shared and all_at_once else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    model: ModelRecipe
    optim: OptimRecipe
    processes: ProcessesRecipe
    trainer: str  # its kind
    updates: int  # optimizer steps on each rollout
    steps: int  # of the run
    seed: int
    deterministic: bool
    stream: StreamSettings | None
    memory_advice: Callable[[Phase], Sequence[str]]  # settings to suggest if memory does not suffice

    @classmethod
    def of(cls, recipe: Recipe) -> "TrainSettings":
        return cls(
            model=recipe.model,
            optim=recipe.optim,
            processes=recipe.processes,
            trainer=recipe.trainer.kind,
            updates=recipe.trainer.updates_per_rollout,
            steps=recipe.run.steps,
            seed=recipe.run.seed,
            deterministic=recipe.run.deterministic,
            stream=StreamSettings.of(recipe) if recipe.rollout.stream else None,
            memory_advice=partial(memory_advice, recipe),
        )
