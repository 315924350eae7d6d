"""Opens the tokenizer and the prompts before any weights are loaded: this is cheap, so that errors in them are reported first."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlgen.data import PromptStream, Rows, build_prompts, cached_rows, listed, load_rows, warnings_of
from rlgen.errors import DataError
from rlgen.models.load import cached_model, check_model, load_tokenizer, locate, stop_ids
from rlgen.recipe import Recipe
from rlgen.recipe.sizes import fitted, prompt_limit, what_follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prompts of a run, and the tokenizer."""

    recipe: Recipe  # with every size that follows from the model and the data
    location: str  # of the model: folder or hub id
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    prompts: PromptStream
    stop_ids: tuple[int, ...]  # each ends a completion
    notices: tuple[str, ...]  # for the user
    warnings: tuple[str, ...]  # what may be wrong with the prompts


def open_data(recipe: Recipe) -> Data:
    """Locates the model, and reads its tokenizer and the prompts.

    Raises:
        SetupError: the model or its tokenizer is not there, or cannot be used.
        RecipeError: what it says about the length of rows does not fit into the model.
        DataError: there are no rows, or not enough for a step.
    """
    location = locate(recipe.model.path)
    tokenizer = load_tokenizer(location, recipe.model.revision)
    positions = check_model(location, recipe.model.revision, tokenizer)
    limit = prompt_limit(recipe, positions)
    rows = load_rows(recipe.data, recipe.run.seed)
    prompts = build_prompts(recipe.data, rows, tokenizer, recipe.run.seed, limit)
    found = fitted(recipe, positions, prompts.longest, prompts.counts["used"])
    if (used := prompts.counts["used"]) < found.rollout.prompts_per_step:
        raise DataError(
            f"data.source: {rows.source}: {listed(prompts.counts)}: less than rollout.prompts_per_step"
            f" {recipe.rollout.prompts_per_step}, so a step would ask the same twice; set it to {used} or less"
        )
    said = cached_model(location, recipe.model.revision), cached_rows(rows, recipe.data.revision)
    return Data(
        recipe=found,
        location=location,
        tokenizer=tokenizer,
        rows=rows,
        prompts=prompts,
        stop_ids=stop_ids(tokenizer, location, recipe.model.revision),
        notices=(*filter(None, said), *what_follows(recipe, found)),
        warnings=tuple(warnings_of(recipe.data, prompts, has_template=bool(tokenizer.chat_template))),
    )
