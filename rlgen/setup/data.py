"""Opens tokenizer, prompts, and what answers the model between its turns, before any weights are loaded: this is cheap, so that
errors in them are reported first.
"""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlgen.data import Placeholder, PromptStream, Rows, build_prompts, cached_rows, listed, load_rows, overlap, warnings_of
from rlgen.data.suffix import Suffixes
from rlgen.errors import DataError, SetupError
from rlgen.models.load import cached_model, check_model, load_config, load_tokenizer, locate, stop_ids
from rlgen.models.vision import FAMILIES, Vision, reads_images
from rlgen.recipe import Recipe
from rlgen.recipe.data import DataRecipe
from rlgen.recipe.evaluation import data_of, seed_of
from rlgen.recipe.models import EvalRecipe
from rlgen.recipe.sizes import eval_prompt_limit, fitted, fitted_eval, prompt_limit, what_follows
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.environment import EnvironmentTurns, observed
from rlgen.rollout.tools import ToolTurns
from rlgen.tools.arena import open_arena
from rlgen.tools.box import open_tools, schemas_of
from rlgen.tools.formats import format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    settings: EvalRecipe  # with every size that follows from the model and the data
    rows: Rows
    prompts: PromptStream
    overlap: int  # prompts that are among those of training, too
    warnings: tuple[str, ...]  # what may be wrong with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prompts of a run, and the tokenizer."""

    recipe: Recipe  # with every size that follows from the model and the data
    location: str  # of the model: folder or hub id
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    prompts: PromptStream
    held_out: HeldOut | None  # None: the recipe evaluates nothing
    stop_ids: tuple[int, ...]  # each ends a completion
    notices: tuple[str, ...]  # for the user
    warnings: tuple[str, ...]  # what may be wrong with the prompts


def open_data(recipe: Recipe) -> Data:
    """Locates the model, and reads its tokenizer and the prompts."""
    location = locate(recipe.model.path)
    tokenizer = open_tokenizer(recipe, location)
    positions = check_model(location, recipe.model.revision, tokenizer)
    images = open_placeholder(recipe, location)
    limit = prompt_limit(recipe, positions)
    rows = rows_of(recipe, recipe.data, recipe.run.seed)
    tools = schemas_of(recipe.tools, recipe.scoring)
    prompts = build_prompts(recipe.data, rows, tokenizer, recipe.run.seed, limit, tools, images)
    if recipe.talks and prompts.chats < prompts.counts["used"]:
        why = (
            "tools: the prompts of {} are texts, but the chat template shows the model what tools there are"
            if tools
            else "environment: the prompts of {} are texts, but the chat template puts observations between turns"
        )
        raise DataError(f"{why.format(rows.source)}; set data.chat to true, or take a column of messages")
    found = fitted(recipe, positions, prompts.longest, prompts.counts["used"])
    if (used := prompts.counts["used"]) < found.rollout.prompts_per_step:
        raise DataError(
            f"data.source: {rows.source}: {listed(prompts.counts)}: fewer than rollout.prompts_per_step"
            f" {recipe.rollout.prompts_per_step}, so a step would sample a prompt twice; set it to {used} or less"
        )
    held_out = None
    if recipe.eval is not None:
        held_out = open_held_out(found, recipe.eval, positions, tokenizer, prompts, tools, images)
        found = found.model_copy(update={"eval": held_out.settings})
    said = cached_model(location, recipe.model.revision), cached_rows(rows, recipe.data.revision)
    return Data(
        recipe=found,
        location=location,
        tokenizer=tokenizer,
        rows=rows,
        prompts=prompts,
        held_out=held_out,
        stop_ids=tuple(sorted({*stop_ids(tokenizer, location, recipe.model.revision), *recipe.rollout.stop_token_ids})),
        notices=(*filter(None, said), *what_follows(recipe, found)),
        warnings=(
            *warnings_of(recipe.data, prompts, has_template=bool(tokenizer.chat_template)),
            *(held_out.warnings if held_out is not None else ()),
        ),
    )


def rows_of(recipe: Recipe, data: DataRecipe, seed: int) -> Rows:
    """Reads the rows that `data` names. If the recipe has an environment, the prompts are its first observations."""
    rows = load_rows(data, seed)
    if recipe.environment is None:
        return rows
    with closing(open_arena(recipe.environment, recipe.scoring)) as arena:
        return observed(rows, data.columns.prompt, arena)


def open_tokenizer(recipe: Recipe, location: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(location, recipe.model.revision)
    if recipe.data.chat_template is not None:
        try:
            tokenizer.chat_template = Path(recipe.data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template: {recipe.data.chat_template} cannot be read: {error}") from error
    return tokenizer


def open_placeholder(recipe: Recipe, location: str) -> Placeholder | None:
    """Returns how images stand in prompts; None: the recipe names no column of images."""
    config = load_config(location, recipe.model.revision)
    if recipe.data.columns.images is None and not reads_images(config):
        return None
    if recipe.data.columns.images is None:
        raise SetupError(
            f"data.columns.images: model.path {recipe.model.path} reads images, but no column of them is named; name it (rows may"
            " leave it empty), or take a text model"
        )
    if not reads_images(config):
        known = ", ".join(FAMILIES)
        raise SetupError(
            f"data.columns.images: model.path {recipe.model.path} is a {config.model_type}, which reads no images that rlgen"
            f" can train on; take a model of type {known}, or remove the column"
        )
    vision = Vision.open(location, recipe.model.revision, config)
    return Placeholder(vision.token, vision.token_id, vision.ids)


def open_held_out(
    recipe: Recipe,
    settings: EvalRecipe,
    positions: int | None,
    tokenizer: PreTrainedTokenizerBase,
    training: PromptStream,
    tools: Sequence[dict[str, Any]],
    images: Placeholder | None = None,
) -> HeldOut:
    """Reads the prompts of evaluations, and counts those that are trained on. An error names the key of `eval`."""
    data, limit = data_of(recipe, settings), eval_prompt_limit(recipe, settings, positions)
    try:
        rows = rows_of(recipe, data, seed_of(recipe))
        prompts = build_prompts(data, rows, tokenizer, seed_of(recipe), limit, tools, images if data.columns.images else None)
    except (DataError, SetupError) as error:
        error.args = (of_eval(str(error)),)
        raise
    count, said = overlap(prompts, training), warnings_of(data, prompts, has_template=False)
    if count:
        said.append(f"{count} of {len(prompts)} prompts are trained on, too: on them an evaluation shows what was memorised")
    return HeldOut(
        settings=fitted_eval(recipe, settings, positions, prompts.longest),
        rows=rows,
        prompts=prompts,
        overlap=count,
        warnings=tuple(f"eval: {of_eval(text)}" for text in said),
    )


def of_eval(text: str) -> str:
    """Returns a message about keys of `data` with the same keys of `eval`."""
    return re.sub(r"\bdata\.(source|subset|split|revision|columns|options|limit)\b", r"eval.\1", text)


def open_dialogue(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], output: Path | None
) -> Dialogue | None:
    """Opens the recipe's tools or its environment; returns None if it has neither. The caller must close its `turns`.

    `output` is the file for what they print; None: standard error.
    """
    if not recipe.talks:
        return None
    turns: ToolTurns | EnvironmentTurns
    if (environment := recipe.environment) is None:
        turns = open_turns(recipe, tokenizer, stop_ids, output)
    else:
        suffixes = Suffixes(tokenizer, recipe.data, (), stop_ids, environment.role)
        arena = open_arena(environment, recipe.scoring, output)
        turns = EnvironmentTurns(arena, suffixes, recipe.data.columns.prompt)
    return Dialogue(turns=turns, max_turns=recipe.rollout.max_turns, reply_timeout=recipe.rollout.reply_timeout)


def open_turns(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], output: Path | None) -> ToolTurns:
    form = format_of(str(tokenizer.chat_template), recipe.data.tool_format)
    box = open_tools(recipe.tools, recipe.scoring, output)
    try:
        suffixes = Suffixes(tokenizer, recipe.data, box.schemas, stop_ids)
        # A template that the recipe names is the user's own: a model may know its tools without being shown them.
        if recipe.data.chat_template is None and not suffixes.shows_tools:
            raise SetupError(
                "tools: the chat template does not show tools to the model, so that it could not call them; set"
                " data.chat_template to a file with a template that does"
            )
        return ToolTurns(box, suffixes, form)
    except BaseException:
        box.close()
        raise
