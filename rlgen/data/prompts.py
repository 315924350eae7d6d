"""Rows to prompts: the chat template is applied and tokenised once, here and nowhere else."""

import hashlib
import re
from array import array
from collections import Counter
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
FINAL = re.compile(r"####\s*\S+\s*$")  # the final answer at the end of a text, in GSM8K and data made like it
A_TEXT, A_FINAL_TEXT = "a text", "a text that ends in #### and the final answer"
MOST = 0.9  # of the answers are so, if all are meant to be
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

    def digest(self) -> str:
        """Of the ids of all prompts: what tokenizer and template have made of the data."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(array("q", (len(entry.prompt_ids), *entry.prompt_ids)).tobytes())
        return digest.hexdigest()[:16]

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
    counts = {"read": len(rows.rows), "empty": 0, "no_answer": 0, "odd_answer": 0, "over_long": 0, "duplicates": 0, "used": 0}
    chats, usual = 0, usual_kinds(rows, data.columns.answer)
    for index, row in enumerate(rows.rows):
        where = f"data.source: {rows.source}, row {index}"
        prompt = row[data.columns.prompt]
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            counts["empty"] += 1
            continue
        if data.columns.answer is not None and (kind := kind_of(row[data.columns.answer])) not in usual:
            counts["no_answer" if kind is None else "odd_answer"] += 1
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
    refuse(data, rows, counts, chats, usual)
    return PromptStream(tuple(entries), counts, seed, data.shuffle)


def refuse(data: DataRecipe, rows: Rows, counts: Mapping[str, int], chats: int, usual: Sequence[str]) -> None:
    """Raises DataError where what is left cannot be what was meant."""
    if counts["no_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {rows.source}: `{data.columns.answer}` is empty in {counts['no_answer']} of"
            f" {counts['read']} rows; name another column, or complete the data"
        )
    if counts["odd_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {rows.source}: `{data.columns.answer}` is {usual[0]} in most rows, but not in"
            f" {counts['odd_answer']} of {counts['read']}; make them alike, or leave those rows out"
        )
    if not counts["used"]:
        raise DataError(
            f"data.source: {rows.source}: no row is left: {listed(counts)}; data.max_prompt_tokens is {data.max_prompt_tokens}"
        )
    if data.template_args and not chats:
        raise DataError("data.template_args: no prompt is a chat, so they do nothing; remove them, or set data.chat")


def listed(counts: Mapping[str, int]) -> str:
    """ "100 read, 0 empty, ... 98 used" """
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def usual_kinds(rows: Rows, answer: str | None) -> list[str]:
    """What most answers are, and what may stand for it; nothing where there is no answer."""
    kinds = Counter(kind_of(row[answer]) for row in rows.rows) if answer is not None else Counter[str | None]()
    del kinds[None]
    if not kinds:
        return []
    texts = kinds[A_TEXT] + kinds[A_FINAL_TEXT]
    if texts > kinds.total() / 2:
        return [A_FINAL_TEXT] if kinds[A_FINAL_TEXT] >= MOST * texts else [A_TEXT, A_FINAL_TEXT]
    return [str(kinds.most_common(1)[0][0])]


def kind_of(answer: Any) -> str | None:
    """How an answer is written, in words; None: there is none. Answers of one data set are alike, or its reward is wrong."""
    if answer is None or (isinstance(answer, str) and not answer.strip()) or answer != answer:  # NaN, as tables have it
        return None
    if isinstance(answer, str):
        return A_FINAL_TEXT if FINAL.search(answer[-200:]) else A_TEXT
    if isinstance(answer, bool):
        return "true or false"
    if isinstance(answer, int | float):
        return "a number"
    return "a list" if isinstance(answer, Sequence) else f"a {type(answer).__name__}"


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
