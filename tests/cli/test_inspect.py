"""Quick answers about recipes: `rlgen show`, `schema`, `recipes list` and `copy`."""

import json
import re
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.cli.inspect import copy_command, list_recipes_command, schema_command, show_command
from rlgen.errors import UsageError
from rlgen.recipe import load_recipe
from rlgen.recipe.schema import recipe_schema

Captured = pytest.CaptureFixture[str]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def shown(path: Path, capsys: Captured, *overrides: str) -> list[str]:
    show_command(path, list(overrides), resolved=False, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_a_value_stands_with_its_origin_and_its_sentence(recipe_file: Path, capsys: Captured) -> None:
    lines = shown(recipe_file, capsys, "run.seed=3", "model.lora={rank: 4}", "data.options={size: 9}")
    for value, sentence in {
        "  run.seed = 3  (--set 1: run.seed=3)": "    Every random choice follows from the seed and its position in the run.",
        "  optim.weight_decay = 0.0  (default)": "    Weight decay of AdamW.",
        "  model.lora.rank = 4  (--set 2: model.lora={rank: 4})": "    Rank of the two factors of each adapted layer.",
        "  data.options.size = 9  (--set 3: data.options={size: 9})": "    Rows that are made.",
        '  engine.kind = "colocated"  (default)': "    colocated: vLLM in this process.",
        "  health.entropy.threshold = 0.01  (default)": "    A value beyond this one is a bad sign.",
    }.items():
        assert lines[lines.index(value) + 1] == sentence
    assert lines[:2] == ["", "run: Name, length and seed of the run, and where its folder is."]
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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
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
    (tmp_path / "tldr.py").write_text("mine = True\n")
    with pytest.raises(UsageError, match=r"tldr\.py exists already; name another folder"):
        copy_command("tldr-qwen3-0.6b-online-dpo", tmp_path)
    assert (tmp_path / "tldr.py").read_text() == "mine = True\n"
    assert not (tmp_path / "tldr-qwen3-0.6b-online-dpo.yaml").exists()


def test_the_list_of_recipes_fits_80_columns(capsys: Captured) -> None:
    list_recipes_command(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and [line.split()[0] for line in lines if line[0] != " "] == [path.stem for path in RECIPES]
