"""What a run has recorded, as Python objects."""

from pathlib import Path
from typing import Any

from conftest import read_jsonl

from rlgen.rollout.read import read_rollouts, rollout_steps


def rollout_rows(run: Path, *steps: int) -> list[dict[str, Any]]:
    """The samples of these steps, or of all; one object a sample, in the order of steps, groups and samples."""
    chosen = steps or rollout_steps(run / "rollouts")
    rows = [row for step in chosen for row in read_rollouts(run, step).to_pylist()]
    return [{**row, "reward_errors": dict(row["reward_errors"])} for row in rows]


def records_but_times(run: Path) -> list[dict[str, Any]]:
    """Its metrics, step by step."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run / "metrics.jsonl")]
