"""Rows to prompts: the chat template is applied and tokenised once, here and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.recipe.models import DataRecipe
from rlgen.types import Prompt

ROLES = ("system", "user", "assistant", "tool", "developer")
# Rows without an answer are left out, as a file may have a few; a larger share is a mistake.
MAX_NO_ANSWER = 0.01
CHATS_COMPARED = 8


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
    counts: Mapping[str, int]  # rows read, left out by reason, used; duplicates among the used
    seed: int
    shuffle: bool

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at positions `start` to `start + count - 1`: take(0, 2) + take(2, 3) == take(0, 5)."""
        return [self.at(position) for position in range(start, start + count)]

    def at(self, position: int) -> Prompt:
        """The prompt at a position."""
        epoch, place = divmod(position, len(self.entries))
        row = order(self.seed, epoch, len(self.entries))[place] if self.shuffle else place
        entry = self.entries[row]
        return Prompt(position=position, row=row, text=entry.text, prompt_ids=entry.prompt_ids, columns=entry.columns)


# A step lies in one epoch or across two; shuffling a million rows takes half a second.
@lru_cache(maxsize=2)
def order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """The rows of an epoch, each once."""
    rows = list(range(count))
    Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


def build_prompts(data: DataRecipe, rows: Rows, tokenizer: PreTrainedTokenizerBase, seed: int) -> PromptStream:
    """Templates and tokenises every row. Rows without a prompt or an answer are left out and counted.

    Raises:
        DataError: a row that is no prompt, an over-long one if the recipe refuses them, too many without an answer, or
            nothing left.
    """
    entries: list[Entry] = []
    seen: set[tuple[int, ...]] = set()
    counts = {"read": len(rows.rows), "empty": 0, "no_answer": 0, "over_long": 0, "duplicates": 0, "used": 0}
    chats = 0
    for index, row in enumerate(rows.rows):
        where = f"data.source: {rows.source}, row {index}"
        prompt = row[data.columns.prompt]
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            counts["empty"] += 1
            continue
        if data.columns.answer is not None and row[data.columns.answer] is None:
            counts["no_answer"] += 1
            continue
        messages = as_messages(prompt, data, where)
        if messages is None:
            # Not verbose: a prompt beyond the model's context is counted, not warned about.
            text, ids = prompt, tuple(tokenizer(prompt, verbose=False)["input_ids"])
        else:
            text = render(tokenizer, messages, data, where)
            # The template has written the special tokens already.
            ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            chats += 1
            if chats <= CHATS_COMPARED:
                compare(tokenizer, messages, ids, data)
        if len(ids) > data.max_prompt_tokens:
            if data.overlong == "error":
                raise DataError(
                    f"{where}: {len(ids)} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}; raise it, or set"
                    " data.overlong to filter"
                )
            counts["over_long"] += 1
            continue
        counts["duplicates"] += ids in seen
        seen.add(ids)
        entries.append(Entry(text, ids, with_answer(row, data.columns.answer)))
    counts["used"] = len(entries)
    refuse(data, rows, counts, chats)
    return PromptStream(tuple(entries), counts, seed, data.shuffle)


def refuse(data: DataRecipe, rows: Rows, counts: Mapping[str, int], chats: int) -> None:
    """Raises DataError where what is left cannot be what was meant."""
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    if counts["no_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {rows.source}: `{data.columns.answer}` is empty in {counts['no_answer']} of"
            f" {counts['read']} rows; name another column, or complete the data"
        )
    if not counts["used"]:
        raise DataError(
            f"data.source: {rows.source}: no row is left: {listed}; data.max_prompt_tokens is {data.max_prompt_tokens}"
        )
    if data.template_args and not chats:
        raise DataError("data.template_args: no prompt is a chat, so they do nothing; remove them, or set data.chat")


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
    if not isinstance(prompt, Sequence):
        raise DataError(f"{where}: the prompt is {type(prompt).__name__}, not a text or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise DataError(f"{where}: a message needs a role of {', '.join(ROLES)}: {str(message)[:80]}")
        if message.get("tool_calls"):
            raise DataError(f"{where}: a message calls tools, which a prompt cannot; remove it from the data")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise DataError(f"{where}: the message of the {message['role']} has no text as content")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's; a prompt ends where the assistant is to begin")
    if system and prompt[0]["role"] in ("system", "developer"):
        raise DataError(f"{where}: the row has a system message of its own beside data.system; remove one of them")
    return [*system, *map(dict, prompt)]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], data: DataRecipe, where: str) -> str:
    """The text of a chat up to where the assistant begins.

    Raises:
        DataError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "data.chat: the tokenizer of model.path has no chat template; take an instruction-tuned model, or prompts as text"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **data.template_args)
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(f"{where}: the chat template refuses {str(messages)[:200]}: {error}") from error
    return str(text)


def compare(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], ids: Sequence[int], data: DataRecipe) -> None:
    """Raises DataError where the tokenizer gives messages other ids than the text of their template."""
    direct = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, **data.template_args
    )
    if tuple(direct) != tuple(ids):
        raise DataError(
            f"data.chat: {type(tokenizer).__name__} gives a chat other ids than the text of its template, so the text"
            " would not be what the model sees; take the fast tokenizer of the model"
        )
