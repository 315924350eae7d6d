"""Opens what answers the model between its turns: tools, or an environment."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlgen.data.suffix import Suffixes
from rlgen.errors import SetupError
from rlgen.recipe import Recipe
from rlgen.recipe.models import EnvironmentRecipe
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.environment import EnvironmentTurns
from rlgen.rollout.tools import ToolTurns
from rlgen.rollout.turns import Turns
from rlgen.setup.data import Data
from rlgen.tools.arena import open_arena
from rlgen.tools.box import open_tools
from rlgen.tools.formats import format_of


def open_dialogue(data: Data, output: Path) -> Dialogue | None:
    """Opens the recipe's tools or its environment; returns None if it has neither. The caller must close its `turns`."""
    recipe, rollout = data.recipe, data.recipe.rollout
    if not recipe.talks:
        return None
    turns: Turns
    if recipe.environment is None:
        turns = open_turns(recipe, data.tokenizer, data.stop_ids, output)
    else:
        turns = open_environment(recipe, recipe.environment, data.tokenizer, data.stop_ids, output)
    return Dialogue(turns=turns, max_turns=rollout.max_turns, reply_timeout=rollout.reply_timeout)


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


def open_environment(
    recipe: Recipe,
    settings: EnvironmentRecipe,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    output: Path | None,
) -> EnvironmentTurns:
    suffixes = Suffixes.open(tokenizer, recipe.data, (), stop_ids, settings.role)
    return EnvironmentTurns.of(open_arena(settings, recipe.scoring, output), suffixes, tokenizer, recipe.data.columns.prompt)
