"""Mistakes in the section `sinks`, and what of it is left out of the resolved recipe."""

import re
from pathlib import Path

import pytest
from conftest import RECIPE
from helpers.recipes import problems

from rlgen.cli.docs import page_text
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.setup.reopen import MAY_CHANGE, changes


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        ("[{kind: wandb, projct: x}]", "`projct` is not a key of `sinks.0` (kind: wandb); did you mean `project`?"),
        ("[{kind: mlflow}, {kind: wandb, folder: x}]", "`folder` is not a key of `sinks.1` (kind: wandb)"),
        ("[{kind: wandb, uri: x}]", "it is a key of kind mlflow"),
        ("[{kind: wandbb}]", "sinks.0.kind: 'wandbb' is not one of trackio, wandb, tensorboard, mlflow; did you mean `wandb`?"),
        ("[{project: x}]", "`sinks.0.kind` is missing; such as `kind: wandb`"),
        ("wandb", "write `sinks: [{kind: wandb}]`"),
        ("[wandb]", "write `{kind: wandb}`"),
        ("[{kind: wandb}, {kind: wandb}]", "sinks has a second entry of kind wandb"),
        ("[{kind: wandb, mode: disabled}]", "sinks.0.mode: 'disabled' is not one of online, offline"),
        ("[{kind: wandb, api_key: abcdefghijklmnop}]", "`api_key` is not a key of `sinks.0` (kind: wandb)"),
        ("[{kind: mlflow, uri: 'https://me:word@host/'}]", "sinks.0.uri holds a secret"),
        ("[{kind: wandb, samples: -1}]", "sinks.0.samples: must be greater than or equal to 0"),
    ],
)
def test_a_mistake(recipe_file: Path, sinks: str, said: str) -> None:
    recipe_file.write_text(f"{RECIPE}sinks: {sinks}\n")
    assert any(said in line for line in problems(recipe_file))


def test_tables_without_rollouts(recipe_file: Path) -> None:
    recipe_file.write_text(f"{RECIPE}rollouts: {{every: 0}}\nsinks: [{{kind: wandb}}]\n")
    assert "samples" not in dump_recipe(load_recipe(recipe_file).recipe)
    assert "samples has no effect with" in problems(recipe_file, "sinks.0.samples=3")[0]


def test_a_resumed_run_may_have_other_sinks() -> None:
    without, other = {"sinks": []}, {"sinks": [{"kind": "wandb", "tags": ["a"]}]}
    assert changes(without, other, MAY_CHANGE) == changes(other, without, MAY_CHANGE) == []
    assert changes(without, other, ()) != []


def test_the_examples_of_the_page_are_valid(recipe_file: Path) -> None:
    blocks = re.findall(r"```yaml\n(sinks:.*?)```", page_text("sinks"), re.DOTALL)
    kinds: set[str] = set()
    for block in blocks:
        recipe_file.write_text(f"{RECIPE}{block}")
        kinds |= {sink.kind for sink in load_recipe(recipe_file).recipe.sinks}
    assert len(blocks) == 5 and kinds == {"trackio", "wandb", "tensorboard", "mlflow"}
