"""Small whole runs in this process, whose rewards differ, so that every step has something to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE

from rlgen.cli.train import train_command
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater

SPREAD = "def spread(completion_ids): return sum(completion_ids) % 97 / 97\n"
SMALL = [
    *("engine={kind: transformers}", "rollout={prompts_per_step: 2, group_size: 4, max_completion_tokens: 8}"),
    *("rewards=[{use: 'r.py:spread'}]", "checkpoint={every: 1, keep: 9}"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    path.with_name("r.py").write_text(SPREAD)
    return path


def run(recipe: Path, *overrides: str, resume: bool = False, name: str = "run") -> Path:
    directory = recipe.parent / name
    train_command(recipe, [*SMALL, *overrides], resume, False, None, directory)
    return directory


def step_now(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that says which step is in its updates; 0: none."""
    now, train = [0], Updater.__call__

    def noting(updater: Updater, train_batch: TrainBatch, step: int) -> Any:
        now.append(step)
        try:
            return train(updater, train_batch, step)
        finally:
            now.pop()

    monkeypatch.setattr(Updater, "__call__", noting)
    return lambda: now[-1]
