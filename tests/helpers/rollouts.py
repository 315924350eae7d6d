"""Rollouts of a run as Python objects."""

from pathlib import Path
from typing import Any

from rlgen.run.rollouts import read_rollouts, rollout_steps


def rollout_rows(run: Path, *steps: int) -> list[dict[str, Any]]:
    """The samples of these steps, or of all; one object a sample, in the order of steps, groups and samples."""
    chosen = steps or rollout_steps(run / "rollouts")
    rows = [row for step in chosen for row in read_rollouts(run, step).to_pylist()]
    return [{**row, "reward_errors": dict(row["reward_errors"])} for row in rows]
