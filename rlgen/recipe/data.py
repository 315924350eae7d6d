"""Models of the section `data`: where rows come from, and the options of the built-in tasks (rows: `rlgen.data.tasks`)."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from rlgen.recipe.fields import Count, Scalar, Strict, Text

# Forms in which models write calls of tools, by the names of families that do (`rlgen.tools.formats`).
ToolFormat = Literal["hermes", "qwen_xml", "glm", "llama", "mistral", "deepseek", "kimi", "phi", "lfm", "gemma", "harmony"]


class ColumnsRecipe(Strict):
    prompt: Text = "prompt"
    """Column of prompts: texts, or lists of messages."""
    answer: Text | None = None
    """Column that rewards receive as `answer`. They also receive it under the column's name."""
    images: Text | None = None
    """Column of images, for a vision-language model: paths, bytes, or lists of them. Some rows may have no
    image. None: prompts have no images."""


class DataRecipe(Strict):
    source: Text
    """Hub id; path or glob of jsonl, json, csv, parquet or arrow files; or task:NAME, a built-in task."""
    subset: Text | None = None
    """Configuration of a hub data set."""
    split: Text = "train"
    """Split of a hub data set."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set."""
    columns: ColumnsRecipe = ColumnsRecipe()
    """Which columns hold prompts and answers."""
    chat: StrictBool = False
    """Put a text prompt into the chat template, as the user's message."""
    system: Text | None = None
    """System message before the user's; implies `chat`."""
    chat_template: Text | None = None
    """File with a chat template (Jinja). None: the tokenizer's own."""
    template_args: dict[StrictStr, Scalar] = {}
    """Arguments of the chat template, such as enable_thinking."""
    tool_format: ToolFormat | None = None
    """Form in which the model writes tool calls. None: the form that the chat template shows."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, template included. None: the longest of the data, or less if the model has too few positions."""
    overlong: Literal["filter", "error"] = "filter"
    """Longer prompts: leave them out and report their number (filter), or end with an error (error)."""
    limit: Count | None = None
    """Use the first rows only."""
    shuffle: StrictBool = True
    """A new order each epoch, from the seed."""
    options: dict[StrictStr, Any] = {}
    """If the source is task:NAME: settings of this built-in task."""


class MadeRows(Strict):
    size: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1000
    """Rows that are made."""


class ArithmeticOptions(MadeRows):
    digits: Annotated[StrictInt, Field(ge=1, le=9)] = 2
    """Digits of each number."""
    terms: Annotated[StrictInt, Field(ge=2, le=6)] = 2
    """Numbers in an expression."""
    operators: Annotated[StrictStr, Field(pattern=r"^[-+*]+$", max_length=3)] = "+-"
    """Operators of the expressions: any of +, - and *."""


class ReverseOptions(MadeRows):
    min_length: Annotated[StrictInt, Field(ge=1, le=100)] = 3
    """Characters of the shortest word."""
    max_length: Annotated[StrictInt, Field(ge=1, le=100)] = 5
    """Characters of the longest word."""
    alphabet: Text = "abcdefghij"
    """Characters to choose from."""


class SortOptions(ReverseOptions):
    alphabet: Text = "0123456789"
    """Characters to choose from."""


class CountdownOptions(MadeRows):
    numbers: Annotated[StrictInt, Field(ge=2, le=6)] = 3
    """Numbers that a row gives."""
    largest: Annotated[StrictInt, Field(ge=2, le=100)] = 20
    """Largest of these numbers."""


class ColoursOptions(MadeRows):
    side: Annotated[StrictInt, Field(ge=2, le=512)] = 16
    """Pixels of a side of the picture."""
    texts: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.25
    """Share of rows that name the colours and have no picture."""


class WordProblemsOptions(MadeRows):
    largest: Annotated[StrictInt, Field(ge=9, le=1000)] = 9
    """Largest number that the answer is computed from; the smallest is 2."""
    two_steps: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.25
    """Share of problems that take two operations."""


class GymOptions(Strict):
    dataset: Text
    """Data set of reasoning-gym, such as chain_sum; `pip install 'rlgen[gym]'`."""
    size: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1000
    """Rows that are made."""
    config: dict[StrictStr, Any] = {}
    """Settings of the data set, without size and seed."""


TASKS: dict[str, type[Strict]] = {
    "arithmetic": ArithmeticOptions,
    "reverse": ReverseOptions,
    "sort": SortOptions,
    "countdown": CountdownOptions,
    "colours": ColoursOptions,
    "word_problems": WordProblemsOptions,
    "gym": GymOptions,
}

# Columns of each task's rows.
FURTHER_COLUMNS = {"countdown": ("numbers", "target"), "colours": ("images",), "gym": ("metadata",)}
TASK_COLUMNS = {name: ("prompt", "answer", *FURTHER_COLUMNS.get(name, ())) for name in TASKS}
