"""Opens what answers the model between its turns: tools, or an environment."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlgen.data.suffix import Suffixes
from rlgen.errors import SetupError
from rlgen.recipe import Recipe
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.environment import EnvironmentTurns
from rlgen.rollout.tools import ToolTurns
from rlgen.tools.arena import open_arena
from rlgen.tools.box import open_tools
from rlgen.tools.formats import format_of


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
        suffixes = Suffixes.open(tokenizer, recipe.data, (), stop_ids, environment.role)
        arena = open_arena(environment, recipe.scoring, output)
        turns = EnvironmentTurns.of(arena, suffixes, tokenizer, recipe.data.columns.prompt)
    return Dialogue(turns=turns, max_turns=recipe.rollout.max_turns, reply_timeout=recipe.rollout.reply_timeout)


def open_turns(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], output: Path | None) -> ToolTurns:
    form = format_of(str(tokenizer.chat_template), recipe.data.tool_format)
    box = open_tools(recipe.tools, recipe.scoring, output)
    try:
        suffixes = Suffixes.open(tokenizer, recipe.data, box.schemas, stop_ids)
        # A template that the recipe names is the user's own: a model may know its tools without being shown them.
        if recipe.data.chat_template is None and not suffixes.shows_tools:
            raise SetupError(
                "tools: the chat template does not show tools to the model, so that it could not call them; set"
                " data.chat_template to a file with a template that does"
            )
        return ToolTurns.of(box, suffixes, tokenizer, form)
    except BaseException:
        box.close()
        raise
