"""Killed and resumed, a run trains every position once and ends as the run that was never killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import read_jsonl
from safetensors.torch import load_file

from rlgen.run.files import read_json

Run = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 12
SETTINGS = ["--set", f"run.steps={STEPS}", "--set", "checkpoint={every: 3}"]


def start_and_signal(recipe: Path, directory: Path, number: int, after_step: int) -> int:
    """Runs until the metrics hold `after_step`, then sends the signal; the exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlgen", "train", str(recipe), "--run-dir", str(directory), *SETTINGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= after_step):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    return process.wait(timeout=60)


def positions(directory: Path) -> list[tuple[int, int]]:
    rows = [row for path in sorted((directory / "rollouts").iterdir()) for row in read_jsonl(path)]
    return [(row["group_id"], row["sample_index"]) for row in rows]


def without_times(directory: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_jsonl(directory / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import RECIPE

    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "rlgen", "train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run"), *SETTINGS]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return folder / "run"


@pytest.mark.fault(63, 71)
def test_kill_9_and_resume(rlgen: Run, recipe_file: Path, undisturbed: Path, proof: Callable[[str], None]) -> None:
    directory = recipe_file.parent / "run"
    assert start_and_signal(recipe_file, directory, signal.SIGKILL, after_step=5) == -signal.SIGKILL
    killed_after = len(read_jsonl(directory / "metrics.jsonl"))
    assert 5 <= killed_after < STEPS
    result = rlgen("train", recipe_file, "--run-dir", directory, "--resume", *SETTINGS)
    assert result.returncode == 0, result.stderr
    records = read_jsonl(directory / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    trained = positions(directory)
    assert len(set(trained)) == len(trained) == STEPS * 16 and {group for group, _ in trained} == set(range(STEPS * 4))
    # what was sampled after the last checkpoint was trained into weights that died: kept apart
    archived = sorted(path.name for path in (directory / "logs" / "attempt_1" / "rollouts").iterdir())
    assert archived and archived[0] >= "step_000004.jsonl"
    assert len(read_json(directory / "provenance.json")) == 2
    # the same run to the last bit
    assert without_times(directory) == without_times(undisturbed)
    last = f"checkpoints/step_{STEPS:06d}/model.safetensors"
    ours, theirs = load_file(directory / last), load_file(undisturbed / last)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    proof(f"SIGKILL after step {killed_after} of {STEPS}, exit -9; archived {', '.join(archived)}")


def test_a_termination_saves_and_exits_75(rlgen: Run, recipe_file: Path) -> None:
    directory = recipe_file.parent / "run"
    assert start_and_signal(recipe_file, directory, signal.SIGTERM, after_step=2) == 75
    status = read_json(directory / "status.json")
    done = status["step"]
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and 2 <= done < STEPS
    assert (directory / "checkpoints" / f"step_{done:06d}").is_dir()
    result = rlgen("train", recipe_file, "--run-dir", directory, "--resume", *SETTINGS)
    assert result.returncode == 0 and f"resuming after step {done}" in result.stdout
    assert len(read_jsonl(directory / "metrics.jsonl")) == STEPS


@pytest.mark.fault(17, 68, 69)
def test_a_run_never_writes_into_anothers_directory(
    rlgen: Run, recipe_file: Path, undisturbed: Path, proof: Callable[[str], None]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"}
    taken = rlgen("train", recipe_file, "--run-dir", undisturbed)
    assert taken.returncode == 2 and "already holds a run; go on with --resume" in taken.stderr
    other = rlgen("train", recipe_file, "--run-dir", undisturbed, "--resume", *SETTINGS, "--set", "run.seed=1")
    assert other.returncode == 2 and "run.seed: 0 -> 1" in other.stderr
    none = rlgen("train", recipe_file, "--run-dir", recipe_file.parent / "nothing", "--resume")
    assert none.returncode == 2 and "holds no run to resume" in none.stderr
    assert before == {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"}
    done = rlgen("train", undisturbed / "recipe.yaml", "--run-dir", undisturbed, "--resume", *SETTINGS)
    assert done.returncode == 0 and f"already complete, {STEPS} steps" in done.stdout
    proof("taken, another seed, no run: exit 2 each, no file changed; the finished run resumed: exit 0")
