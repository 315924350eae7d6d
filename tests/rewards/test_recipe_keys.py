"""What a recipe may say about its rewards, and what is known of them without running their code."""

from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table
from pyarrow.parquet import write_table

from rlgen.cli.validate import validate_command
from rlgen.data.tasks import generate
from rlgen.errors import RecipeError
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.recipe.data import TASK_COLUMNS, TASKS


def test_what_is_written_is_what_is_loaded(recipe_file: Path) -> None:
    entry = "rewards=[{use: exact_match, timeout: 2.5, on_error: skip, max_error_fraction: 0.1}, {use: numeric_match}]"
    loaded = load_recipe(recipe_file, [entry, "scoring={workers: 3, memory_gib: 0.5, import_timeout: 5.0, concurrency: 7}"])
    first, second = loaded.recipe.rewards
    assert (first.timeout, first.on_error, first.max_error_fraction) == (2.5, "skip", 0.1)
    assert (second.timeout, second.on_error) == (30.0, "fail")
    said = {"workers": 3, "memory_gib": 0.5, "import_timeout": 5.0, "concurrency": 7}
    assert loaded.recipe.scoring.model_dump() == said
    resolved = dump_recipe(loaded.recipe)
    assert resolved.count("max_error_fraction") == 1, "it has no effect in the second"
    again = recipe_file.with_name("again.yaml")
    again.write_text(resolved)
    assert dump_recipe(load_recipe(again).recipe) == resolved


@pytest.mark.parametrize("concurrency", ["0", "-1", "2.5", "true", "100000"])
def test_how_many_async_calls_run_at_once_is_a_positive_number(recipe_file: Path, concurrency: str) -> None:
    with pytest.raises(RecipeError, match=r"scoring\.concurrency"):
        load_recipe(recipe_file, [f"scoring.concurrency={concurrency}"])


def test_a_budget_without_an_effect_is_refused(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"rewards\.0\.max_error_fraction has no effect when on_error is fail"):
        load_recipe(recipe_file, ["rewards=[{use: exact_match, max_error_fraction: 0.1}]"])


@pytest.mark.fault(89)
@pytest.mark.parametrize(
    "use", ["https://example.com/rewards.py:f", "hf://user/repo/rewards.py:f", "user/repo:f", "git+ssh://host/r.py:f"]
)
def test_code_of_the_hub_or_the_web_is_refused(recipe_file: Path, proof: Any, use: str) -> None:
    with pytest.raises(RecipeError, match="--set 1"):
        load_recipe(recipe_file, [f"rewards=[{{use: '{use}'}}]"])
    proof(f"{use} was refused as it was read")


@pytest.mark.fault(89)
def test_a_reward_from_elsewhere_is_named(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory, proof: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.py"
    for file in (elsewhere, recipe_file.parent / "mine.py"):
        file.write_text("def f(completion): return 1.0\n")
    outside = load_recipe(recipe_file, [f"rewards=[{{use: '{elsewhere}:f'}}]"]).notices
    inside = load_recipe(recipe_file, ["rewards=[{use: 'mine.py:f'}]"]).notices
    said = [notice for notice in outside if "lies outside of the recipe's folder" in notice]
    assert len(said) == 1 and str(elsewhere) in said[0] and not [n for n in inside if "outside" in n]
    proof(said[0][-60:])
    rollout = load_recipe(recipe_file, [f"rollout.use={elsewhere}:f"])
    assert rollout.recipe.rollout.use == f"{elsewhere}:f"
    assert f"rollout.use: {elsewhere} lies outside of the recipe's folder" in " ".join(rollout.notices)


def test_the_columns_of_tasks_are_what_their_rows_have() -> None:
    own = TASKS.keys() - {"gym"}  # of another package
    assert {name: tuple(generate(name, TASKS[name](), 0)[0]) for name in own} == {name: TASK_COLUMNS[name] for name in own}


MINE = """
import no_such_module_anywhere  # what can be known without running it is said first
def f(completion, anser): return 1.0
def g(completion, *, limit): return 1.0
async def h(completions, target, **rest): return [1.0]
"""


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{use: 'mine.py:f'}", "did you mean `answer`?"),
        ("{use: 'mine.py:g'}", "needs `limit`"),
        ("{use: 'mine.py:h'}", "needs `target`"),
        ("{use: regex_match}", "needs `pattern`"),
        ("{use: 'mine.py:g', args: {limit: 3}}", "No module named 'no_such_module_anywhere'"),
        ("{use: exact_match}", None),
    ],
)
def test_validate_knows_what_a_reward_needs(recipe_file: Path, proof: Any, entry: str, said: str | None) -> None:
    (recipe_file.parent / "mine.py").write_text(MINE)
    if said is None:
        validate_command(recipe_file, [f"rewards=[{entry}]"], False, 0)
        proof("what it needs is there: accepted")
        return
    with pytest.raises(RecipeError) as caught:
        validate_command(recipe_file, [f"rewards=[{entry}]"], False, 0)
    assert said in str(caught.value) and caught.value.exit_code == 2
    proof(said)


@pytest.mark.parametrize("module", ["beside.py", "beside/__init__.py"])
def test_a_module_beside_a_reward_needs_pythonpath(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    folder = recipe_file.parent
    (folder / "mine.py").write_text("from beside import k\ndef f(completion): return k\n")
    (folder / module).parent.mkdir(exist_ok=True)
    (folder / module).write_text("k = 1.0\n")
    rewards = "rewards=[{use: 'mine.py:f'}]"
    with pytest.raises(
        RecipeError, match=f"No module named 'beside' .*; to import modules beside this file, set PYTHONPATH={folder}"
    ):
        validate_command(recipe_file, [rewards], False, 0)
    monkeypatch.syspath_prepend(str(folder))  # as PYTHONPATH does at the start; workers take over the path
    validate_command(recipe_file, [rewards], False, 0)


@pytest.mark.fault(20)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_validate_knows_the_columns_of_a_file(recipe_file: Path, proof: Any, name: str) -> None:
    (recipe_file.parent / "a.jsonl").write_text('{"q": "1+1", "a": 2}\n')
    (recipe_file.parent / "a.csv").write_text("q,a\n1+1,2\n")
    write_table(Table.from_pylist([{"q": "1+1", "a": 2}]), recipe_file.parent / "a.parquet")
    data = f"data={{source: ./{name}, columns: {{prompt: q}}}}"
    with pytest.raises(RecipeError, match=r"exact_match needs `answer`, which is no column of the data; .*there are a, "):
        validate_command(recipe_file, [data, "rewards=[{use: exact_match}]"], False, 0)
    validate_command(recipe_file, [data, "data.columns.answer=a", "rewards=[{use: exact_match}]"], False, 0)
    proof(f"{name} has the columns q and a")
