"""What people type out of habit does the thing, or names the command that does it."""

from pathlib import Path

import pytest
import typer
from conftest import Run
from helpers.runs import bare_run

from rlgen.cli.app import app
from rlgen.cli.docs import docs_command
from rlgen.cli.guesses import DONE, NAMED, OPTIONS, TAKEN, TAKES_A_RECIPE, TAKES_A_RUN, understood
from rlgen.cli.status import age, runs_command
from rlgen.errors import UsageError

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "typed, meant",
    [
        ([], []),
        (["version"], ["--version"]),
        (["help"], ["--help"]),
        (["help", "recipes", "copy"], ["recipes", "copy", "--help"]),
        (["list"], ["recipes", "list"]),
        (["train", "r.yaml", "--set", "run.steps=5", "--resume"], ["train", "r.yaml", "--set", "run.steps=5", "--resume"]),
        (["show", "a.b.yaml"], ["show", "a.b.yaml"]),
        (["export", "runs/a", "--model", "x"], ["export", "runs/a", "--model", "x"]),
    ],
)
def test_does_what_is_meant(typed: list[str], meant: list[str]) -> None:
    assert understood(typed) == meant


@pytest.mark.parametrize(
    "typed, told",
    [
        ("mine.yaml --max-steps 3", "to train it: rlgen train mine.yaml --max-steps 3"),
        ("resume mine", "`rlgen train RECIPE --resume`"),
        ("-v", "`rlgen --version`"),
        ("train r.yaml --run.steps=5", "write `--set run.steps=5`"),
        ("train r.yaml --run.steps 5", "write `--set run.steps=5`"),
        ("train r.yaml run.steps=5", "write `--set run.steps=5`"),
        ("train r.yaml --set run.steps 5", "write `--set run.steps=5`"),
        ("train r.yaml --steps 5", "write `--set run.steps=5`"),
        ("train --config r.yaml", "`rlgen train r.yaml`"),
        ("train", "`rlgen recipes list`"),
        ("status", "needs the name of a run"),
        ("train r.yaml --gpus=2", "torchrun --nproc-per-node 2 -m rlgen train"),
    ],
)
def test_names_the_command(typed: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        understood(typed.split())
    assert told in str(error.value)


def test_no_guess_hides_a_command_or_an_option() -> None:
    assert not set(DONE) & set(COMMANDS) and {*TAKES_A_RUN, *TAKES_A_RECIPE} <= set(COMMANDS)
    assert not set(NAMED) & set(COMMANDS)
    for name in TAKES_A_RECIPE:
        own = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(OPTIONS) & own == {option for command, option in TAKEN if command == name}, name
    assert understood(["estimate", "r.yaml", "--nodes", "2", "--gpus", "8"])[-2:] == ["--gpus", "8"]


def test_runs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_command(tmp_path, as_json=False)
    assert "holds no run" in capsys.readouterr().out
    bare_run(tmp_path / "one", [0.25, 0.75])
    runs_command(tmp_path, as_json=False)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "first", "last", "evaluation", "age"]
    assert line.split()[0] == "one" and "0.250" in line and "0.750" in line
    for folder, told in {"one": "is a run; `rlgen status", "none": "there is no folder"}.items():
        with pytest.raises(UsageError, match=told):
            runs_command(tmp_path / folder, as_json=False)
    assert [age(seconds) for seconds in (0, 90, 7200, 200000)] == ["0 s", "1 min", "2 h", "2 d"]


def test_search_in_all_pages(capsys: pytest.CaptureFixture[str]) -> None:
    docs_command(None, "ZERO_STD")
    lines = capsys.readouterr().out.splitlines()
    assert {"metrics", "recipe"} <= {line.partition(": ")[0] for line in lines} and all("zero_std" in line for line in lines)
    docs_command("recipe", "zero_std")
    assert {line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()} == {"recipe"}
    for page, word, told in (
        ("grpo", None, r"no page `grpo`; there are algorithms, .*`rlgen docs --search grpo`"),
        ("metric", None, r"did you mean `metrics`\?"),
        (None, "xyzzy", "no page has `xyzzy`"),
    ):
        with pytest.raises(UsageError, match=told):
            docs_command(page, word)


def test_as_it_is_typed(rlgen: Run) -> None:
    assert rlgen("version").stdout.startswith("rlgen 0.")
    refused = rlgen("recipe.yaml")
    assert refused.returncode == 2 and refused.stderr.startswith("error: recipe.yaml is a recipe")
