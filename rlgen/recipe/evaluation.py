"""Completes the section `eval`: what it leaves out is as in training."""

import hashlib
import re

from rlgen.recipe.data import DataRecipe
from rlgen.recipe.models import EvalRecipe, RewardRecipe


def data_of(settings: EvalRecipe, data: DataRecipe) -> DataRecipe:
    """Returns the data of evaluations as a section `data`: rows in their order, rendered as those of training."""
    source = settings.source or data.source
    same = source == data.source
    options = settings.options if settings.options is not None else data.options if same else {}
    return data.model_copy(
        update={
            "source": source,
            "subset": settings.subset or (data.subset if same else None),
            "split": settings.split,
            "revision": settings.revision or (data.revision if same else None),
            "columns": settings.columns or data.columns,
            "options": options,
            "limit": settings.limit,
            "max_prompt_tokens": settings.max_prompt_tokens,
            "shuffle": False,
        }
    )


def of_eval(text: str) -> str:
    """Returns a message about keys of `data` with the same keys of `eval`."""
    return re.sub(r"\bdata\.(source|subset|split|revision|columns|options|limit)\b", r"eval.\1", text)


def eval_rewards(settings: EvalRecipe, rewards: list[RewardRecipe]) -> list[RewardRecipe]:
    return settings.rewards if settings.rewards is not None else rewards


def temperature_of(settings: EvalRecipe, trained: float) -> float:
    """Returns the temperature of evaluations; 0: greedy. `trained` is that of training."""
    if settings.temperature is not None:
        return settings.temperature
    return 0.0 if settings.group_size == 1 else trained


def seed_of(run_seed: int) -> int:
    """Returns the seed of evaluations, which follows from the run's seed.

    It is another one, so that the rows of a task differ from those of training, and no completion has the seed of a training
    sample.
    """
    return int.from_bytes(hashlib.sha256(f"eval/{run_seed}".encode()).digest()[:4]) >> 1
