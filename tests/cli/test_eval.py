"""`rlgen eval`: a model, a run's checkpoint or an adapter, as a recipe's section `eval` says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, read_jsonl
from helpers.recipes import written
from typer.testing import CliRunner

from rlgen import evaluate, load_recipe
from rlgen.cli.app import app
from rlgen.cli.evaluate import target_of
from rlgen.cli.train import train_command
from rlgen.errors import CheckpointError, UsageError
from rlgen.rollout.read import read_rollouts
from rlgen.setup import evaluation

EVAL = "eval={limit: 5, every: 1, group_size: 2}"
ENGINE = "engine={kind: transformers}"


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, words)], catch_exceptions=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    train_command(written(folder, RECIPE), [ENGINE, EVAL, "checkpoint={every: 1}"], False, False, None, folder / "run")
    return folder / "run"


def measured(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key.startswith("eval/") and "sampler" not in key}


def test_a_checkpoint_gives_the_numbers_of_its_run(run: Path, tmp_path: Path) -> None:
    recipe = run.parent / "recipe.yaml"
    records = {record["step"]: record for record in read_jsonl(run / "metrics.jsonl")}
    for place, step in ((run, 2), (run / "checkpoints" / "step_000001", 1)):
        result = invoke(place, recipe, "--set", ENGINE, "--set", EVAL, "--json", "--out", tmp_path / "samples")
        assert result.exit_code == 0, result.exception
        found = json.loads(result.stdout.splitlines()[-1])
        # one word of the two tasks is the same, by chance
        assert (found["step"], found["trained_on_too"], found["source"]) == (step, 1, "task:sort")
        assert measured(found["metrics"]) == measured(records[step])
        assert found["metrics"]["eval/sampler/delta_max"] < 1e-4
        rows = read_rollouts(tmp_path / "samples" / f"step_{step:06d}.parquet")
        assert rows["completion_ids"].equals(read_rollouts(run / "evals" / f"step_{step:06d}.parquet")["completion_ids"])


def test_a_model_and_its_table(run: Path) -> None:
    result = invoke("tiny:qwen3", run.parent / "recipe.yaml", "--set", ENGINE, "--set", EVAL)
    assert result.exit_code == 0, result.exception
    first = read_jsonl(run / "metrics.jsonl")[0]
    assert first["step"] == 0
    lines = result.stdout.splitlines()
    start = lines.index("tiny:qwen3: 5 prompts of task:sort")
    low, high = first["eval/reward/mean_low"], first["eval/reward/mean_high"]
    assert lines[start + 1].split() == ["mean", "95", "%", "interval"]
    assert lines[start + 2].split() == ["reward/mean", f"{first['eval/reward/mean']:.4g}", f"{low:.4g}", "to", f"{high:.4g}"]
    names = (
        "pass@1 pass@2 reward/exact_match/mean reward/length/mean completions/mean_tokens completions/truncated sampler/delta_max"
    )
    assert [line.split()[0] for line in lines[start + 3 :]] == names.split()


def test_an_adapter_is_laid_over_its_base(recipe_file: Path, tmp_path: Path) -> None:
    settings = [ENGINE, EVAL, "model.lora={rank: 4}", "run.steps=1"]
    train_command(recipe_file, settings, False, False, None, tmp_path / "run")
    result = invoke(tmp_path / "run", recipe_file, "--set", ENGINE, "--set", EVAL, "--step", "best", "--json")
    assert result.exit_code == 0, result.exception
    found, after = json.loads(result.stdout.splitlines()[-1]), read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert measured(found["metrics"]) == measured(after) and found["model"].endswith("checkpoints/step_000001")


def test_status_and_checkpoints_say_which_is_the_best(run: Path) -> None:
    records = [record for record in read_jsonl(run / "metrics.jsonl") if record["step"]]
    best = max(records, key=lambda record: (record["eval/reward/mean"], -record["step"]))["step"]
    status = CliRunner().invoke(app, ["status", str(run)]).stdout
    assert f"evaluation after step 2: reward {records[1]['eval/reward/mean']:.6g} (" in status
    assert f"; the best checkpoint is that of step {best}" in status
    found = json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).stdout)
    assert found["best_checkpoint"] == best and found["evaluation"] == records[1]
    listed = CliRunner().invoke(app, ["checkpoints", "list", str(run)]).stdout.splitlines()
    assert [line.endswith("complete, best by evaluation") for line in listed] == [step == best for step in (1, 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "RECIPE"], "has no section `eval`; add one, such as --set 'eval={source: heldout.jsonl}'"),
        (["RUN", "RECIPE", "--set", EVAL, "--step", "7"], "has no checkpoint of step 7; there are 1, 2"),
        (["RUN", "RECIPE", "--set", EVAL, "--step", "first"], "--step first: give the number of a step, best or last"),
        (["tiny:qwen3", "RECIPE", "--set", EVAL, "--step", "best"], "tiny:qwen3 is not a run; leave --step out"),
        (["nothing", "RECIPE", "--set", EVAL], "nothing holds no run"),
        (["FOLDER", "RECIPE", "--set", EVAL], "holds neither a model (config.json) nor a run"),
    ],
)
def test_what_cannot_be_evaluated(run: Path, words: list[str], said: str) -> None:
    places = {"RUN": str(run), "RECIPE": str(run.parent / "recipe.yaml"), "FOLDER": str(run.parent)}
    result = invoke(*(places.get(word, word) for word in words))
    assert isinstance(result.exception, UsageError) and said in str(result.exception)


def test_a_program_may_give_the_step_as_a_number(run: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint of step 7; there are 1, 2"):
        evaluate(run, run.parent / "recipe.yaml", [EVAL], step=7)


def test_the_recipes_own_model_is_evaluated_at_its_revision(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["model={path: owner/name, revision: abc}"])
    assert target_of(recipe, Path("owner/name"), None).model.revision == "abc"
    assert target_of(recipe, Path("owner/other"), None).model.revision is None


def test_where_samples_cannot_go_is_said_before_anything_is_evaluated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "evaluate_model", lambda *_: pytest.fail("the numbers would be lost"))
    recipe = run.parent / "recipe.yaml"
    result = invoke("tiny:qwen3", recipe, "--set", EVAL, "--out", recipe)
    assert isinstance(result.exception, CheckpointError), result.exception
    assert re.search(r"recipe\.yaml cannot be written: .*; name another folder$", str(result.exception))
