"""What `rlgen init` writes is valid, is what it says, and trains where it lands."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_jsonl

from rlgen.cli.inspect import init_command
from rlgen.cli.rewards import rewards_test_command
from rlgen.errors import CheckpointError, UsageError
from rlgen.files import read_json
from rlgen.recipe import load_recipe
from rlgen.recipe.schema import HEADER, recipe_schema
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

FILES = {"README.md", "heldout.jsonl", "recipe.schema.json", "recipe.yaml", "rewards.py", "test_rewards.py", "train.jsonl"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    init_command(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_what_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    loaded = load_recipe(Path("recipe.yaml"))
    assert not loaded.warnings and not loaded.notices
    assert (loaded.recipe.model.path, loaded.recipe.engine.kind) == (str(folder / "model"), "transformers")
    assert loaded.text.startswith(f"{HEADER}recipe.schema.json\n")
    assert "\neval: {source: heldout.jsonl, every: 20, temperature: 1.0} " in loaded.text
    assert read_json(folder / "recipe.schema.json") == recipe_schema()
    assert len((folder / "README.md").read_text().splitlines()) == 3


def test_the_answers_are_right_and_no_question_is_in_both_splits(folder: Path) -> None:
    splits = [read_jsonl(folder / name) for name in ("train.jsonl", "heldout.jsonl")]
    assert [len(rows) for rows in splits] == [800, 100]
    for row in (row for rows in splits for row in rows):
        number = row["question"].removeprefix("What comes after ").removesuffix("?")
        assert int(row["answer"]) == int(number) + 1
    questions = [{row["question"] for row in rows} for rows in splits]
    assert [len(one) for one in questions] == [800, 100] and not questions[0] & questions[1]


def test_the_test_of_the_rewards_passes_and_can_fail(folder: Path) -> None:
    command = [sys.executable, "test_rewards.py"]
    assert subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode == 0
    names = [node.name for node in ast.parse((folder / "test_rewards.py").read_text()).body if isinstance(node, ast.FunctionDef)]
    assert names == ["test_only_the_answer_is_correct"]
    rewards = folder / "rewards.py"
    for before, after in (("== answer", "!= answer"), ("completion.strip()", "completion")):
        text = rewards.read_text()
        rewards.write_text(text.replace(before, after))
        broken = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        rewards.write_text(text)
        assert broken.returncode == 1 and "AssertionError" in broken.stderr


def test_it_trains_where_it_lands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Path("recipe.yaml"), TrainOptions(overrides=["model.path=tiny:qwen3"], max_steps=2))
    status = read_json(folder / "runs" / "first" / "status.json")
    assert (status["state"], status["step"], status["exit_code"]) == ("done", 2, 0)
    start, *metrics = read_jsonl(folder / "runs" / "first" / "metrics.jsonl")
    assert start["step"] == 0 and start["eval/pass@1"] == 0.0 and len(metrics) == 2
    assert all(0 <= record["reward/correct/mean"] <= 1 for record in metrics)
    capsys.readouterr()
    rewards_test_command(Path("recipe.yaml"), [], 4, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rewards"]
    means = {(row["reward"], row["answers"]): row["mean"] for row in rows}
    assert means["correct", "gold"] == 1.0 and means["correct", "empty"] == means["correct", "garbage"] == 0.0


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    init_command(tmp_path / "taken")  # empty
    (tmp_path / "taken" / "recipe.yaml").write_text("mine\n")
    with pytest.raises(UsageError, match="taken is not empty; name a new folder"):
        init_command(tmp_path / "taken")
    assert (tmp_path / "taken" / "recipe.yaml").read_text() == "mine\n"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; name a folder"):
        init_command(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"x{300} cannot be written: .*too long.*; name another folder"):
        init_command(tmp_path / ("x" * 300))
