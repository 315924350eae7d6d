"""Opens what answers the model between its turns."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlgen.data.suffix import Suffixes
from rlgen.opening.data import Data
from rlgen.recipe import Recipe
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.tools import ToolTurns
from rlgen.tools.box import open_tools
from rlgen.tools.formats import format_of


def open_dialogue(data: Data, output: Path) -> Dialogue | None:
    """Opens the recipe's tools; returns None if it has none. Whoever opens it closes its `turns`.

    Args:
        output: file for what tools print.

    Raises:
        RlgenError: a tool cannot be used, or the model's chat template cannot show its answers.
    """
    rollout = data.recipe.rollout
    if not data.recipe.tools:
        return None
    turns = open_turns(data.recipe, data.tokenizer, data.stop_ids, output)
    return Dialogue(turns=turns, max_turns=rollout.max_turns, reply_timeout=rollout.reply_timeout)


def open_turns(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], output: Path | None) -> ToolTurns:
    """Opens the tools of the recipe, as `open_dialogue` does."""
    form = format_of(str(tokenizer.chat_template), recipe.data.tool_format)
    box = open_tools(recipe.tools, recipe.scoring, output)
    try:
        return ToolTurns.of(box, Suffixes.open(tokenizer, recipe.data, box.schemas, stop_ids), tokenizer, form)
    except BaseException:
        box.close()
        raise
