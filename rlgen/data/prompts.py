"""Rows to prompts: the chat template is applied and tokenised once, here and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.recipe.models import DataRecipe
from rlgen.types import Prompt

ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A row that is used: Entry(text="sort: 312", prompt_ids=(82, 78), columns={"answer": "123"})"""

    text: str
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptStream:
    """An endless order of prompts: a position is one integer, and says everything.

    Position p is in epoch p // n, at place p % n of that epoch's order, which follows from (seed, epoch).
    """

    entries: tuple[Entry, ...]
    counts: Mapping[str, int]  # rows read, over_long, duplicates, used
    seed: int
    shuffle: bool

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at positions `start` to `start + count - 1`."""
        prompts: list[Prompt] = []
        orders: dict[int, list[int]] = {}
        for position in range(start, start + count):
            epoch, place = divmod(position, len(self.entries))
            row = orders.setdefault(epoch, self.order(epoch))[place] if self.shuffle else place
            entry = self.entries[row]
            prompts.append(
                Prompt(
                    position=position,
                    row=row,
                    text=entry.text,
                    prompt_ids=entry.prompt_ids,
                    columns=entry.columns,
                )
            )
        return prompts

    def order(self, epoch: int) -> list[int]:
        """The rows of an epoch, each once."""
        order = list(range(len(self.entries)))
        Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def build_prompts(
    data: DataRecipe, rows: Rows, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PromptStream:
    """Templates and tokenises every row.

    Raises:
        DataError: a row that is no prompt, an over-long one if the recipe refuses them, or nothing left.
    """
    entries: list[Entry] = []
    seen: set[tuple[int, ...]] = set()
    over_long = duplicates = 0
    for index, row in enumerate(rows.rows):
        messages = as_messages(row[data.columns.prompt], data, f"data.source: {rows.source}, row {index}")
        if messages is None:
            text = row[data.columns.prompt]
            ids = tuple(tokenizer(text)["input_ids"])
        else:
            text = render(tokenizer, messages, data)
            # The template has written the special tokens already.
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise DataError(f"data.source: {rows.source}, row {index}: the prompt is empty")
        if len(ids) > data.max_prompt_tokens:
            if data.overlong == "error":
                raise DataError(
                    f"data.source: {rows.source}, row {index}: {len(ids)} tokens, data.max_prompt_tokens is"
                    f" {data.max_prompt_tokens}; raise it, or set data.overlong to filter"
                )
            over_long += 1
            continue
        duplicates += ids in seen
        seen.add(ids)
        entries.append(Entry(text, ids, with_answer(row, data.columns.answer)))
    counts = {"read": len(rows.rows), "over_long": over_long, "duplicates": duplicates, "used": len(entries)}
    if not entries:
        raise DataError(
            f"data.source: {rows.source}: no row is left of {counts['read']}: {over_long} are longer than"
            f" data.max_prompt_tokens {data.max_prompt_tokens}; raise it"
        )
    return PromptStream(tuple(entries), counts, seed, data.shuffle)


def with_answer(row: Mapping[str, Any], answer: str | None) -> dict[str, Any]:
    """The row's columns for rewards: under their own names, and the answer as `answer` too."""
    return dict(row) if answer is None else {**row, "answer": row[answer]}


def as_messages(prompt: Any, data: DataRecipe, where: str) -> list[dict[str, Any]] | None:
    """The messages of a prompt; None for a text that is used as it is.

    Raises:
        DataError: neither a text nor messages of which the last is not the assistant's.
    """
    system = [{"role": "system", "content": data.system}] if data.system else []
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}] if data.chat or system else None
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: the prompt is {type(prompt).__name__}, not a text or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise DataError(f"{where}: a message needs a role of {', '.join(ROLES)}: {str(message)[:80]}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: the message of the {message['role']} has no text as content")
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's; a prompt ends where the assistant is to begin"
        )
    return [*([] if prompt[0]["role"] == "system" else system), *map(dict, prompt)]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], data: DataRecipe) -> str:
    """The text of a chat up to where the assistant begins.

    Raises:
        DataError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "data.chat: the tokenizer of model.path has no chat template; take an instruction-tuned model, or prompts as text"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **data.template_args
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(f"data.chat: the chat template refuses {str(messages)[:200]}: {error}") from error
    return str(text)
