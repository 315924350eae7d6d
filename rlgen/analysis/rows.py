"""Finds rollouts of a run by step, reward, length, finish reason and text, and sorts them.

First it reads the few columns that decide, one step at a time, and afterwards the whole rows that are shown. So a run of any size
can be searched in the memory of one step.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlgen.errors import UsageError
from rlgen.rollout.parquet import OF_TURNS, has_turns
from rlgen.rollout.read import read_rollouts, rollout_steps

SORTS = ("step", "reward", "advantage", "length", "gap")
# The columns that a filter or an order reads, if it is not the one of its name.
READ = {
    "length": ("completion_ids",),
    "gap": ("sampler_logp", "policy_logp"),
    "finish": ("finish_reason",),
    "text": ("prompt", "completion", *sorted(OF_TURNS)),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included. Range.of("10:20", "--step") is Range(10, 20)"""

    low: float
    high: float

    @classmethod
    def of(cls, text: str, option: str) -> "Range":
        """Reads `12`, `10:20`, `10:` or `:20`. Raises UsageError for anything else."""
        first, colon, last = text.partition(":")
        try:
            low = float(int(first)) if first or not colon else -math.inf
            high = (float(int(last)) if last else math.inf) if colon else low
        except ValueError as error:
            raise UsageError(f"{option} {text}: give a number or a range, such as 12, 10:20, 10: or :20") from error
        if low > high:
            raise UsageError(f"{option} {text}: the range is empty; the lower number comes first")
        return cls(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which rollouts are requested, and in which order. None: any value."""

    steps: Range | None = None
    reward_below: float | None = None
    reward_above: float | None = None
    length: Range | None = None  # completion tokens
    finish: Literal["stop", "length"] | None = None
    text: str | None = None  # part of the prompt or the completion; case does not matter
    sort: str = "step"  # one of SORTS; "-reward": the highest first
    newest: bool = False  # only the newest step

    @property
    def order(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns that decide which rows match and in which order."""
        bounds = (self.reward_below, self.reward_above, self.length, self.finish, self.text)
        asked = zip(("reward", "reward", "length", "finish", "text"), bounds, strict=True)
        names = ["step", self.order, *(name for name, bound in asked if bound is not None)]
        return tuple(dict.fromkeys(column for name in names for column in READ.get(name, (name,))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The rows that match a query, in its order."""

    total: int  # rollouts that were searched
    step: NDArray[np.int64]  # [M]
    row: NDArray[np.int64]  # [M] place within the step

    def __len__(self) -> int:
        return len(self.step)


def find_rollouts(run: Path, query: Query) -> Found:
    """Returns the rows of a run that match. Raises UsageError for an unknown sort, or if the run has no rollouts or none of these
    steps, and CheckpointError if a file is damaged.
    """
    if query.order not in SORTS:
        raise UsageError(f"--sort {query.sort}: there is no such order; there are {', '.join(SORTS)}; -reward: highest first")
    steps = rollout_steps(run / "rollouts")
    if not steps:
        raise UsageError(f"{run} has no rollouts yet; rollouts.every in its recipe sets which steps are written")
    if query.newest:
        steps = steps[-1:]
    if query.steps is not None:
        there = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        steps = [step for step in steps if query.steps.low <= step <= query.steps.high]
        if not steps:
            raise UsageError(f"--step: {run} has rollouts of {there}, but none in this range")
    total, found = 0, [(np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    for step in steps:
        table = read_rollouts(run, step, query.columns)
        total += len(table)
        rows = matching(table, query).nonzero()[0]
        found.append((key_of(table, query.order)[rows], np.full(len(rows), step), rows))
    key, step_of, row = (np.concatenate(parts) for parts in zip(*found, strict=True))
    key = -key if query.sort.startswith("-") else key
    order = np.lexsort((row, step_of, np.where(np.isnan(key), np.inf, key)))  # rows without the value come last both ways
    return Found(total=total, step=step_of[order], row=row[order])


def matching(table: pa.Table, query: Query) -> NDArray[np.bool_]:
    """Returns [B], which rows of a step match. A row without a reward is neither below nor above anything."""
    keep = np.ones(len(table), dtype=bool)
    if query.reward_below is not None:
        keep &= numbers(table, "reward") < query.reward_below
    if query.reward_above is not None:
        keep &= numbers(table, "reward") > query.reward_above
    if query.length is not None:
        keep &= (query.length.low <= lengths(table)) & (lengths(table) <= query.length.high)
    if query.finish is not None:
        keep &= np.asarray(pc.equal(table["finish_reason"], query.finish))
    if query.text is not None:
        texts = [table["prompt"], table["completion"]]
        if has_turns(table.column_names):
            talks = map(json.loads, table["messages"].to_pylist())
            texts.append(pa.array(["\n".join(map(text_of_message, talk)) for talk in talks], pa.string()))
        has = [np.asarray(pc.match_substring(one, query.text, ignore_case=True)) for one in texts]
        keep &= np.logical_or.reduce(has)
    return keep


def key_of(table: pa.Table, order: str) -> NDArray[np.float64]:
    """Returns [B], the values by which rows are sorted; NaN where a row has none."""
    if order == "length":
        return lengths(table).astype(np.float64)
    if order == "gap":
        gaps = [gap(one, other) for one, other in zip(*(table[name].to_pylist() for name in READ["gap"]), strict=True)]
        return np.array([math.nan if value is None else value for value in gaps], dtype=np.float64)
    return numbers(table, order)


def numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Returns [B], a column of numbers; NaN for null."""
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def lengths(table: pa.Table) -> NDArray[np.int64]:
    """Returns [B], the number of tokens of each completion."""
    return np.asarray(pc.list_value_length(table["completion_ids"]), dtype=np.int64)


def gap(sampler_logp: Sequence[float], policy_logp: Sequence[float] | None) -> float | None:
    """Returns the largest difference of engine and trainer at a token of one completion; None if there is none to compare."""
    pairs = zip(sampler_logp, policy_logp or (), strict=False)
    return max((abs(one - other) for one, other in pairs if math.isfinite(one) and math.isfinite(other)), default=None)


def read_rows(run: Path, found: Found, places: slice) -> list[dict[str, Any]]:
    """Returns some of the rows that were found, whole, as Python values: `rewards`, `reward_errors` and `tool_counts` by name."""
    wanted = list(zip(found.step[places].tolist(), found.row[places].tolist(), strict=True))
    whole: dict[tuple[int, int], dict[str, Any]] = {}
    for step in dict.fromkeys(step for step, _ in wanted):
        rows = [row for of, row in wanted if of == step]
        for row, values in zip(rows, read_rollouts(run, step).take(rows).to_pylist(), strict=True):
            # pyarrow gives a map as pairs, and no column where the recipe has no rewards.
            fixed = {"rewards": values.get("rewards") or {}, "reward_errors": dict(values["reward_errors"] or ())}
            if has_turns(values):
                fixed |= {"messages": json.loads(values["messages"]), "tool_counts": dict(values["tool_counts"])}
            whole[step, row] = {**values, **fixed}
    return [whole[place] for place in wanted]


def readable(value: Any) -> str:
    """Returns a value of the data set as people read it: texts as they are, all others as JSON, which here may have NaN."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def text_of_message(message: Mapping[str, Any]) -> str:
    """Returns what a message of a conversation holds: its reasoning, its text and its calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return "\n".join(readable(part) for part in (message.get("reasoning_content"), message.get("content"), *calls) if part)
