"""Small whole runs in this process, whose rewards differ, so that every step has something to learn from."""

from pathlib import Path

import pytest
from conftest import RECIPE

from rlgen.cli.train import train_command

SMALL = [
    *("engine={kind: transformers}", "rollout={prompts_per_step: 2, group_size: 4, max_completion_tokens: 8}"),
    *("rewards=[{use: 'r.py:spread'}]", "checkpoint={every: 1, keep: 9}"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    path.with_name("r.py").write_text("def spread(completion_ids): return sum(completion_ids) % 97 / 97\n")
    return path


def run(recipe: Path, *overrides: str, resume: bool = False, name: str = "run") -> Path:
    directory = recipe.parent / name
    train_command(recipe, [*SMALL, *overrides], resume, False, None, directory)
    return directory
