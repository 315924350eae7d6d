"""Small whole runs in this process, whose rewards differ, so that every step has something to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RECIPE, read_jsonl

from helpers.paths import Way
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


def name_of_way(way: Way) -> str:
    return "-".join(way).replace(" ", "-")


def recipe_of_way(way: Way, folder: Path, **server: Any) -> Path:
    """Writes the recipe of a way. `server`: instead of the one that it launches."""
    trainer, engine, processes, dtype, rows, trained = way
    settings = (server or {"launch": True, "max_model_len": 128, "max_num_seqs": 8}) if engine == "server" else {}
    recipe = {
        "run": {"name": "run", "steps": 2},
        "model": {"path": "tiny:qwen3", "dtype": dtype, "lora": {} if trained == "lora" else None},
        "data": {"source": "task:sort", "chat": True, "max_prompt_tokens": 64, "options": {"size": 100}},
        "rewards": [{"use": "spread.py:spread"}],
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 12},
        "engine": {"kind": engine, **settings},
        "trainer": {"kind": trainer},
        "optim": {"learning_rate": 1e-3, "packing": None if rows == "packed" else False},
        "processes": {"strategy": "ddp" if processes == "one process" else processes},
    }
    path = folder / f"{name_of_way(way)}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    path.with_name("spread.py").write_text(SPREAD)
    return path


def learned(run: Path) -> None:
    """Two updates with weights that arrived at the engine: it samples what the trainer computes, in the bounds of the dtype."""
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["weights/version"] for record in records] == [1, 2]
    for record in records:
        assert record["updates/done"] == 1 and record["grad_norm"] > 0 and not record["sentinel/drift"]
