"""Rows to prompts: template and tokenizer once, at the start; from then on a prompt is its ids."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.recipe.models import DataRecipe
from rlgen.types import Prompt

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Rows without an answer are left out and counted, as a file may have a few; more than this share is a wrong column.
MAX_NO_ANSWER = 0.01
TOKENIZER_BATCH = 1000
CHATS_VERIFIED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStream:
    """The endless data order of a run: epochs of all prompts, each in an order of its own.

    A place in it is one integer, so a run resumes exactly by knowing how many prompts it took.
    """

    rows: Sequence[Mapping[str, Any]]
    kept: Sequence[int]  # [n] index in `rows` of each prompt
    texts: Sequence[str]  # [n] what the model sees, as text
    ids: Sequence[Sequence[int]]  # [n] of [L], what the model sees
    columns: frozenset[str]  # names that rewards can ask for
    answer: str | None  # the column that rewards get as `answer` too
    seed: int
    shuffle: bool
    counts: Mapping[str, int]  # rows: read, empty, no_answer, over_long, used; and duplicates among the used

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self.kept)

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at positions `start` to `start + count - 1`. take(a, b) + take(a + b, c) == take(a, b + c)."""
        return [self.at(position) for position in range(start, start + count)]

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the data order."""
        epoch, place = divmod(position, len(self))
        row = permutation(self.seed, epoch, len(self))[place] if self.shuffle else place
        columns = dict(self.rows[self.kept[row]])
        if self.answer is not None:
            columns["answer"] = columns[self.answer]
        return Prompt(
            position=position, row=row, text=self.texts[row], prompt_ids=tuple(self.ids[row]), columns=columns
        )


@lru_cache(maxsize=2)  # a step lies in one epoch or across two; a million rows take half a second to shuffle
def permutation(seed: int, epoch: int, n: int) -> Sequence[int]:
    """The order of the n rows in an epoch."""
    order = array("q", range(n))
    Random(f"order/{seed}/{epoch}").shuffle(order)
    return order


def build_prompts(
    data: DataRecipe, rows: Rows, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PromptStream:
    """Templates and tokenises every row.

    A row of messages goes through the chat template, and so does a text if `data.chat` or `data.system` makes it the user's
    message; another text is tokenised as it is. Rows without a prompt or an answer are left out, as are over-long ones
    unless `data.overlong` forbids them; the rest keeps its order.

    Args:
        seed: of the run; it decides the order of the epochs.

    Raises:
        DataError: messages that no template can serve, a tokenizer without a template, an over-long prompt where none is
            allowed, too many rows without an answer, no row left.
    """
    counts = {"read": len(rows.rows), "empty": 0, "no_answer": 0, "over_long": 0, "used": 0, "duplicates": 0}
    kept, texts, ids = array("q"), list[str](), list[array[int]]()
    chats = 0
    inputs = prompt_inputs(data, rows, counts)
    while batch := list(islice(inputs, TOKENIZER_BATCH)):
        rendered = [
            prompt if isinstance(prompt, str) else render(prompt, tokenizer, data, row)
            for row, prompt in batch
        ]
        tokenised = tokenise(tokenizer, rendered, [not isinstance(prompt, str) for _, prompt in batch])
        for (row, prompt), text, prompt_ids in zip(batch, rendered, tokenised, strict=True):
            if not isinstance(prompt, str):
                chats += 1
                if chats <= CHATS_VERIFIED:
                    verify_chat(tokenizer, prompt, prompt_ids, data)
            if not prompt_ids:
                counts["empty"] += 1
            elif len(prompt_ids) > data.max_prompt_tokens:
                refuse_overlong(data, row, len(prompt_ids))
                counts["over_long"] += 1
            else:
                kept.append(row)
                texts.append(text)
                ids.append(array("i", prompt_ids))
    counts["used"], counts["duplicates"] = len(kept), len(kept) - len(set(texts))
    check_counts(data, counts)
    if data.template_args and not chats:
        raise DataError(
            "data.template_args: no prompt is a chat, so they do nothing; remove them, or set data.chat: true"
        )
    return PromptStream(
        rows=rows.rows,
        kept=kept,
        texts=texts,
        ids=ids,
        columns=frozenset(rows.columns) | ({"answer"} if data.columns.answer is not None else frozenset()),
        answer=data.columns.answer,
        seed=seed,
        shuffle=data.shuffle,
        counts=counts,
    )


def prompt_inputs(
    data: DataRecipe, rows: Rows, counts: dict[str, int]
) -> Iterator[tuple[int, str | Messages]]:
    """(index, text or checked messages) of each row that has a prompt and an answer; counts the others."""
    for row, columns in enumerate(rows.rows):
        prompt = columns[data.columns.prompt]
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            counts["empty"] += 1
        elif data.columns.answer is not None and columns[data.columns.answer] is None:
            counts["no_answer"] += 1
        elif isinstance(prompt, str) and not data.chat and data.system is None:
            yield row, prompt
        else:
            yield row, to_messages(prompt, data, row)


def to_messages(prompt: Any, data: DataRecipe, row: int) -> Messages:
    """Messages that end with the user's turn and start with `data.system`, if that is set."""
    where = f"{data.source}: row {row}: `{data.columns.prompt}`"
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where} is {type(prompt).__name__}; a prompt is a text or a list of messages")
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(f"{where}: message {place} has the role {role!r}; known are {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise DataError(
                f"{where}: message {place} calls tools, which prompts cannot; remove it from the data"
            )
        if not isinstance(content, str) or not content.strip():
            raise DataError(f"{where}: message {place} ({role}) has no text as its `content`")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's; a prompt ends before the model's turn"
        )
    if data.system is None:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        raise DataError(f"{where} has a system message of its own beside data.system; remove one of them")
    return [{"role": "system", "content": data.system}, *messages]


def render(messages: Messages, tokenizer: PreTrainedTokenizerBase, data: DataRecipe, row: int) -> str:
    """The text of a chat, with the opening of the assistant's turn."""
    if tokenizer.chat_template is None:
        raise DataError(
            "data: the tokenizer has no chat template, and prompts are chats; "
            "train an instruction-tuned model, or give texts as prompts without data.chat and data.system"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **data.template_args
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{data.source}: row {row}: the chat template refuses the messages: {error}"
        ) from error


def tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], templated: Sequence[bool]
) -> list[list[int]]:
    """Ids of each text, in order. A templated text brings its special tokens with it, another gets them here."""
    ids: list[list[int]] = [[]] * len(texts)
    for special in (True, False):
        places = [place for place, is_templated in enumerate(templated) if is_templated is not special]
        if places:
            # Not verbose: a prompt longer than the model's context is counted, not warned about.
            encoded = tokenizer([texts[place] for place in places], add_special_tokens=special, verbose=False)
            for place, row in zip(places, encoded["input_ids"], strict=True):
                ids[place] = row
    return ids


def verify_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, ids: Sequence[int], data: DataRecipe
) -> None:
    """Raises DataError where the tokenizer itself turns the messages into other ids than into those of their text."""
    direct = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **data.template_args
    )
    if list(direct) != list(ids):
        raise DataError(
            f"data: the tokenizer ({type(tokenizer).__name__}) gives a chat other ids than the text of its template; "
            "rlgen cannot show what the model sees, so use the model's fast tokenizer"
        )


def refuse_overlong(data: DataRecipe, row: int, tokens: int) -> None:
    """Raises DataError where over-long prompts are not to be left out."""
    if data.overlong == "error":
        raise DataError(
            f"{data.source}: row {row}: the prompt has {tokens} tokens, data.max_prompt_tokens allows "
            f"{data.max_prompt_tokens}; raise that, or set data.overlong: filter"
        )


def check_counts(data: DataRecipe, counts: Mapping[str, int]) -> None:
    """Raises DataError where no row is left, or too many have no answer."""
    listed = ", ".join(
        f"{counts[name]} {name}" for name in ("read", "empty", "no_answer", "over_long", "used")
    )
    if counts["no_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {data.source}: `{data.columns.answer}` is empty in {counts['no_answer']} of "
            f"{counts['read']} rows; name another column, or complete the data"
        )
    if not counts["used"]:
        raise DataError(
            f"{data.source}: no row is left: {listed}; data.max_prompt_tokens is {data.max_prompt_tokens}"
        )
