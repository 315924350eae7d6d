"""Reads the folder of a run: recipe, status, metrics and evaluations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rlgen.metrics import Metric
from rlgen.recipe import Recipe, load_recipe
from rlgen.run.directory import RunDirectory, read_records

Record: TypeAlias = Mapping[str, Any]
EDGES = ("_low", "_high")  # of the interval of an evaluation: `eval/reward/mean_low`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What a run has written about itself so far."""

    path: Path
    recipe: Recipe
    resolved: str  # resolved.yaml
    written: str  # recipe.yaml, as its author wrote it
    status: Record  # status.json; {} if the run has not begun
    attempts: Sequence[Record]  # provenance.json
    metrics: Sequence[Record]  # metrics.jsonl, by step from 1 on
    evaluations: Sequence[Record]  # those of metrics.jsonl with an evaluation, by step from 0 on

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def seconds(self) -> float:
        """Returns the time of all steps; opening, loading and stops do not count."""
        return sum(record.get(Metric.TIME_STEP) or 0.0 for record in self.metrics)


def read_run(path: Path) -> Run:
    """Reads the folder of a run. Raises RecipeError if resolved.yaml does not fit this version of rlgen."""
    resolved, written = path / "resolved.yaml", path / "recipe.yaml"
    records = read_records(path / "metrics.jsonl")
    return Run(
        path=path,
        recipe=load_recipe(resolved, resolved=True).recipe,
        resolved=resolved.read_text(encoding="utf-8"),
        written=written.read_text(encoding="utf-8", errors="replace") if written.is_file() else "",
        status=RunDirectory.look(path),
        attempts=RunDirectory.attempts(path),
        metrics=[record for record in records if record[Metric.STEP]],
        evaluations=[record for record in records if Metric.EVAL_REWARD_MEAN in record],
    )


def number(record: Record, key: str) -> float | None:
    """Returns a finite number of a record; None if it was not measured, or was not finite (written as text, such as "nan")."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def interval_of(record: Record, key: str) -> str:
    """Returns the interval of an evaluation's value, "0.48 to 0.58"; an empty text if it was not measured."""
    low, high = (number(record, key + edge) for edge in EDGES)
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def tenths(steps: Sequence[Record]) -> tuple[float | None, float | None]:
    """Returns the mean rewards of the first and of the last tenth of the steps, at least one each; None: none was measured."""
    values = [number(step, Metric.REWARD_MEAN) for step in steps]
    count = max(1, len(values) // 10)
    return mean_of(values[:count]), mean_of(values[-count:])


def mean_of(values: Iterable[float | None]) -> float | None:
    """Returns the mean of what was measured; None if nothing was."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
