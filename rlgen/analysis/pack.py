"""Packs rollouts for the report: a table of all rows, and chunks of texts and tokens that a browser unpacks when it shows them.

Log-probs are 16-bit floats whose last two bits are rounded away: exact to 0.25 %. What is stored is the engine's log-prob and the
difference to the trainer's, so that a difference of 1e-6 is as exact. Ids are places in a list of the tokens that occur, most
frequent first. Bytes of equal significance stand together, so that gzip finds repetitions.
"""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlgen.analysis.run import Run
from rlgen.analysis.weights import weights_of
from rlgen.rollout.parquet import FIXED, OF_TURNS, has_turns, parts_of
from rlgen.rollout.read import metadata_of, read_rollouts, rollout_steps
from rlgen.types import Ragged

MOST_TOKENS = 2_100_000  # completion tokens in one report, which keep it below 20 MB
CHUNK_ROWS, CHUNK_TOKENS = 1000, 200_000  # a chunk ends after the step that exceeds one of them
SCALE = 256  # of log-probs: small differences would lose digits as 16-bit floats
DIGITS = 6  # significant digits of the numbers of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The rollouts of a report. All texts are base64 of gzip."""

    facts: Mapping[str, Any]  # what the browser needs to read the rest
    parts: Mapping[str, str]  # by name: "rows", "pieces", "texts-0", "tokens-0", ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The steps whose rollouts are in the report, and how many steps and rollouts the run has."""

    steps: Sequence[int]
    total_steps: int
    total_rows: int


def choose(run: Path, most_rows: int) -> Choice:
    """Returns the newest step and every n-th before it, with the smallest n that keeps to `most_rows` and `MOST_TOKENS`."""
    steps = rollout_steps(run / "rollouts")
    sizes = [size_of(run / "rollouts" / f"step_{step:06d}.parquet") for step in steps]
    for every in range(1, len(steps) + 1):
        chosen = range(len(steps) - 1, -1, -every)
        rows, tokens = (sum(sizes[place][of] for place in chosen) for of in (0, 1))
        if rows <= most_rows and tokens <= MOST_TOKENS:
            break
    return Choice([steps[place] for place in chosen][::-1] if steps else [], len(steps), sum(rows for rows, _ in sizes))


def size_of(path: Path) -> tuple[int, int]:
    """Returns the rows and the completion tokens of a step, from the metadata of its files.

    Raises:
        CheckpointError: a file is damaged.
    """
    rows, tokens = 0, 0
    for part in parts_of(path):
        found = metadata_of(part)
        column = next(place for place in range(found.num_columns) if found.schema.column(place).path.startswith("completion_ids"))
        rows += found.num_rows
        tokens += sum(found.row_group(place).column(column).num_values for place in range(found.num_row_groups))
    return rows, tokens


def pack(run: Run, most_rows: int) -> tuple[Packed, list[int]]:
    """Packs the rollouts of a run.

    Returns:
        The rollouts, and the token ids that occur in them, in the order of `pieces`.
    """
    choice = choose(run.path, most_rows)
    rows: dict[str, list[Any]] = {}
    chunks: list[Chunk] = []
    shown = 0
    for tables in chunked(run.path, choice.steps, most_rows):
        chunk = Chunk.of(run, tables)
        for name, values in chunk.rows.items():
            rows.setdefault(name, []).extend(values)
        chunks.append(chunk)
        shown += len(tables)
    ids, counts = np.unique(np.concatenate([chunk.ids for chunk in chunks] or [np.zeros(0, np.int32)]), return_counts=True)
    by_frequency = np.argsort(-counts, kind="stable")
    rank = np.empty(len(ids), np.uint32)
    rank[by_frequency] = np.arange(len(ids), dtype=np.uint32)
    parts = {"rows": packed_json(rows)}
    for place, chunk in enumerate(chunks):
        parts[f"texts-{place}"] = packed_json(chunk.texts)
        parts[f"tokens-{place}"] = packed(
            planes([rank[np.searchsorted(ids, chunk.ids)], chunk.sampler, chunk.delta, chunk.flags])
        )
    correction = run.recipe.trainer.correction
    facts = {
        "count": shown,
        "total": choice.total_rows,
        "steps": len(choice.steps),
        "totalSteps": choice.total_steps,
        "chunks": [len(chunk.rows["step"]) for chunk in chunks],
        "low": correction.min,
        "high": correction.max,
        "rewards": sorted({label for chunk in chunks for label in chunk.labels}),
    }
    return Packed(facts=facts, parts=parts), ids[by_frequency].tolist()


def chunked(run: Path, steps: Sequence[int], most_rows: int) -> Iterator[pa.Table]:
    """Yields the rollouts of some steps as tables of about `CHUNK_ROWS`, whole steps each.

    A step of more than `most_rows` or `MOST_TOKENS`, which then is the only one, is cut.
    """
    waiting: list[pa.Table] = []
    tokens = 0
    for step in steps:
        table = read_rollouts(run, step)
        ends = np.cumsum(np.asarray(pc.list_value_length(table["completion_ids"])))
        table = table.slice(0, min(most_rows, max(1, int(ends.searchsorted(MOST_TOKENS, side="right")))))
        waiting.append(table)
        tokens += int(ends[-1]) if len(ends) else 0
        if sum(map(len, waiting)) >= CHUNK_ROWS or tokens >= CHUNK_TOKENS:
            yield pa.concat_tables(waiting, promote_options="permissive")
            waiting, tokens = [], 0
    if waiting:
        yield pa.concat_tables(waiting, promote_options="permissive")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Some rollouts, before they are packed."""

    labels: Sequence[str]  # names of the rewards
    rows: Mapping[str, list[Any]]
    texts: Mapping[str, Any]
    ids: NDArray[np.int32]  # [N]
    sampler: NDArray[np.float16]  # [N]
    delta: NDArray[np.float16]  # [N] trainer - engine; NaN where there is nothing to compare
    flags: NDArray[np.uint8]  # [N] mask + 2 * code of the weight

    @classmethod
    def of(cls, run: Run, table: pa.Table) -> "Chunk":
        ids, sampler, policy, mask = (
            ragged(table, name) for name in ("completion_ids", "sampler_logp", "policy_logp", "loss_mask")
        )
        lengths = ids.lengths
        delta = np.full(len(ids.values), np.nan, dtype=np.float32)
        compared = np.repeat(policy.lengths > 0, lengths)
        delta[compared] = policy.values - sampler.values[compared]
        weights = weights_of(run.recipe, policy, sampler, mask)
        gaps = np.array([np.nan if np.isnan(one).all() else np.nanmax(np.abs(one)) for one in Ragged(delta, ids.offsets)])
        single = table["rewards"].combine_chunks() if "rewards" in table.column_names else None
        labels = [] if single is None else [field.name for field in single.type]
        prompts, place = prompts_of(table)
        numbers = {name: table[name].to_numpy() for name in ("step", "group_id", "sample_index", "reward", "advantage")}
        rows = {name: [short(value) for value in np.asarray(values, float).tolist()] for name, values in numbers.items()}
        rows |= {
            f"reward/{name}": [short(value) for value in values.to_pylist()]
            for name, values in zip(labels, flat(single), strict=True)
        }
        return cls(
            labels=labels,
            rows={
                **rows,
                "length": lengths.tolist(),
                "truncated": [int(reason == "length") for reason in table["finish_reason"].to_pylist()],
                "trained": [int(value) for value in table["trained"].to_pylist()],
                "gap": [short(value) for value in gaps.tolist()],
                "weight": [short(value) for value in weights.rows.tolist()],
                "prompt": place,
            },
            texts={
                "prompts": prompts,
                "completions": table["completion"].to_pylist(),
                "messages": [json.loads(one) for one in table["messages"].to_pylist()] if has_turns(table.column_names) else None,
                "errors": {row: dict(errors) for row, errors in enumerate(table["reward_errors"].to_pylist()) if errors},
            },
            ids=ids.values,
            sampler=halves(sampler.values),
            delta=halves(delta),
            flags=mask.values.astype(np.uint8) + 2 * weights.codes,
        )


def flat(rewards: pa.StructArray | None) -> list[pa.Array]:
    return [] if rewards is None else rewards.flatten()


def ragged(table: pa.Table, name: str) -> Ragged:
    """Returns a column of lists; null is an empty row."""
    array = table[name].combine_chunks()
    lengths = np.asarray(array.value_lengths().fill_null(0), dtype=np.int64)
    return Ragged(array.flatten().to_numpy(zero_copy_only=False), np.append(0, np.cumsum(lengths)))


def prompts_of(table: pa.Table) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns each prompt once, with the data set's columns, and the place of each row's prompt."""
    own = FIXED | OF_TURNS if has_turns(table.column_names) else FIXED
    names = ["prompt", *(name for name in table.column_names if name not in own)]
    keys = list(zip(table["step"].to_pylist(), table["group_id"].to_pylist(), strict=True))
    first: dict[tuple[int, int], int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    places = {key: place for place, key in enumerate(first)}
    prompts = table.select(names).take(pa.array(list(first.values()), pa.int64())).to_pylist()
    return [{"text": one.pop("prompt"), "data": one} for one in prompts], [places[key] for key in keys]


def short(value: float | None) -> float | int | None:
    """Returns a number with `DIGITS` significant digits; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def halves(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Returns 16-bit floats of `SCALE` times the values, with eight bits of mantissa: what is rounded away would not compress.

    From 2e-7 to 255 nats they are exact to 0.25 %; beyond 255 they are 255.
    """
    within = np.where(np.isfinite(values), np.clip(values, -255, 255), values).astype(np.float32)
    bits = (within * np.float32(SCALE)).astype(np.float16).view(np.uint16)
    return ((bits + 2) & 0xFFFC).astype(np.uint16).view(np.float16)


def planes(columns: Iterable[NDArray[Any]]) -> bytes:
    """Returns the first bytes of all values of a column, then the second bytes, ...: equal ones stand together."""
    return b"".join(np.ascontiguousarray(column.view(np.uint8).reshape(len(column), -1).T).tobytes() for column in columns)


def packed_json(value: Any) -> str:
    """Returns a value as packed JSON. Lone surrogates and line separators are JSON escapes, so that any text survives."""
    return packed(json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str).encode())


def packed(content: bytes) -> str:
    """Returns the bytes as base64 of gzip, the same each time."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
