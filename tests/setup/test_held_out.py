"""The rows of evaluations are opened before a weight is loaded: what they share with training is counted and said."""

import json
from pathlib import Path

import pytest
from conftest import Proof
from helpers.recipes import written
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.engines.plan import EnginePlan
from rlgen.errors import DataError
from rlgen.recipe import load_recipe
from rlgen.setup.data import Data, open_data

RECIPE = """\
model: {path: "tiny:qwen3", dtype: float32}
data: {source: train.jsonl, columns: {prompt: question, answer: answer}, chat: true}
rewards: [{use: exact_match}]
rollout: {prompts_per_step: 2, max_completion_tokens: 12}
eval: {source: heldout.jsonl}
"""


def write(path: Path, questions: list[str], **columns: str) -> None:
    path.write_text("".join(json.dumps({"question": q, "answer": "1", **columns}) + "\n" for q in questions))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", ["one", "two", "three"])
    write(tmp_path / "heldout.jsonl", ["two", "four", "three", "a much longer question than any of the training"])
    return written(tmp_path, RECIPE)


def opened(recipe: Path, *overrides: str) -> Data:
    return open_data(load_recipe(recipe, overrides).recipe)


@pytest.mark.fault(24)
def test_rows_that_are_trained_on_are_counted_and_said(recipe: Path, proof: Proof) -> None:
    data = opened(recipe)
    assert data.held_out is not None and data.held_out.overlap == 2
    (said,) = [line for line in data.warnings if line.startswith("eval: ")]
    assert said == "eval: 2 of 4 prompts are trained on, too: on them an evaluation shows what was memorised"
    first = opened(recipe, "eval.limit=1").held_out
    assert first is not None and (len(first.prompts), first.overlap) == (1, 1)
    # of what the model sees, not of the rows: another question with the same text around it is another prompt
    write(recipe.parent / "heldout.jsonl", ["two "], answer="2")
    none = opened(recipe)
    assert none.held_out is not None and none.held_out.overlap == 0 and none.warnings == ()
    proof(said)


def test_prompts_longer_than_those_of_training_fit_into_the_engine(recipe: Path) -> None:
    data = opened(recipe, "engine={kind: colocated}")
    assert data.held_out is not None
    longest, trained = data.held_out.prompts.longest, data.prompts.longest
    assert longest > trained + 30
    assert data.recipe.max_row_tokens == trained + 12 and data.recipe.engine_row_tokens == longest + 12
    assert EnginePlan.of(data.recipe.engine_needs, data.location).max_model_len == longest + 12
    assert [prompt.columns["question"] for prompt in data.held_out.prompts.take(0, 2)] == ["two", "four"], "in their order"


def test_rows_of_a_task_are_others_than_those_of_training(recipe: Path) -> None:
    data = opened(recipe, "data={source: 'task:sort', options: {max_length: 9, min_length: 9}}", "eval={limit: 50}")
    assert data.held_out is not None and (len(data.held_out.prompts), data.held_out.overlap) == (50, 0)


def test_a_mistake_names_the_key_of_eval(recipe: Path) -> None:
    with pytest.raises(DataError, match=r"eval.columns.answer: .*heldout.jsonl has no column `label`; .*set eval.columns.answer"):
        opened(recipe, "eval.columns={prompt: question, answer: label}")
    (recipe.parent / "heldout.jsonl").unlink()
    with pytest.raises(DataError, match=r"^eval.source: .*heldout.jsonl: there is no such file"):
        opened(recipe)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("eval.source=heldot.jsonl", "eval.source: {folder}/heldot.jsonl does not exist; did you mean `{folder}/heldout.jsonl`?"),
        ("eval.source=dat.jsonl", "eval.source: {folder}/dat.jsonl does not exist; did you mean `{folder}/data.jsonl`?"),
        ("eval.columns={prompt: qestion}", "eval.columns.prompt: {folder}/heldout.jsonl has no column `qestion`"),
        ("eval.rewards=[{use: 'judge.py:f'}]", "judge.py cannot be read"),
    ],
)
def test_validate_looks_at_the_evaluation_too(recipe: Path, override: str, said: str) -> None:
    (recipe.parent / "data.jsonl").touch()
    result = CliRunner().invoke(app, ["validate", str(recipe), "--set", override])
    assert said.format(folder=recipe.parent) in str(result.exception) and getattr(result.exception, "exit_code", 0) == 2


def test_validate_counts_the_rows_of_the_evaluation(recipe: Path) -> None:
    shown = CliRunner().invoke(app, ["validate", str(recipe)]).stdout
    assert "eval: 4 read, " in shown and "4 used; 2 are trained on, too" in shown
    report = json.loads(CliRunner().invoke(app, ["validate", str(recipe), "--json"]).stdout.splitlines()[-1])
    assert report["eval"]["trained_on_too"] == 2 and report["eval"]["counts"]["used"] == 4
