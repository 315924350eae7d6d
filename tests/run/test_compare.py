"""Two run directories: the same run, or the first thing that differs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlgen.run.compare import first_difference, metric_differences

STATE = {"step": 2, "position": 8, "schedule": {"_last_lr": [0.1]}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps, as little as there can be of each."""
    run = tmp_path / "left"
    state = run / "checkpoints" / "step_000002" / "state"
    state.mkdir(parents=True)
    (run / "rollouts").mkdir()
    lines = [{"step": step, "loss": 0.5 * step, "grad_norm": float("nan"), "time/step": 1.0} for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, 5):
        row = {"group_id": step, "sampler_logp": [-0.1, -0.2], "reward": None, "nan": [float("nan")], "cached_tokens": 0}
        write_rows(run, step, [row, dict(row)])
    save_file({"w": torch.tensor([1.0, -0.0, float("nan")]), "n": torch.tensor(3.0)}, state.parent / "model.safetensors")
    save_file({"torch": torch.arange(4, dtype=torch.uint8)}, state / "random.safetensors")
    (state / "state.json").write_text(json.dumps(STATE))
    return run


KINDS = pa.schema(
    {
        "group_id": pa.int64(),
        "sampler_logp": pa.list_(pa.float64()),
        "reward": pa.float64(),
        "nan": pa.list_(pa.float32()),
        "cached_tokens": pa.int64(),
    }
)


def write_rows(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, KINDS), run / "rollouts" / f"step_{step:06d}.parquet")


def rows_with(step: int, place: int, **values: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        rows[place] |= values
        write_rows(run, step, rows)

    return change


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert before in text
        (run / name).write_text(text.replace(before, after))

    return change


def tensor(name: str, key: str, place: int, value: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        tensors = load_file(run / name)
        flat = tensors[key].clone().reshape(-1)
        flat[place] = value
        save_file({**tensors, key: flat.reshape(tensors[key].shape)}, run / name)

    return change


CHECKPOINT = "checkpoints/step_000002"
CHANGES = {
    "metrics": (
        edit("metrics.jsonl", '"loss": 1.5', '"loss": 1.5000000000000002'),
        "metrics.jsonl, step 3, loss: 1.5 and 1.50000",
    ),
    "a metric more": (
        edit("metrics.jsonl", '"loss": 1.0', '"loss": 1.0, "new": 1'),
        "metrics.jsonl, step 2, new: '(not there)' and 1",
    ),
    "a step twice": (
        lambda run: (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"step": 4, "loss": 2.0}\n'),
        "metrics.jsonl, step 4, grad_norm: nan and '(not there)'",
    ),
    "a rollout": (
        rows_with(2, 1, sampler_logp=[-0.1, -0.20000000000000004]),
        "rollouts/step_000002.parquet, step 2, sample 1, sampler_logp: [-0.1, -0.2] and [-0.1, -0.2000",
    ),
    "fewer tokens": (rows_with(2, 0, sampler_logp=[-0.1]), "step 2, sample 0, sampler_logp: [-0.1, -0.2] and [-0.1]"),
    "a token that is none": (rows_with(2, 1, nan=[0.0]), "step 2, sample 1, nan: [nan] and [0.0]"),
    "the sign of a zero in rollouts": (rows_with(3, 0, reward=-0.0), "step 3, sample 0, reward: None and -0.0"),
    "no rollouts": (
        lambda run: (run / "rollouts/step_000001.parquet").unlink(),
        "rollouts/step_000001.parquet, step 1, file: 'there' and '(not there)'",
    ),
    "a sample less": (
        lambda run: write_rows(run, 1, pq.read_table(run / "rollouts/step_000001.parquet").to_pylist()[:1]),
        "rollouts/step_000001.parquet, step 1, samples: 2 and 1",
    ),
    "0 for none": (rows_with(4, 0, reward=0.0), "step_000004.parquet, step 4, sample 0, reward: None and 0.0"),
    "the sign of zero": (
        tensor(f"{CHECKPOINT}/model.safetensors", "w", 1, 0.0),
        "model.safetensors, step 2, w[1] (1 of 3 differ): -0.0 and 0.0",
    ),
    "a scalar": (
        tensor(f"{CHECKPOINT}/model.safetensors", "n", 0, 4.0),
        "model.safetensors, step 2, n[0] (1 of 1 differ): 3.0 and 4.0",
    ),
    "random states": (tensor(f"{CHECKPOINT}/state/random.safetensors", "torch", 3, 9), "random.safetensors, step 2, torch[3]"),
    "schedule": (edit(f"{CHECKPOINT}/state/state.json", "0.1", "0.2"), "state.json, step 2, schedule: {'_last_lr': [0.1]} and"),
    "no checkpoint": (
        lambda run: shutil.rmtree(run / CHECKPOINT),
        "step_000002/model.safetensors, step 2, file: 'there' and '(not there)'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_is_named(run: Path, change: str) -> None:
    make, said = CHANGES[change]
    other = shutil.copytree(run, run.parent / "right")
    assert first_difference(run, other) is None
    make(other)
    assert said in str(first_difference(run, other))


def test_times_and_caches_are_no_difference_and_the_earliest_step_comes_first(run: Path) -> None:
    other = shutil.copytree(run, run.parent / "right")
    edit("metrics.jsonl", '"time/step": 1.0', '"time/step": 2.0, "time/save": 1.0')(other)
    rows_with(3, 0, cached_tokens=128)(other)
    assert first_difference(run, other) is None
    rows_with(4, 0, sampler_logp=[-0.3, -0.2])(other)
    edit("metrics.jsonl", '"loss": 1.5', '"loss": 1.6')(other)
    difference = first_difference(run, other)
    assert difference is not None and (difference.step, difference.key) == (3, "loss")


def test_a_run_that_ended_before_its_first_metrics_is_compared_too(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "right"
    shutil.copytree(run, other)
    (other / "metrics.jsonl").write_text("")
    for left, right in ((run, other), (other, run)):
        found = list(metric_differences(left, right))
        assert [one.step for one in found] == [1, 2, 3, 4, 4] and {one.key for one in found} == {"all of it", "lines"}
