"""Turns rows into tokens, in batches. Only this module applies the chat template and tokenises prompts, once for each row.

It also classifies how the answers of a data set are written: a mixture usually means that a reward would be wrong.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from typing import Any

import numpy
import pyarrow
from transformers import PreTrainedTokenizerBase

from rlgen.data.cache import BATCH, Write, cache_key
from rlgen.data.chats import as_messages
from rlgen.data.images import Encoded, Placeholder, check_text, encoded, expanded, with_parts
from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.recipe.data import DataRecipe
from rlgen.recipe.sizes import PromptLimit
from rlgen.types import Image

# Columns of a prompt: the index of its row in the data set, the text that the model sees, its ids, and of each image the digest
# and the range of its ids.
IMAGES = pyarrow.large_list(pyarrow.struct([("sha256", pyarrow.string()), ("start", pyarrow.int32()), ("stop", pyarrow.int32())]))
IDS = pyarrow.large_list(pyarrow.int32())
PROMPTS = pyarrow.schema([("row", pyarrow.int32()), ("text", pyarrow.large_string()), ("ids", IDS), ("images", IMAGES)])
IMAGE_ROWS = 32  # rows whose images are in memory at a time
CACHED_ROWS = 2000  # rows from which on the prompts of a data set are cached
CHATS_COMPARED = 8
FINAL = re.compile(r"####\s*\S+\s*$")  # the final answer at the end of a text, in GSM8K and data made like it
A_TEXT, A_FINAL_TEXT = "a text", "a text that ends in #### and the final answer"
MOST = 0.9  # if at least this share of the texts ends in a final answer, all of them must


@dataclass(frozen=True, slots=True)
class Templated:
    """A row before it is tokenised: Templated(row=3, text="<|im_start|>user\\nsort 312...", messages=[{"role": "user", ...}])"""

    row: int
    text: str
    messages: list[dict[str, Any]] | None  # None: the prompt is a text, used as it is
    images: tuple[tuple[str, tuple[int, ...]], ...] = ()  # SHA-256 and ids of each image


def prompts_key(
    data: DataRecipe, rows: Rows, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, tools: Sequence[dict[str, Any]] = ()
) -> str | None:
    """Returns the cache key of the prompts; None if there are few, or if the tokenizer's behaviour cannot be determined."""
    if len(rows.rows) < CACHED_ROWS or not tokenizer.is_fast:
        return None
    settings = ("columns", "chat", "system", "template_args", "overlong", "limit")
    return cache_key(
        {
            "rows": [rows.kind, rows.fingerprint, [name.lower().rpartition(".")[2] for name in rows.files]],
            "hub": [data.source, data.subset, data.split] if rows.kind == "hub" else [],
            "settings": data.model_dump(mode="json", include=set(settings)),
            "max_prompt_tokens": limit.tokens,
            "tokenizer": tokenizer_facts(tokenizer),
            **({"tools": tools} if tools else {}),
        }
    )


def tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns everything that decides the output of a fast tokenizer and its chat template, except the code of the libraries."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    for set_by_each_call in ("truncation", "padding"):
        core.pop(set_by_each_call)
    dated = "strftime_now" in str(tokenizer.chat_template)
    return {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "core": hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": tokenizer.split_special_tokens,
        "date": date.today().isoformat() if dated else None,
    }


@dataclass(slots=True, kw_only=True, eq=False)
class PromptWriter:
    """Writes the prompts of all rows that are used, and gathers counts and digests on the way."""

    data: DataRecipe
    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    limit: PromptLimit
    tools: Sequence[dict[str, Any]]  # schemas that the chat template shows to the model
    images: Placeholder | None  # how images stand in prompts; None: prompts have none
    usual: Sequence[str] = ()  # kinds of answers that most rows have
    counts: Counter[str] = field(default_factory=Counter)
    chats: int = 0
    longest: int = 0  # tokens of a prompt that is used
    over_long: list[int] = field(default_factory=list)  # fewest and most tokens of the prompts that are too long
    seen: set[bytes] = field(default_factory=set)  # digests of the ids of each prompt
    digest: Any = field(default_factory=hashlib.sha256)  # of the ids of all prompts

    def all(self, write: Write) -> dict[str, Any]:
        """Writes the prompts, and returns what is known of them. Raises DataError for an invalid one, or one that is too long."""
        columns, rows = self.data.columns, self.rows
        named = [columns.prompt, *([] if columns.answer is None else [columns.answer])]
        if columns.answer is not None:
            self.usual = usual_kinds(value for _, (batch,) in rows.batches([columns.answer]) for value in batch)
        pictured = [] if self.images is None or columns.images is None else [columns.images]
        for indices, values in rows.batches([*pictured, *named], IMAGE_ROWS if pictured else BATCH):
            pictures = values.pop(0) if pictured else [None] * len(indices)
            write(self.batch([*self.templated(indices, pictures, values)]))
        names = ("empty", "no_answer", "odd_answer", "over_long", "duplicates", "used")
        return {
            "counts": {"read": len(rows.rows), **{name: self.counts[name] for name in names}},
            "chats": self.chats,
            "usual": self.usual,
            "longest": self.longest,
            "over_long": self.over_long,
            "prompt_ids": self.digest.hexdigest()[:16],
        }

    def templated(self, indices: range, pictures: Sequence[Any], values: Sequence[Sequence[Any]]) -> Iterator[Templated]:
        """Yields the rows of a batch that have a prompt and an answer, as texts; counts the others. `values`: of the prompt
        column, and of the answer column if there is one.
        """
        for row, pictured, prompt, *answer in zip(indices, pictures, *values, strict=True):
            if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
                self.counts["empty"] += 1
                continue
            if answer and (kind := kind_of(answer[0])) not in self.usual:
                self.counts["no_answer" if kind is None else "odd_answer"] += 1
                continue
            where = place(self.rows.source, row)
            messages = as_messages(prompt, self.data, where)
            seen: tuple[tuple[str, tuple[int, ...]], ...] = ()
            if self.images is not None:
                read = enumerate(encoded(pictured, self.rows, where))
                seen = tuple(seen_as(image, self.images, f"{where}: image {at}") for at, image in read)
                messages = with_parts(messages, len(seen), where)
            text = prompt if messages is None else self.render(messages, where)
            if self.images is not None:
                check_text(text, messages, len(seen), self.images.token, where)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"{error.object[error.start]!a}, half of a character"
                raise DataError(f"{where}: the prompt holds {half}; correct the data") from error
            yield Templated(row, text, messages, seen)

    def render(self, messages: list[dict[str, Any]], where: str) -> str:
        """Returns the text of a chat up to the start of the assistant's turn. Raises DataError if the template refuses it."""
        if not self.tokenizer.chat_template:
            raise DataError(
                "data.chat: the tokenizer of model.path has no chat template; take an instruction-tuned model, or use texts as"
                " prompts, with `chat: false` and no `system`"
            )
        try:
            return str(self.chat(messages, tokenize=False))
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(f"{where}: the chat template refuses {str(messages)[:200]}: {error}") from error

    def check_chat_ids(self, messages: list[dict[str, Any]], ids: Sequence[int]) -> None:
        """Raises DataError if the tokenizer gives the messages other ids than it gives the text of their template."""
        if tuple(self.chat(messages, tokenize=True)) != tuple(ids):
            raise DataError(
                f"data.chat: {type(self.tokenizer).__name__} tokenises a chat differently from its template's text, so the text"
                " would not be what the model sees; take the fast tokenizer of the model"
            )

    def chat(self, messages: list[dict[str, Any]], tokenize: bool) -> Any:
        """Returns text or ids of a chat. The template shows `tools` to the model."""
        settings: dict[str, Any] = {"tools": list(self.tools) or None, "add_generation_prompt": True, "return_dict": False}
        return self.tokenizer.apply_chat_template(messages, tokenize=tokenize, **(settings | self.data.template_args))

    def batch(self, templated: Sequence[Templated]) -> pyarrow.RecordBatch:
        """Tokenises the texts of a batch, checks the first chats with `check_chat_ids`, and returns the prompts that fit."""
        kept: list[tuple[Templated, list[int], list[Image]]] = []
        for entry, ids in zip(templated, tokenize(self.tokenizer, templated), strict=True):
            if entry.messages is not None:
                self.chats += 1
                if self.chats <= CHATS_COMPARED:
                    self.check_chat_ids(entry.messages, ids)
            where = place(self.rows.source, entry.row)
            images: list[Image] = []
            if self.images is not None:
                ids, images = expanded(ids, entry.images, self.images.token_id, where)
            if self.limit.tokens is None or len(ids) <= self.limit.tokens:
                kept.append((entry, ids, images))
                self.longest = max(self.longest, len(ids))
            elif self.data.overlong == "error":
                raise DataError(f"{where}: {len(ids)} tokens, but {self.limit.why}; raise it, or set data.overlong to filter")
            else:
                self.over_long = [min([len(ids), *self.over_long]), max([len(ids), *self.over_long])]
        lengths = numpy.array([len(ids) for _, ids, _ in kept], dtype=numpy.int64)
        flat = numpy.fromiter(chain.from_iterable(ids for _, ids, _ in kept), dtype=numpy.int32, count=int(lengths.sum()))
        ends = numpy.cumsum(lengths)
        starts = ends - lengths
        for start, end, (_, _, images) in zip(starts.tolist(), ends.tolist(), kept, strict=True):
            pictures = "".join(image.sha256 for image in images).encode()
            self.seen.add(hashlib.blake2b(flat[start:end].tobytes() + pictures, digest_size=16).digest())
            self.digest.update(pictures)
        # Each prompt's length before its ids, as 64-bit integers: runs that are resumed compare this digest.
        self.digest.update(numpy.insert(flat.astype(numpy.int64), starts, lengths).tobytes())
        self.counts.update(over_long=len(templated) - len(kept), used=len(kept))
        self.counts["duplicates"] = self.counts["used"] - len(self.seen)
        placed = [[{"sha256": one.sha256, "start": one.start, "stop": one.stop} for one in images] for _, _, images in kept]
        columns = {
            "row": pyarrow.array([entry.row for entry, _, _ in kept], pyarrow.int32()),
            "text": pyarrow.array([entry.text for entry, _, _ in kept], pyarrow.large_string()),
            "ids": pyarrow.LargeListArray.from_arrays(numpy.concatenate([[0], ends]), flat),
            "images": pyarrow.array(placed, IMAGES),
        }
        return pyarrow.record_batch(columns, schema=PROMPTS)


def seen_as(image: Encoded, placeholder: Placeholder, where: str) -> tuple[str, tuple[int, ...]]:
    """Returns digest and ids of an image. Raises DataError if it cannot be opened."""
    try:
        return image.sha256, placeholder.ids(image.data)
    except DataError as error:
        raise DataError(f"{where}{f' ({image.path})' if image.path else ''}: {error}") from error


def place(source: str, row: int) -> str:
    """Returns the name of a row in messages: its source and index."""
    return f"data.source: {source}, row {row}"


def tokenize(tokenizer: PreTrainedTokenizerBase, templated: Sequence[Templated]) -> list[list[int]]:
    """Returns the ids of each text. Adds no special tokens to chats, because the template has written them already."""
    every: list[list[int]] = [[] for _ in templated]
    for of_chats in (False, True):
        chosen = [index for index, entry in enumerate(templated) if (entry.messages is not None) == of_chats]
        if not chosen:
            continue
        # Not verbose: a prompt beyond the model's context is counted, not warned about.
        ids = tokenizer(
            [templated[index].text for index in chosen],
            add_special_tokens=not of_chats,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for index, own in zip(chosen, ids, strict=True):
            every[index] = own
    return every


def usual_kinds(answers: Iterable[Any]) -> list[str]:
    """Returns the kinds of answer that most rows have or that are accepted beside them; an empty list if there is no answer."""
    kinds = Counter(map(kind_of, answers))
    del kinds[None]
    if not kinds:
        return []
    texts = kinds[A_TEXT] + kinds[A_FINAL_TEXT]
    if texts > kinds.total() / 2:
        return [A_FINAL_TEXT] if kinds[A_FINAL_TEXT] >= MOST * texts else [A_TEXT, A_FINAL_TEXT]
    return [str(kinds.most_common(1)[0][0])]


def kind_of(answer: Any) -> str | None:
    """Returns in words how an answer is written, such as "a number"; None if it is empty or NaN."""
    if answer is None or (isinstance(answer, str) and not answer.strip()) or answer != answer:  # NaN is a table's missing value
        return None
    if isinstance(answer, str):
        return A_FINAL_TEXT if FINAL.search(answer[-200:]) else A_TEXT
    if isinstance(answer, bool):
        return "true or false"
    if isinstance(answer, int | float):
        return "a number"
    return "a list" if isinstance(answer, Sequence) else f"a {type(answer).__name__}"
