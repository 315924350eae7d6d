"""An endless stream of prompts, from rows that were templated and tokenised once."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from rlgen.data.cache import cached
from rlgen.data.chats import as_messages
from rlgen.data.images import Encoded, Placeholder, encoded, with_parts
from rlgen.data.source import Rows
from rlgen.data.tokens import PROMPTS, PromptWriter, place, prompts_key
from rlgen.errors import DataError
from rlgen.recipe.data import DataRecipe
from rlgen.recipe.sizes import PromptLimit
from rlgen.types import Image, Prompt

# Files may have a few rows without an answer, which are skipped; a larger share is a mistake.
MAX_NO_ANSWER = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptStream:
    """An endless order of prompts, in which one integer, the position, determines the prompt.

    Position p is in epoch p // n, at index p % n of that epoch's order, which follows from (seed, epoch). Texts, ids and columns
    stay in Arrow tables, which all processes of a machine share; a prompt is read when it is requested.
    """

    table: pyarrow.Table  # of `tokens.PROMPTS`: the rows that are used
    rows: Rows
    data: DataRecipe  # how a row becomes a prompt
    longest: int  # tokens of the longest prompt
    too_long: str  # about the prompts that are too long; "" if there is none
    chats: int  # prompts that went through the chat template
    counts: Mapping[str, int]  # rows that were read, that were left out (by reason) and that are used; duplicates among these
    digest: str  # of the ids of all prompts, which changes when tokenizer, template or data change
    seed: int

    def __len__(self) -> int:
        return len(self.table)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Returns the prompts at positions `start` to `start + count - 1`: take(0, 2) + take(2, 3) == take(0, 5)."""
        own = self.data.columns
        places = [self.place(position) for position in range(start, start + count)]
        numbers, texts, ids = (self.table.column(name) for name in ("row", "text", "ids"))
        prompts = []
        rows = self.rows.at([numbers[row].as_py() for row in places])
        for position, (row, columns) in enumerate(zip(places, rows, strict=True), start):
            where = place(self.rows.source, row)
            messages, for_rewards = as_messages(columns[own.prompt], self.data, where), with_answer(columns, own.answer)
            images: tuple[Image, ...] = ()
            if own.images is not None:
                read = encoded(columns[own.images], self.rows, where)
                messages, images = with_parts(messages, len(read), where), self.images(row, read, where)
                for_rewards[own.images] = [image.reference for image in read]
            prompts.append(
                Prompt(
                    position=position,
                    row=row,
                    text=texts[row].as_py(),
                    prompt_ids=ids[row].values.to_numpy().copy(),  # a copy, because the mapped bytes are read-only
                    columns=for_rewards,
                    messages=messages,
                    images=images,
                )
            )
        return prompts

    def images(self, row: int, images: Sequence[Encoded], where: str) -> tuple[Image, ...]:
        """Returns the images of a row of the table with their places. Raises DataError if one has changed meanwhile."""
        placed = self.table.column("images")[row].as_py()
        if [one["sha256"] for one in placed] != [image.sha256 for image in images]:
            named = ", ".join(image.path or image.sha256 for image in images)
            raise DataError(f"{where}: {named} changed during the run; restore it, and resume")
        return tuple(Image(data=image.data, **one) for one, image in zip(placed, images, strict=True))

    def at(self, position: int) -> Prompt:
        return self.take(position, 1)[0]

    def place(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        return order(self.seed, epoch, len(self))[place] if self.data.shuffle else place


# Two entries, because a step may span two epochs; shuffling a million rows takes half a second.
@lru_cache(maxsize=2)
def order(seed: int, epoch: int, count: int) -> "array[int]":
    """Returns the rows of an epoch, shuffled, each once."""
    rows = array("i", range(count))
    Random(f"{seed}/{epoch}").shuffle(rows)
    return rows


def build_prompts(
    data: DataRecipe,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    limit: PromptLimit | None = None,
    tools: Sequence[dict[str, Any]] = (),
    images: Placeholder | None = None,
) -> PromptStream:
    """Templates and tokenises every row, or takes the result from the cache. Skips and counts rows without a prompt or an answer.

    Args:
        limit: on the tokens of a prompt; None: `data.max_prompt_tokens`.
        tools: schemas that the chat template shows to the model.
        images: how images stand in prompts; None: prompts have none.

    Raises:
        DataError: a row is no valid prompt, a prompt is too long, too many rows have no answer, or no row is left.
        SetupError: the cache is not writable.
    """
    limit = limit or PromptLimit(data.max_prompt_tokens, f"data.max_prompt_tokens is {data.max_prompt_tokens}")
    # With images there is no key: their files may change although those of the rows do not.
    key = prompts_key(data, rows, tokenizer, limit, tools) if images is None else None
    writer = PromptWriter(data=data, rows=rows, tokenizer=tokenizer, limit=limit, tools=tools, images=images)
    made = cached("prompts", key, PROMPTS, writer.all)
    counts, lengths = made.facts["counts"], too_long(made.facts["over_long"], limit)
    refuse(data, rows, counts, made.facts["chats"], made.facts["usual"])
    if not counts["used"]:
        raise DataError(f"data.source: {rows.source}: no row is left: {listed(counts)}{lengths}")
    return PromptStream(
        table=made.table,
        rows=rows,
        data=data,
        longest=made.facts["longest"],
        too_long=lengths,
        chats=made.facts["chats"],
        counts=counts,
        digest=made.facts["prompt_ids"],
        seed=seed,
    )


def refuse(data: DataRecipe, rows: Rows, counts: Mapping[str, int], chats: int, usual: Sequence[str]) -> None:
    """Raises DataError if the remaining rows cannot be what the user meant, such as with too many odd or missing answers."""
    if counts["no_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {rows.source}: `{data.columns.answer}` is empty in {counts['no_answer']} of"
            f" {counts['read']} rows; name another column, or complete the data"
        )
    if counts["odd_answer"] > MAX_NO_ANSWER * counts["read"]:
        raise DataError(
            f"data.columns.answer: {rows.source}: `{data.columns.answer}` is {usual[0]} in most rows, but not in"
            f" {counts['odd_answer']} of {counts['read']}; make all answers alike, or remove those rows"
        )
    if data.template_args and counts["used"] and not chats:
        raise DataError("data.template_args: no prompt is a chat, so they do nothing; remove them, or set data.chat")


def too_long(over_long: Sequence[int], limit: PromptLimit) -> str:
    """Returns how long the prompts are that are too long, and what to do; an empty text if there is none."""
    if not over_long:
        return ""
    fewest, most = over_long
    lengths = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"; the prompts that are too long have {lengths} tokens, and {limit.why}: raise that, or shorten them"


def warnings_of(data: DataRecipe, prompts: PromptStream, has_template: bool) -> list[str]:
    """Returns what may be wrong with prompts that can be used: rows that were left out, equal prompts, an unused template."""
    counts, said = prompts.counts, []
    if counts["over_long"]:
        said.append(f"{counts['over_long']} of {counts['read']} rows are left out{prompts.too_long}")
    for name, why in (("empty", "have no prompt"), ("no_answer", "have no answer"), ("odd_answer", "have an odd answer")):
        if counts[name]:
            said.append(f"{counts[name]} of {counts['read']} rows are left out: they {why}")
    if counts["duplicates"]:
        said.append(f"{counts['duplicates']} of {counts['used']} prompts are the same as an earlier one")
    if has_template and not prompts.chats and "chat" not in data.model_fields_set:
        said.append(
            "model.path has a chat template, but prompts are texts and are used as they are; set data.chat to true, or to false"
            " to keep this"
        )
    return said


def overlap(prompts: PromptStream, others: PromptStream) -> int:
    """Returns how many of the prompts are among the others, too, compared by the text that the model sees."""
    if prompts.data.columns.images is None and others.data.columns.images is None:
        own, theirs = (stream.table.column("text") for stream in (prompts, others))
        return int(pyarrow.compute.sum(pyarrow.compute.is_in(own, value_set=theirs.combine_chunks())).as_py() or 0)
    known = set(seen_by_model(others))
    return sum(one in known for one in seen_by_model(prompts))


def seen_by_model(prompts: PromptStream) -> list[tuple[str, ...]]:
    """Returns for each prompt its text and the digests of its images."""
    rows = prompts.table.select(["text", "images"]).to_pylist()
    return [(row["text"], *(image["sha256"] for image in row["images"])) for row in rows]


def listed(counts: Mapping[str, int]) -> str:
    """Returns the counts as text: "100 read, 0 empty, ... 98 used"."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def with_answer(row: Mapping[str, Any], answer: str | None) -> dict[str, Any]:
    """Returns the row's columns for rewards, under their own names, and the answer also under `answer`."""
    return dict(row) if answer is None else {**row, "answer": row[answer]}
