"""Fits the sizes that a recipe does not set to the model and the data, so that a default is never an error.

A recipe that leaves all sizes out trains a model of 512 positions on five short prompts as well as a large one on a million.
"""

from typing import NamedTuple

from rlgen.errors import Problem, RecipeError
from rlgen.recipe.engines import VllmRecipe
from rlgen.recipe.models import EvalRecipe, Recipe

# Keys whose defaults shrink or grow to fit the model and the data.
GIVE_WAY = ("rollout.prompts_per_step", "rollout.max_completion_tokens", "optim.micro_batch_tokens")
FOLLOWING = ("data.max_prompt_tokens", *GIVE_WAY, "eval.max_prompt_tokens", "eval.max_completion_tokens")


class PromptLimit(NamedTuple):
    """The most tokens that a prompt may have, and what limits it, for messages. None: nothing does."""

    tokens: int | None
    why: str  # "data.max_prompt_tokens is 64"


def is_written(recipe: Recipe, path: str) -> bool:
    """Returns whether the recipe itself sets a key, such as "rollout.group_size"."""
    name, key = path.split(".")
    section = getattr(recipe, name)
    return section is not None and key in section.model_fields_set


def least_row(recipe: Recipe) -> tuple[int, str]:
    """Returns the least length of the longest row by the keys that are set, in tokens, and how it adds up, for messages."""
    prompt, completion = recipe.data.max_prompt_tokens, recipe.rollout.max_completion_tokens
    if not is_written(recipe, "rollout.max_completion_tokens"):
        return (prompt or 1) + 1, f"data.max_prompt_tokens is {prompt or 1}, and a completion follows"
    if prompt is None:
        return completion + 1, f"rollout.max_completion_tokens is {completion}, and a prompt comes before it"
    return prompt + completion, f"data.max_prompt_tokens + rollout.max_completion_tokens = {prompt + completion}"


def window(recipe: Recipe, positions: int | None, trained: bool = True) -> tuple[int | None, str]:
    """Returns the most tokens of a prompt and its completion together, and what limits them.

    Args:
        positions: of the model; None: its config names none.
        trained: whether the trainer learns from such rows, in micro-batches.
    """
    limits = [(positions, f"model.path {recipe.model.path} has {positions} positions")] if positions is not None else []
    engine = recipe.engine
    if isinstance(engine, VllmRecipe) and engine.max_model_len is not None:
        limits.append((engine.max_model_len, f"engine.max_model_len is {engine.max_model_len}"))
    if trained and is_written(recipe, "optim.micro_batch_tokens"):
        tokens, shared = recipe.optim.micro_batch_tokens, recipe.processes.sharing
        together = f" in each of {shared} processes of processes.context" if shared > 1 else ""
        limits.append((tokens * shared, f"optim.micro_batch_tokens is {tokens}{together}"))
    return min(limits) if limits else (None, "")


def prompt_limit(recipe: Recipe, positions: int | None) -> PromptLimit:
    """Returns how long a prompt may be: as the recipe sets, or what the model has left beside a completion.

    Raises:
        RecipeError: the sizes that the recipe sets do not fit into the model.
    """
    prompt, completion = recipe.data.max_prompt_tokens, recipe.rollout.max_completion_tokens
    most, why = window(recipe, positions)
    fixed = is_written(recipe, "rollout.max_completion_tokens")
    least, adds_up = least_row(recipe)
    if most is not None and fixed and least > most:
        hint = f"lower one of them: {most} together at most" if prompt else f"set it to {most - 1} or less"
        raise RecipeError([Problem("rollout.max_completion_tokens", f"{adds_up}, but {why}", hint)])
    if prompt is not None and (most is None or prompt < most):
        return PromptLimit(prompt, f"data.max_prompt_tokens is {prompt}")
    if most is None:
        return PromptLimit(None, "")
    left = most - (completion if fixed else min(completion, most // 2))
    return PromptLimit(left, f"{why}, of which completions take {most - left}")


def fitted(recipe: Recipe, positions: int | None, longest: int, used: int) -> Recipe:
    """Returns the recipe with every size that it does not set itself.

    Args:
        positions: of the model; None: its config names none.
        longest: tokens of the longest prompt.
        used: number of prompts.
    """
    prompt, completion = recipe.data.max_prompt_tokens or longest, recipe.rollout.max_completion_tokens
    budget, prompts = recipe.optim.micro_batch_tokens, recipe.rollout.prompts_per_step
    most, _ = window(recipe, positions)
    if not is_written(recipe, "rollout.max_completion_tokens") and most is not None:
        completion = min(completion, most - longest)
    if most is not None and prompt + completion > most:
        prompt = longest
    if not is_written(recipe, "optim.micro_batch_tokens"):
        budget = max(budget, -(-(prompt + completion) // recipe.processes.sharing))
    if not is_written(recipe, "rollout.prompts_per_step"):
        prompts = min(prompts, used)
    sizes: dict[str, dict[str, int]] = {
        "data": {"max_prompt_tokens": prompt},
        "rollout": {"max_completion_tokens": completion, "prompts_per_step": prompts},
        "optim": {"micro_batch_tokens": budget},
    }
    return recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=new) for name, new in sizes.items()})


def eval_prompt_limit(recipe: Recipe, settings: EvalRecipe, positions: int | None) -> PromptLimit:
    """Returns how long a prompt of an evaluation may be, as `prompt_limit` does for those of training.

    Args:
        recipe: with the sizes of training.

    Raises:
        RecipeError: the sizes that the recipe sets do not fit into the model.
    """
    prompt, written = settings.max_prompt_tokens, settings.max_completion_tokens
    most, why = window(recipe, positions, trained=False)
    least = (prompt or 1) + (written or 1)
    if most is not None and least > most:
        what = f"eval.max_prompt_tokens {prompt or 1} + eval.max_completion_tokens {written or 1} = {least}, but {why}"
        raise RecipeError([Problem("eval.max_completion_tokens", what, f"lower one of them: {most} together at most")])
    if most is None or (prompt is not None and written is not None):
        return PromptLimit(prompt, f"eval.max_prompt_tokens is {prompt}")
    left = most - (written or min(recipe.rollout.max_completion_tokens, most // 2))
    if prompt is not None and prompt <= left:
        return PromptLimit(prompt, f"eval.max_prompt_tokens is {prompt}")
    return PromptLimit(left, f"{why}, of which completions take {most - left}")


def fitted_eval(recipe: Recipe, settings: EvalRecipe, positions: int | None, longest: int) -> EvalRecipe:
    """Returns the section `eval` with every size that it does not set itself.

    Args:
        longest: tokens of the longest prompt that is evaluated.
    """
    most, _ = window(recipe, positions, trained=False)
    sizes = {"max_prompt_tokens": settings.max_prompt_tokens or longest}
    completion = settings.max_completion_tokens or recipe.rollout.max_completion_tokens
    if most is not None and sizes["max_prompt_tokens"] + completion > most:
        sizes["max_prompt_tokens"] = longest
    if most is not None and longest + completion > most:
        sizes["max_completion_tokens"] = most - longest
    return settings.model_copy(update=sizes)


def what_follows(recipe: Recipe, found: Recipe) -> list[str]:
    """Returns a line for each size that was fitted: "rollout.max_completion_tokens is 452 instead of 512: ..."."""
    said = []
    for section, key in (path.split(".") for path in FOLLOWING):
        was, now = (getattr(getattr(one, section), key, None) for one in (recipe, found))
        if was != now:
            instead = "" if was is None else f" instead of {was}"
            said.append(f"{section}.{key} is {now}{instead}: it follows from model and data")
    return said
