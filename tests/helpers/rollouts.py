"""What a run has recorded, as Python objects."""

from pathlib import Path
from typing import Any

from conftest import read_jsonl

from rlgen.models.tiny import byte_tokenizer
from rlgen.rollout.read import read_rollouts, rollout_steps
from rlgen.run.rollouts import RolloutWriter

STAMP = {"engine": "e", "sampling": "s", "judge": "j", "weights": {}, "kept": False}


def rollout_rows(run: Path, *steps: int) -> list[dict[str, Any]]:
    """The samples of these steps, or of all; one object a sample, in the order of steps, groups and samples."""
    chosen = steps or rollout_steps(run / "rollouts")
    rows = [row for step in chosen for row in read_rollouts(run, step).to_pylist()]
    return [{**row, "reward_errors": dict(row["reward_errors"])} for row in rows]


def records_but_times(run: Path) -> list[dict[str, Any]]:
    """Its metrics, step by step."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run / "metrics.jsonl")]


def rollout_writer(run: Path, **changes: Any) -> RolloutWriter:
    """What writes every step of a run in one process, and removes none; `prompt_at` says the prompts."""
    values: dict[str, Any] = {
        **{"folder": run / "rollouts", "rank": 0, "world": 1, "tokenizer": byte_tokenizer(), "stop_ids": (259,), "every": 1},
        **{"keep": None, "needed": lambda: 10**9, "stamp": lambda rollout: STAMP, "on_disk": lambda step, path: None},
    }
    return RolloutWriter(**{**values, **changes})
