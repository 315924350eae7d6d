"""The section `eval`: what it leaves out is as in training, and what makes no sense is refused."""

from pathlib import Path

import pytest
from helpers.recipes import problems, written

from rlgen.errors import RecipeError
from rlgen.recipe import Recipe, dump_recipe, load_recipe
from rlgen.recipe.evaluation import data_of, eval_rewards, seed_of, temperature_of
from rlgen.recipe.sizes import eval_prompt_limit, fitted_eval

OPEN = """\
model: {path: org/model}
data: {source: rows.jsonl, columns: {prompt: question, answer: answer}, chat: true, shuffle: true, limit: 7}
rewards: [{use: exact_match}]
rollout: {temperature: 0.8, max_completion_tokens: 100}
eval: {source: heldout.jsonl}
"""


def load(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(written(tmp_path, OPEN), overrides).recipe


def test_what_is_left_out_is_as_in_training(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert recipe.eval is not None
    data = data_of(recipe.eval, recipe.data)
    assert data.source == str(tmp_path / "heldout.jsonl") and data.columns == recipe.data.columns and data.chat
    assert (data.limit, data.shuffle) == (None, False), "its own rows, in their order"
    assert eval_rewards(recipe.eval, recipe.rewards) == recipe.rewards
    assert temperature_of(recipe.eval, recipe.rollout.temperature) == 0
    several = load(tmp_path, "eval.group_size=4", "eval.rewards=[{use: 'r.py:f'}]", "eval.columns={prompt: q}")
    assert several.eval is not None and temperature_of(several.eval, several.rollout.temperature) == 0.8
    assert eval_rewards(several.eval, several.rewards)[0].use == f"{tmp_path}/r.py:f"
    assert data_of(several.eval, several.data).columns.answer is None
    assert len({seed_of(recipe.run.seed), seed_of(1), recipe.run.seed, 1}) == 4


def test_another_split_or_other_rows_of_a_task_need_no_source(tmp_path: Path) -> None:
    hub = load(tmp_path, "data={source: openai/gsm8k, subset: main, revision: abc}", "eval={}")
    assert hub.eval is not None
    data = data_of(hub.eval, hub.data)
    assert (data.source, data.subset, data.split, data.revision) == ("openai/gsm8k", "main", "test", "abc")
    other = load(tmp_path, "data={source: openai/gsm8k, subset: main, revision: abc}", "eval={source: org/rows}")
    assert other.eval is not None
    assert (data_of(other.eval, other.data).subset, data_of(other.eval, other.data).revision) == (None, None)
    task = load(tmp_path, "data={source: 'task:sort', options: {max_length: 9}}", "eval={limit: 4}")
    assert task.eval is not None and data_of(task.eval, task.data).options == {"max_length": 9}


def test_a_resolved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    text = dump_recipe(load(tmp_path, "eval={source: heldout.jsonl, group_size: 2, rewards: [{use: exact_match}]}"))
    (tmp_path / "resolved.yaml").write_text(text)
    assert "split" not in text[text.index("\neval:") :] and "top_p" in text
    assert dump_recipe(load_recipe(tmp_path / "resolved.yaml").recipe) == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["eval={}"], "eval names only rows that are trained on; set eval.source to a held-out file"),
        (["data={source: org/rows, split: test}", "eval={}"], "eval names only rows that are trained on"),
        (["eval.split=test"], "eval.split has no effect with local files"),
        (["eval.options={size: 3}"], "eval.options has no effect without a task: source"),
        (["eval.source=task:srot"], "there is no task:srot; did you mean `sort`?"),
        (["eval={source: 'task:sort', options: {sice: 3}}"], "`sice` is not a key of `eval.options`; did you mean `size`?"),
        (
            ["eval={source: 'task:sort', options: {min_length: 4, max_length: 3}}"],
            "eval.options.min_length 4 is above eval.options.max_length 3; set eval.options.min_length to 3 or less",
        ),
        (["eval.group_size=4", "eval.temperature=0"], "all 4 completions of a prompt are then equal"),
        (["eval.temperature=0.001"], "must be 0.01 or more"),
        (["eval.top_p=0.9"], "eval.top_p has no effect: a greedy completion takes the most probable tokens"),
        (
            ["eval.rewards=[{use: exact_match}, {use: exact_match}]"],
            "two rewards are called `exact_match`; set eval.rewards.1.name",
        ),
        (["eval.rewards=[{use: exakt}]"], "`exakt` is not a built-in reward"),
        (["eval.rewards=[{use: exact_match, wieght: 2}]"], "`wieght` is not a key of `eval.rewards.0`; did you mean `weight`?"),
        (["eval.rewards=[{use: length, max_error_fraction: 0.5}]"], "eval.rewards.0.max_error_fraction has no effect"),
        (["eval=heldout.jsonl"], "write `eval: {source: heldout.jsonl}`"),
        (["eval.steps=5"], "`steps` is not a key of `eval`; did you mean `every`?"),
        (["trainer.eval_on_start=true"], "renamed to `eval.at_start`"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, changes: list[str], said: str) -> None:
    assert any(said in line for line in problems(written(tmp_path, OPEN), *changes))


@pytest.mark.parametrize(
    ("overrides", "positions", "limit", "longest", "prompt", "completion", "row"),
    [
        ([], 4096, 3996, 300, 300, None, 400),
        ([], None, None, 300, 300, None, 400),
        ([], 300, 200, 150, 150, None, 250),
        (["rollout.max_completion_tokens=280"], 300, 150, 140, 140, 160, 300),  # completions give way to the longest prompt
        (["eval.max_completion_tokens=250"], 300, 50, 50, 50, 250, 300),
        (["eval.max_prompt_tokens=30"], 4096, 30, 28, 30, None, 130),
        (["eval.max_completion_tokens=20"], 4096, 4076, 9, 9, 20, 110),  # rows of training are longer
        (["engine.max_model_len=120"], 4096, 60, 60, 60, 60, 120),
    ],
)
def test_sizes_of_an_evaluation_follow(
    tmp_path: Path,
    overrides: list[str],
    positions: int | None,
    limit: int | None,
    longest: int,
    prompt: int,
    completion: int | None,
    row: int,
) -> None:
    recipe = load(tmp_path, "data.max_prompt_tokens=10", *overrides)
    assert recipe.eval is not None
    assert eval_prompt_limit(recipe, recipe.eval, positions).tokens == limit
    found = fitted_eval(recipe, recipe.eval, positions, longest)
    assert (found.max_prompt_tokens, found.max_completion_tokens) == (prompt, completion)
    whole = recipe.model_copy(update={"eval": found})
    assert whole.engine_row_tokens == max(row, whole.max_row_tokens)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recipe = load(tmp_path, "eval.max_completion_tokens=280", "eval.max_prompt_tokens=30")
    assert recipe.eval is not None
    with pytest.raises(RecipeError, match=r"eval.max_prompt_tokens 30 \+ eval.max_completion_tokens 280 = 310, but model.path"):
        eval_prompt_limit(recipe, recipe.eval, 300)
