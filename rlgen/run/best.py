"""Finds the evaluation of a run with the highest mean reward, whose checkpoint is pinned."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlgen.files import read_text
from rlgen.metrics import Metric
from rlgen.run.directory import read_records


class Best:
    """The step from 1 on whose evaluation has the highest mean reward so far; of equal ones the first.

    A run that is resumed passes the metrics of its earlier steps.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step: int | None = None  # None: nothing was evaluated after a step
        self.reward = -math.inf
        for record in records:
            self.look(record[Metric.STEP], record)

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        reward = metrics.get(Metric.EVAL_REWARD_MEAN)
        if step and reward is not None and reward > self.reward:
            self.step, self.reward = step, reward


def pinned_step(run: Path) -> int | None:
    """Returns the step of the checkpoint that a run pins as its best; None: its recipe pins none, or nothing was evaluated."""
    resolved = run / "resolved.yaml"
    recipe = yaml.safe_load(read_text(resolved)) if resolved.is_file() else None
    held = recipe.get("eval") if isinstance(recipe, dict) else None
    return Best(read_records(run / "metrics.jsonl")).step if isinstance(held, dict) and held.get("best") else None
