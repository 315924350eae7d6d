"""Opens tokenizer, prompts, and what answers the model between its turns, before any weights are loaded: this is cheap, so that
errors in them are reported first.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlgen.data import Placeholder, PromptStream, Rows, build_prompts, cached_rows, listed, load_rows, overlap, warnings_of
from rlgen.data.suffix import Suffixes
from rlgen.errors import DataError, SetupError
from rlgen.models.load import cached_model, check_model, load_config, load_tokenizer, locate, stop_ids
from rlgen.models.vision import FAMILIES, Vision, reads_images
from rlgen.recipe import Recipe
from rlgen.recipe.data import DataRecipe
from rlgen.recipe.evaluation import data_of, eval_rewards, of_eval, seed_of, temperature_of
from rlgen.recipe.models import EnvironmentRecipe, EvalRecipe, ModelRecipe, RewardRecipe, ScoringRecipe
from rlgen.recipe.sizes import PromptLimit, eval_prompt_limit, fitted, fitted_eval, prompt_limit, what_follows
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.environment import EnvironmentTurns, observed
from rlgen.rollout.tools import ToolTurns
from rlgen.tools.arena import open_arena
from rlgen.tools.box import open_tools, schemas_of
from rlgen.tools.formats import format_of

Read = Callable[[DataRecipe, int, PromptLimit], tuple[Rows, PromptStream]]  # from a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The prompts of evaluations, and their settings: what the recipe's `eval` leaves out is as in training."""

    settings: EvalRecipe  # with every size that follows from the model and the data
    rewards: Sequence[RewardRecipe]
    columns: frozenset[str]  # that rewards may take
    seed: int
    temperature: float  # 0: greedy
    max_tokens: int  # of a completion
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
    tokenizer = open_tokenizer(recipe.model, recipe.data.chat_template, location)
    positions = check_model(location, recipe.model.revision, tokenizer)
    ends = tuple(sorted({*stop_ids(tokenizer, location, recipe.model.revision), *recipe.rollout.stop_token_ids}))
    check_stop_texts(recipe.rollout.stop, tokenizer, ends)
    images = open_placeholder(recipe.model, recipe.data.columns.images, location)
    tools = schemas_of(recipe.tools, recipe.scoring)

    def read(data: DataRecipe, seed: int, limit: PromptLimit) -> tuple[Rows, PromptStream]:
        rows = rows_of(data, seed, recipe.environment, recipe.scoring)
        return rows, build_prompts(data, rows, tokenizer, seed, limit, tools, images if data.columns.images else None)

    rows, prompts = read(recipe.data, recipe.run.seed, prompt_limit(recipe, positions))
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
        held_out = open_held_out(found, recipe.eval, positions, prompts, read)
        found = found.model_copy(update={"eval": held_out.settings})
    said = cached_model(location, recipe.model.revision), cached_rows(rows, recipe.data.revision)
    return Data(
        recipe=found,
        location=location,
        tokenizer=tokenizer,
        rows=rows,
        prompts=prompts,
        held_out=held_out,
        stop_ids=ends,
        notices=(*filter(None, said), *what_follows(recipe, found)),
        warnings=(
            *warnings_of(recipe.data, prompts, has_template=bool(tokenizer.chat_template)),
            *(held_out.warnings if held_out is not None else ()),
        ),
    )


def rows_of(data: DataRecipe, seed: int, environment: EnvironmentRecipe | None, scoring: ScoringRecipe) -> Rows:
    """Reads the rows that `data` names. With an environment, the prompts are its first observations."""
    rows = load_rows(data, seed)
    if environment is None:
        return rows
    with closing(open_arena(environment, scoring)) as arena:
        return observed(rows, data.columns.prompt, arena)


def open_tokenizer(model: ModelRecipe, chat_template: str | None, location: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(location, model.revision)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template: {chat_template} cannot be read: {error}") from error
    return tokenizer


def check_stop_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Raises SetupError if no engine could find one of `rollout.stop`: completions are decoded without special tokens.

    A special token that is among the stop ids `ends` does no harm there.
    """
    for text in texts:
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special and token.content in text and number not in ends:
                what = "is a special token" if text == token.content else f"has the special token `{token.content}`"
                hint = f"write its id in rollout.stop_token_ids: [{number}]"
                raise SetupError(f"rollout.stop: `{text}` {what}, which texts do not show; {hint}")


def open_placeholder(model: ModelRecipe, column: str | None, location: str) -> Placeholder | None:
    """Returns how images stand in prompts; None: the recipe names no column of images."""
    config = load_config(location, model.revision)
    if column is None and not reads_images(config):
        return None
    if column is None:
        raise SetupError(
            f"data.columns.images: model.path {model.path} reads images, but data names no column of images; name it (rows may"
            " leave it empty), or take a text model"
        )
    if not reads_images(config):
        known = ", ".join(FAMILIES)
        raise SetupError(
            f"data.columns.images: model.path {model.path} is a {config.model_type}, which reads no images that rlgen"
            f" can train on; take a model of type {known}, or remove the column"
        )
    vision = Vision.open(location, model.revision, config)
    return Placeholder(vision.token, vision.token_id, vision.ids)


def open_held_out(recipe: Recipe, settings: EvalRecipe, positions: int | None, training: PromptStream, read: Read) -> HeldOut:
    """Reads the prompts of evaluations, and counts those that are trained on. An error names the key of `eval`."""
    data, seed, limit = data_of(settings, recipe.data), seed_of(recipe.run.seed), eval_prompt_limit(recipe, settings, positions)
    try:
        rows, prompts = read(data, seed, limit)
    except (DataError, SetupError) as error:
        error.args = (of_eval(str(error)),)
        raise
    count, said = overlap(prompts, training), warnings_of(data, prompts, has_template=False)
    if count:
        said.append(f"{count} of {len(prompts)} prompts are trained on, too: on them an evaluation shows what was memorised")
    own = fitted_eval(recipe, settings, positions, prompts.longest)
    return HeldOut(
        settings=own,
        rewards=eval_rewards(settings, recipe.rewards),
        columns=frozenset(rows.columns) | ({"answer"} if data.columns.answer else set()),
        seed=seed,
        temperature=temperature_of(settings, recipe.rollout.temperature),
        max_tokens=own.max_completion_tokens or recipe.rollout.max_completion_tokens,
        rows=rows,
        prompts=prompts,
        overlap=count,
        warnings=tuple(f"eval: {of_eval(text)}" for text in said),
    )


def open_dialogue(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], output: Path | None
) -> Dialogue | None:
    """Opens the recipe's tools or its environment; returns None if it has neither. The caller must close its `turns`.

    `output` is the file for what they print; None: standard error.
    """
    if not recipe.talks:
        return None
    turns: ToolTurns | EnvironmentTurns
    if (environment := recipe.environment) is not None:
        suffixes = Suffixes(tokenizer, recipe.data, (), stop_ids, environment.role)
        arena = open_arena(environment, recipe.scoring, output)
        turns = EnvironmentTurns(arena, suffixes, recipe.data.columns.prompt)
    else:
        form = format_of(str(tokenizer.chat_template), recipe.data.tool_format)
        with ExitStack() as undo:
            box = undo.enter_context(closing(open_tools(recipe.tools, recipe.scoring, output)))
            suffixes = Suffixes(tokenizer, recipe.data, box.schemas, stop_ids)
            # A template that the recipe names is the user's own: a model may know its tools without being shown them.
            if recipe.data.chat_template is None and not suffixes.shows_tools:
                raise SetupError(
                    "tools: the chat template does not show tools to the model, so that it could not call them; set"
                    " data.chat_template to a file with a template that does"
                )
            turns = ToolTurns(box, suffixes, form)
            undo.pop_all()
    return Dialogue(turns=turns, max_turns=recipe.rollout.max_turns, reply_timeout=recipe.rollout.reply_timeout)
