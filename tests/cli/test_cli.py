"""The command line as a user meets it: messages, exit codes, quick answers."""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Proof, Run, of_rows
from helpers.recipes import written

from rlgen.cli.files import looked_up
from rlgen.cli.validate import validate_command
from rlgen.data.source import load_rows
from rlgen.errors import RecipeError
from rlgen.recipe import dump_recipe, load_recipe


def test_three_mistakes_with_their_lines_and_no_traceback(rlgen: Run, recipe_file: Path) -> None:
    text = recipe_file.read_text().replace("steps: 2", "steps: 2, stesp: 1") + "optim: {learning_rate: 1}\n"
    recipe_file.write_text(text.replace("float32", "float33"))
    result = rlgen("train", recipe_file)
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stdout.count("\n") == 1
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"{recipe_file}:1:29: `stesp` is not a key of `run`; did you mean `steps`?")
    assert lines[1].startswith(f"{recipe_file}:2:29: model.dtype: 'float33'")
    assert lines[2].startswith(f"{recipe_file}:9:1: `optim` appears twice, first in line 8")
    assert lines[3] == "3 errors; nothing was started"
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["train", "missing.yaml"], 2, "does not exist"),
        (["recipes", "copy", "nothing"], 2, "there is no recipe nothing; there are arithmetic-tiny-grpo"),
        (["recipes", "list"], 0, "smoke"),
        (["--version"], 0, "rlgen 0."),
        (["train", "--help"], 0, "--resume"),
        (["train", "x.yaml", "--resume-step", "0"], 2, "Invalid value for '--resume-step'"),
    ],
)
def test_commands(rlgen: Run, arguments: list[str], code: int, text: str) -> None:
    result = rlgen(*arguments)
    assert result.returncode == code and text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m rlgen docs >&- ; echo $? ; {sys.executable} -m rlgen nothing 2>&- ; echo $?"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.split() == ["0", "2"] and not ended.stderr, ended


def test_validate_names_the_plan_and_missing_files(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate_command(recipe_file, [], as_json=False, count=0)
    assert "4 prompts × 4 = 16 samples" in capsys.readouterr().out
    with pytest.raises(RecipeError, match=r"(?s)no\.jsonl does not exist.*r\.py cannot be read"):
        validate_command(recipe_file, ["rewards.0.use=r.py:f", "data={source: no.jsonl}"], as_json=False, count=0)


@pytest.mark.parametrize("source", ["rows.jsonl", "r*.jsonl", "./"])
def test_data_below_a_folder_with_brackets(tmp_path: Path, source: str) -> None:
    written(tmp_path, '{"prompt": "a", "answer": "b"}\n', "exp[1]/rows.jsonl")
    path = written(tmp_path, of_rows(source), "exp[1]/recipe.yaml")
    loaded = load_recipe(path)
    assert looked_up(loaded) == (None if source == "./" else {"prompt", "answer"})
    again = load_recipe(written(tmp_path, dump_recipe(loaded.recipe), "exp[1]/resolved.yaml"), resolved=True).recipe.data
    assert again == loaded.recipe.data and [row["prompt"] for row in load_rows(again, 0).rows] == ["a"]
    with pytest.raises(RecipeError, match=r"exp\[1\]/rosw\.jsonl does not exist; did you mean `.*/exp\[1\]/rows\.jsonl`"):
        looked_up(load_recipe(path, ["data.source=rosw.jsonl"]))


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf# \xc3\xa9\n", b"# -*- coding: latin-1 -*-\n# \xe9\n"])
def test_a_reward_file_is_read_as_python_reads_it(recipe_file: Path, content: bytes) -> None:
    file = recipe_file.parent / "r.py"
    file.write_bytes(content + b"def f(completion):\n    return 1.0\n")
    assert looked_up(load_recipe(recipe_file, ["rewards=[{use: 'r.py:f'}]"])) == {"prompt", "answer"}
    file.write_bytes(b"x = '\xe9'\n")
    with pytest.raises(RecipeError, match=r"r\.py cannot be read: "):
        looked_up(load_recipe(recipe_file, ["rewards=[{use: 'r.py:f'}]"]))


def timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a command. Returns how it ended, and its seconds of a core: on a host that has other things to do it waits."""
    began = os.times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    ended = os.times()
    return done, ended.children_user + ended.children_system - began.children_user - began.children_system


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["validate", str(ROOT / "recipes" / "smoke.yaml"), "--data", "0"]])
def test_quick_answers(arguments: list[str]) -> None:
    found = [timed([sys.executable, "-m", "rlgen", *arguments], check=True) for _ in range(5)]
    assert statistics.median(seconds for _, seconds in found) < 0.7


def test_quick_answers_import_nothing_heavy() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from rlgen.cli.app import app
from rlgen.setup import TrainOptions, train  # so that a mistake in a recipe is said at once, by Python as by the command
recipe = "{ROOT / "recipes" / "gsm8k-qwen3-0.6b-grpo.yaml"}"
for arguments in (["--help"], ["validate", recipe], ["show", recipe], ["docs"], ["docs", "recipe"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments
print(sorted({{"torch", "transformers", "vllm", "datasets", "accelerate", "numpy"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_several_processes_without_a_launcher_are_refused(rlgen: Run, recipe_file: Path, tmp_path: Path) -> None:
    result = rlgen("train", recipe_file, "--run-dir", tmp_path / "run", WORLD_SIZE="2")
    assert result.returncode == 9 and "WORLD_SIZE is 2, but RANK" in result.stderr and not (tmp_path / "run").exists()


@pytest.mark.fault(15)
def test_validate_answers_where_torch_cannot_be_imported(recipe_file: Path, tmp_path: Path, proof: Proof) -> None:
    for name in ("torch", "transformers", "vllm", "datasets", "accelerate"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "rlgen", "validate", str(recipe_file)]
    done, seconds = timed(command, env=environment)
    assert done.returncode == 0 and "valid" in done.stdout and "not checked: rows of the data" in done.stdout
    failed, _ = timed([*command[:3], "estimate", str(recipe_file)], env=environment)
    assert "no torch here" in failed.stderr
    proof(f"torch cannot be imported; answered in {seconds:.2f} s of a core")


@pytest.mark.fault(16)
def test_a_dry_run_writes_the_resolved_recipe_only(rlgen: Run, recipe_file: Path, tmp_path: Path, proof: Proof) -> None:
    first, again = (tmp_path / 'it\'s "mine"' / name for name in ("first", "again"))
    assert rlgen("train", recipe_file, "--dry-run", "--run-dir", first, "--set", "run.seed=3").returncode == 0
    assert [path.name for path in first.iterdir()] == ["resolved.yaml"]
    text = (first / "resolved.yaml").read_text()
    assert rlgen("show", first / "resolved.yaml", "--resolved").stdout == text
    assert rlgen("train", first / "resolved.yaml", "--dry-run", "--run-dir", again).returncode == 0
    assert (again / "resolved.yaml").read_text() == text.replace("name: first", "name: again") != text
    proof(f"one file of {len(text)} bytes; resolved again it is the same but for the name")


@pytest.mark.parametrize(
    "place, code, said",
    [
        ("file", 2, "file is a file"),
        ("file/run", 2, "is a file"),
        ("/proc/run", 8, "cannot be written"),
        ("/sys/a/b", 8, "cannot be"),
    ],
)
def test_an_output_folder_that_cannot_be(rlgen: Run, recipe_file: Path, tmp_path: Path, place: str, code: int, said: str) -> None:
    mine = tmp_path / "file"
    mine.write_text("mine")
    for arguments in ([], ["--dry-run"]):
        done = rlgen("train", recipe_file, "--run-dir", tmp_path / place, *arguments)
        assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert "run.dir" in done.stderr and len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "recipe.yaml"} and mine.read_text() == "mine"
