"""Turns rows into tokens, in batches. Only this module applies the chat template and tokenises prompts, once for each row."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from typing import Any

import numpy
import pyarrow
from transformers import PreTrainedTokenizerBase

from rlgen.data.answers import kind_of, usual_kinds
from rlgen.data.cache import BATCH, Write, key_of
from rlgen.data.chats import as_messages, compare, render
from rlgen.data.images import Encoded, Placeholder, check_text, encoded, expanded, with_parts
from rlgen.data.source import Rows
from rlgen.errors import DataError
from rlgen.recipe.models import DataRecipe
from rlgen.recipe.sizes import PromptLimit
from rlgen.types import Image

# Columns of a prompt: the index of its row in the data set, the text that the model sees, and its ids.
PROMPTS = pyarrow.schema(
    [("row", pyarrow.int32()), ("text", pyarrow.large_string()), ("ids", pyarrow.large_list(pyarrow.int32()))]
)
# The same with images: each one's digest, and the range of its ids.
IMAGE = pyarrow.struct([("sha256", pyarrow.string()), ("start", pyarrow.int32()), ("stop", pyarrow.int32())])
WITH_IMAGES = PROMPTS.append(pyarrow.field("images", pyarrow.large_list(IMAGE)))
IMAGE_ROWS = 32  # rows whose images are in memory at a time
CACHED_ROWS = 2000  # rows from which on the prompts of a data set are cached
CHATS_COMPARED = 8


@dataclass(frozen=True, slots=True)
class Templated:
    """A row before it is tokenised: Templated(row=3, text="<|im_start|>user\\nsort 312...", messages=[{"role": "user", ...}])"""

    row: int
    text: str
    messages: list[dict[str, Any]] | None  # None: the prompt is a text, used as it is
    images: tuple[tuple[str, tuple[int, ...]], ...] = ()  # SHA-256 and ids of each image


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and digests gathered over all rows."""

    counts: dict[str, int]
    chats: int = 0
    longest: int = 0  # tokens of a prompt that is used
    over_long: list[int] = field(default_factory=list)  # fewest and most tokens of the prompts that are too long
    seen: set[bytes] = field(default_factory=set)  # digests of the ids of each prompt
    digest: Any = field(default_factory=hashlib.sha256)  # of the ids of all prompts


def prompts_key(
    data: DataRecipe, rows: Rows, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, tools: Sequence[dict[str, Any]] = ()
) -> str | None:
    """Returns the cache key of the prompts; None if there are few, or if the tokenizer's behaviour cannot be determined."""
    if len(rows.rows) < CACHED_ROWS or not tokenizer.is_fast:
        return None
    settings = ("columns", "chat", "system", "template_args", "overlong", "limit")
    return key_of(
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


def write_prompts(
    data: DataRecipe,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    limit: PromptLimit,
    tools: Sequence[dict[str, Any]],
    images: Placeholder | None,
    write: Write,
) -> dict[str, Any]:
    """Writes the prompts of all rows that are used, and returns counts and digest of the rows.

    Args:
        tools: schemas that the chat template shows to the model.
        images: how images stand in prompts; None: prompts have none.

    Raises:
        DataError: a row is not a valid prompt, or a prompt is too long and the recipe refuses those.
    """
    answer = data.columns.answer
    usual = [] if answer is None else usual_kinds(value for _, (batch,) in rows.batches([answer]) for value in batch)
    names = ("empty", "no_answer", "odd_answer", "over_long", "duplicates", "used")
    tally = Tally(counts={"read": len(rows.rows), **dict.fromkeys(names, 0)})
    columns = [data.columns.prompt, *([] if answer is None else [answer])]
    with_images = [] if images is None or data.columns.images is None else [data.columns.images]
    for indices, values in rows.batches([*with_images, *columns], IMAGE_ROWS if with_images else BATCH):
        own = values.pop(0) if with_images else [None] * len(indices)
        templated = list(template(data, rows, tokenizer, indices, values, usual, tools, images, own, tally))
        write_batch(data, rows.source, tokenizer, templated, tools, images, tally, limit, write)
    return {
        "counts": tally.counts,
        "chats": tally.chats,
        "usual": usual,
        "longest": tally.longest,
        "over_long": tally.over_long,
        "prompt_ids": tally.digest.hexdigest()[:16],
    }


def template(
    data: DataRecipe,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    indices: range,
    values: Sequence[Sequence[Any]],
    usual: Sequence[str],
    tools: Sequence[dict[str, Any]],
    images: Placeholder | None,
    values_of_images: Sequence[Any],
    tally: Tally,
) -> Iterator[Templated]:
    """Yields the rows of a batch that have a prompt and an answer, as texts; counts the others.

    Args:
        values: of the prompt column, and of the answer column if there is one.
        values_of_images: of the column of images.

    Raises:
        DataError: a prompt is invalid, or cannot be encoded as UTF-8.
    """
    for row, pictures, prompt, *answer in zip(indices, values_of_images, *values, strict=True):
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            tally.counts["empty"] += 1
            continue
        if answer and (kind := kind_of(answer[0])) not in usual:
            tally.counts["no_answer" if kind is None else "odd_answer"] += 1
            continue
        where = place(rows.source, row)
        messages = as_messages(prompt, data, where)
        seen: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if images is not None:
            seen = tuple(
                seen_as(image, images, f"{where}: image {at}") for at, image in enumerate(encoded(pictures, rows, where))
            )
            messages = with_parts(messages, len(seen), where)
        text = prompt if messages is None else render(tokenizer, messages, data, where, tools)
        if images is not None:
            check_text(text, messages, len(seen), images.token, where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: the prompt holds {error.object[error.start]!a}, half of a character; correct the data"
            ) from error
        yield Templated(row, text, messages, seen)


def seen_as(image: Encoded, placeholder: Placeholder, where: str) -> tuple[str, tuple[int, ...]]:
    """Returns digest and ids of an image. Raises DataError if it cannot be opened."""
    try:
        return image.sha256, placeholder.ids(image.data)
    except DataError as error:
        raise DataError(f"{where}{f' ({image.path})' if image.path else ''}: {error}") from error


def place(source: str, row: int) -> str:
    """Returns the name of a row in messages: its source and index."""
    return f"data.source: {source}, row {row}"


def write_batch(
    data: DataRecipe,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    templated: Sequence[Templated],
    tools: Sequence[dict[str, Any]],
    images: Placeholder | None,
    tally: Tally,
    limit: PromptLimit,
    write: Write,
) -> None:
    """Tokenises the texts of a batch, checks the first chats with `compare`, counts, and writes the prompts that fit.

    Raises:
        DataError: a prompt is too long and the recipe refuses those, or `compare` finds a difference.
    """
    every = tokenize(tokenizer, templated)
    kept: list[tuple[Templated, list[int]]] = []
    placed: list[list[dict[str, Any]]] = []
    for entry, ids in zip(templated, every, strict=True):
        if entry.messages is not None:
            tally.chats += 1
            if tally.chats <= CHATS_COMPARED:
                compare(tokenizer, entry.messages, ids, data, tools)
        own: list[Image] = []
        if images is not None:
            ids, own = expanded(ids, entry.images, images.token_id, place(source, entry.row))
        if limit.tokens is None or len(ids) <= limit.tokens:
            kept.append((entry, ids))
            placed.append([{"sha256": image.sha256, "start": image.start, "stop": image.stop} for image in own])
            tally.longest = max(tally.longest, len(ids))
        elif data.overlong == "error":
            raise DataError(
                f"{place(source, entry.row)}: {len(ids)} tokens, but {limit.why}; raise it, or set data.overlong to filter"
            )
        else:
            tally.over_long = [min([len(ids), *tally.over_long]), max([len(ids), *tally.over_long])]
    tally.counts["over_long"] += len(templated) - len(kept)
    tally.counts["used"] += len(kept)
    lengths = numpy.array([len(ids) for _, ids in kept], dtype=numpy.int64)
    flat = numpy.fromiter(chain.from_iterable(ids for _, ids in kept), dtype=numpy.int32, count=int(lengths.sum()))
    ends = numpy.cumsum(lengths)
    starts = ends - lengths
    for start, end, own_images in zip(starts.tolist(), ends.tolist(), placed, strict=True):
        pictures = "".join(image["sha256"] for image in own_images).encode()
        tally.seen.add(hashlib.blake2b(flat[start:end].tobytes() + pictures, digest_size=16).digest())
        tally.digest.update(pictures)
    tally.counts["duplicates"] = tally.counts["used"] - len(tally.seen)
    # Each prompt's length before its ids, as 64-bit integers: runs that are resumed compare this digest.
    tally.digest.update(numpy.insert(flat.astype(numpy.int64), starts, lengths).tobytes())
    columns = [
        pyarrow.array([entry.row for entry, _ in kept], pyarrow.int32()),
        pyarrow.array([entry.text for entry, _ in kept], pyarrow.large_string()),
        pyarrow.LargeListArray.from_arrays(numpy.concatenate([[0], ends]), flat),
    ]
    if images is not None:
        write(pyarrow.record_batch([*columns, pyarrow.array(placed, WITH_IMAGES.field("images").type)], schema=WITH_IMAGES))
    else:
        write(pyarrow.record_batch(columns, schema=PROMPTS))


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
