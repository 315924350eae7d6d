"""What shows recipes and makes what to start from: `rlgen show`, `schema`, `init`, `recipes list`, `copy` and `warm-start`."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, of_rows, read_jsonl
from helpers.recipes import written
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.inspect import copy_command, init_command, list_recipes_command, schema_command, show_command, warm_start_command
from rlgen.cli.rewards import rewards_test_command
from rlgen.errors import CheckpointError, SetupError, UsageError
from rlgen.files import read_json
from rlgen.recipe import load_recipe
from rlgen.recipe.keys import HEADER, recipe_schema
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

Captured = pytest.CaptureFixture[str]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FILES = {"README.md", "heldout.jsonl", "recipe.schema.json", "recipe.yaml", "rewards.py", "test_rewards.py", "train.jsonl"}
TINY = "tiny:qwen3"


def shown(path: Path, capsys: Captured, *overrides: str) -> list[str]:
    show_command(path, list(overrides), resolved=False, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_a_value_stands_with_its_origin_and_its_sentence(recipe_file: Path, capsys: Captured) -> None:
    lines = shown(recipe_file, capsys, "run.seed=3", "model.lora={rank: 4}", "data.options={size: 9}")
    for value, sentence in {
        "  run.seed = 3  (--set 1: run.seed=3)": "    The seed and the position in the run determine each random choice.",
        "  optim.weight_decay = 0.0  (default)": "    Weight decay of AdamW.",
        "  model.lora.rank = 4  (--set 2: model.lora={rank: 4})": "    Rank of the two factors of each adapted layer.",
        "  data.options.size = 9  (--set 3: data.options={size: 9})": "    Rows that are made.",
        '  engine.kind = "colocated"  (default)': "    colocated: vLLM in this process.",
        "  health.entropy.threshold = 0.01  (default)": "    A value beyond this one is a bad sign.",
    }.items():
        assert lines[lines.index(value) + 1] == sentence
    assert lines[:2] == ["", "run: Name, length and seed of the run, and where its folder is."]
    show_command(recipe_file, ["run.seed=3"], resolved=False, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["run.seed"] == {"value": 3, "origin": "--set 1: run.seed=3"}
    assert values["optim.weight_decay"] == {"value": 0.0, "origin": "default"}
    rule = lines.index("health.entropy: The mean entropy of a token, in nats, is below the threshold.")
    assert lines[rule + 1] == "  health.entropy.threshold = 0.01  (default)"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_value_of_a_recipe_has_a_sentence_in_80_columns(path: Path, capsys: Captured) -> None:
    lines = shown(path, capsys)
    show_command(path, [], resolved=False, as_json=True)
    values = json.loads(capsys.readouterr().out)
    heads = [index for index, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert [lines[index].split()[0] for index in heads] == list(values)
    for index in heads:
        rest = iter(lines[index + 1 :])
        folded = next(line for line in rest if not line.startswith("        "))
        mapping = lines[index].split()[0].rpartition(".")[0]  # its sentence is that of a key in it that the user has named
        assert folded.startswith("    ") or any(line.startswith(f"{mapping}: ") for line in lines[:index]), lines[index]
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


def test_the_schema_is_printed_or_written(tmp_path: Path, capsys: Captured) -> None:
    schema_command(None)
    assert json.loads(capsys.readouterr().out) == recipe_schema()
    file = tmp_path / "recipe.schema.json"
    schema_command(file)
    file.write_text("{}")
    schema_command(file)  # after an update of rlgen
    assert json.loads(file.read_text()) == recipe_schema()
    assert "# yaml-language-server: $schema=recipe.schema.json" in capsys.readouterr().out
    help_text = CliRunner().invoke(app, ["schema", "--help"]).output
    assert "# yaml-language-server: $schema=recipe.schema.json" in help_text
    with pytest.raises(UsageError, match=r"^--out: there is no folder .*nonexist; make it, or name another$"):
        schema_command(tmp_path / "nonexist" / "x.json")
    recipe = written(tmp_path, RECIPE)
    with pytest.raises(UsageError, match=r"recipe\.yaml does not end in \.json, and JSON would overwrite it"):
        schema_command(recipe)
    assert recipe.read_text() == RECIPE


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_copied_recipe_names_nothing_outside_of_its_folder(path: Path, tmp_path: Path, capsys: Captured) -> None:
    copy_command(path.stem, tmp_path)
    copy = tmp_path / path.name
    model = load_recipe(copy).recipe.model.path
    assert not model.startswith("/") or Path(model).is_relative_to(tmp_path)
    assert copy.read_text().replace("path: runs/", "path: ../runs/") == path.read_text()
    following = "recipes warm-start" if "path: ../runs/warm/" in path.read_text() else "validate"
    files = dict.fromkeys(re.findall(r'use: "(\w+\.py):', path.read_text()))
    written = " and ".join(str(tmp_path / name) for name in (path.name, *files))
    assert capsys.readouterr().out == f"{written} written; next: rlgen {following} {copy}\n"
    assert [file.suffix for file in tmp_path.iterdir() if file != copy] == [".py"] * len(files)


def test_a_recipe_is_copied_with_its_reward(tmp_path: Path) -> None:
    names = {"countdown-tiny-grpo.yaml", "countdown.py"}
    copy_command("countdown-tiny-grpo", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == names
    assert (tmp_path / "countdown.py").read_bytes() == (ROOT / "recipes" / "countdown.py").read_bytes()
    copy_command("countdown-qwen3-0.6b-grpo", tmp_path)  # its reward is there, and the same
    with pytest.raises(UsageError, match=r"countdown-tiny-grpo\.yaml exists already; name another file"):
        copy_command("countdown-tiny-grpo", tmp_path)
    (tmp_path / "tldr.py").write_text("mine = True\n")
    with pytest.raises(UsageError, match=r"tldr\.py exists already; name another folder"):
        copy_command("tldr-qwen3-0.6b-online-dpo", tmp_path)
    assert (tmp_path / "tldr.py").read_text() == "mine = True\n"
    assert not (tmp_path / "tldr-qwen3-0.6b-online-dpo.yaml").exists()


def test_a_folder_that_cannot_be_made_for_a_copy_is_said(tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    with pytest.raises(CheckpointError, match=r"afile cannot be written: .*; name another folder$"):
        copy_command("smoke", tmp_path / "afile" / "x.yaml")


def test_the_list_of_recipes_fits_80_columns(capsys: Captured) -> None:
    list_recipes_command(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and [line.split()[0] for line in lines if line[0] != " "] == [path.stem for path in RECIPES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    init_command(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_what_is_written(folder: Path, capsys: Captured) -> None:
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


def test_it_trains_where_it_lands(folder: Path, capsys: Captured) -> None:
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


def test_what_is_not_made_warm(recipe_file: Path, tmp_path: Path) -> None:
    path = recipe_file
    with pytest.raises(UsageError, match=r"model\.path tiny:qwen3 is not a folder that can be written; name one with --out"):
        warm_start_command(path, TINY, None, 0.35)
    with pytest.raises(UsageError, match="exists already; name another folder with --out"):
        warm_start_command(path, TINY, tmp_path, 0.35)
    path.write_text(of_rows('"train.jsonl", chat: true'))
    with pytest.raises(UsageError, match=r"data\.columns\.answer names no column of answers"):
        warm_start_command(path, TINY, tmp_path / "warm", 0.35)


def test_what_is_not_learned_is_not_written(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlgen.setup import warm

    monkeypatch.setattr(warm, "MOST_STEPS", 5)
    monkeypatch.setattr(warm, "TESTED", 8)
    with pytest.raises(SetupError, match=r"0% of the answers are right after 5 steps, not 90%; lower --accuracy"):
        warm_start_command(recipe_file, TINY, tmp_path / "warm", 0.9)
    assert not (tmp_path / "warm").exists()


def test_answers_of_a_file_are_learned(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "recipe.yaml"
    rows = "".join(f'{{"say": "{letter}", "reply": "{letter}{letter}"}}\n' for letter in "abcd")
    (tmp_path / "train.jsonl").write_text(rows)
    data = '"train.jsonl", columns: {prompt: say, answer: reply}'
    path.write_text(of_rows(f"{data}, chat: true").replace("prompts_per_step: 4", "prompts_per_step: 2"))
    warm_start_command(path, TINY, tmp_path / "warm start", 0.9)
    *_, last = capsys.readouterr().out.splitlines()
    assert (tmp_path / "warm start" / "config.json").is_file()
    assert last.endswith(f"next: rlgen train {path} --set model.path='{tmp_path}/warm start'")


def test_train_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_command("demo-grpo", None)
    with pytest.raises(SetupError, match=rf"there is no folder {tmp_path}/runs/warm/qwen3; .* `rlgen recipes warm-start RECIPE`"):
        train(Path("demo-grpo.yaml"))
    assert [path.name for path in tmp_path.iterdir()] == ["demo-grpo.yaml"]


@pytest.mark.slow
def test_a_copied_demo_runs_where_it_lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_command("demo-rloo", None)
    warm_start_command(Path("demo-rloo.yaml"), TINY, None, 0.35)
    train(Path("demo-rloo.yaml"), TrainOptions(overrides=["engine={kind: transformers}"], max_steps=3))
    rewards = [record["reward/exact_match/mean"] for record in read_jsonl(tmp_path / "runs/demo-rloo/metrics.jsonl")]
    assert len(rewards) == 3 and min(rewards) > 0.2
