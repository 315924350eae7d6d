"""Asks an environment once for each row what the model reads first, before prompts are templated and tokenised.

So the completions of one prompt begin alike, in the same state, and can be compared.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pyarrow

from rlgen.data.source import Rows, TextRows
from rlgen.errors import RlgenError, ToolError
from rlgen.recipe.models import SEED_COLUMN
from rlgen.tools.arena import EnvPool
from rlgen.tools.box import Answered
from rlgen.worker_pool.failures import Failed

BEFORE = "before_reset"  # column of the data's own prompts, where the environment has replaced them
AT_ONCE = 1000  # rows


def observed(rows: Rows, column: str, arena: EnvPool) -> Rows:
    """Returns the rows with a column `seed` and with new prompts: what `reset` returned replaces a row's prompt, or the text of
    its last message. Where `reset` returned None, the prompt stays.

    Raises ToolError if the environment fails for a row, or what it returns cannot be read.

    Args:
        column: of prompts.
    """
    texts: list[str] = []
    replaced = False
    for start in range(0, len(rows.rows), AT_ONCE):
        some = rows.at(range(start, min(start + AT_ONCE, len(rows.rows))))
        given = [{SEED_COLUMN: seed_of(start + place), **row} for place, row in enumerate(some)]
        firsts = every([begin_of(row, column) for row in given], arena.first)
        for place, (row, first) in enumerate(zip(given, firsts, strict=True), start):
            if isinstance(first, Failed):
                raise ToolError(f"environment: it fails for row {place} of {rows.source}: {first.cause}: {first.message}")
            if (text := first["text"]) is not None:
                if first["characters"] > len(text):
                    raise ToolError("environment: reset returned a text longer than environment.max_output_tokens; raise that")
                own = row[column]
                new = text if isinstance(own, str) else [*own[:-1], {**own[-1], "content": text}]  # of a chat the last message
                row |= {BEFORE: own, column: new}
                replaced = True
            texts.append(json.dumps(row, default=str))
    columns = (*rows.columns, *(() if SEED_COLUMN in rows.columns else (SEED_COLUMN,)), *((BEFORE,) if replaced else ()))
    digest = hashlib.sha256(json.dumps([rows.fingerprint, texts]).encode()).hexdigest()
    held = TextRows(pyarrow.chunked_array([pyarrow.array(texts, pyarrow.large_string())]), columns)
    return replace(rows, rows=held, columns=columns, fingerprint=digest)


def every(rows: Sequence[dict[str, Any]], ask: Callable[[dict[str, Any], Answered], None]) -> list[dict[str, Any] | Failed]:
    """Asks an arena about rows, all at once, and returns the answers. Raises RlgenError if it answers with one."""
    came: SimpleQueue[tuple[int, dict[str, Any] | Failed | RlgenError]] = SimpleQueue()
    for place, row in enumerate(rows):
        ask(row, lambda answer, place=place: came.put((place, answer)))  # type: ignore[misc]
    found: dict[int, dict[str, Any] | Failed] = {}
    for _ in rows:
        place, answer = came.get()
        if isinstance(answer, RlgenError):
            raise answer
        found[place] = answer
    return [found[place] for place in range(len(rows))]


def begin_of(columns: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Returns what `reset` may take by name: the columns of a row, its own prompt as `prompt`, and `seed`."""
    own = columns.get(BEFORE)
    return {**columns, "prompt": columns[column] if own is None else own}


def first_of(columns: Mapping[str, Any], column: str) -> str | None:
    """Returns what `reset` returned for a row when its prompt was made."""
    if columns.get(BEFORE) is None:
        return None
    prompt = columns[column]
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def seed_of(row: int) -> int:
    """Returns a seed of 31 bits from the index of a row, so that it is the same in each run."""
    return int.from_bytes(hashlib.sha256(f"environment/{row}".encode()).digest()[:4]) >> 1
