"""The options that several commands share, and the commands that begin with `rlgen recipes` and `rlgen rewards`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def commands(help_text: str, example: str) -> typer.Typer:
    """Returns a word of the command line that a second one follows."""
    return typer.Typer(help=help_text, epilog=f"Example: {example}", no_args_is_help=True, rich_markup_mode=None)


recipes = commands("Recipes to start from.", "rlgen recipes list")
rewards = commands("Rewards of a recipe, without a model.", "rlgen rewards test recipe.yaml")

RecipePath = Annotated[Path, Argument(metavar="RECIPE", help="A YAML file.")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="section.key=value",
        help="Override a value of the recipe, written as YAML; repeatable, the last one wins.",
    ),
]
RunPath = Annotated[Path, Argument(metavar="RUN", help="A run's directory, or the name of one in runs/.")]
CheckpointStep = Annotated[
    str | None, Option(metavar="STEP", help="Step of a run's checkpoint: a number, best (by evaluation) or last. Default: last.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@recipes.command("list", epilog="Example: rlgen recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with rlgen."""
    from rlgen.cli.inspect import list_recipes_command

    list_recipes_command(as_json)


@recipes.command("copy", epilog="Example: rlgen recipes copy smoke && rlgen train smoke.yaml")
def copy_recipe(
    name: Annotated[str, Argument(help="A name from `rlgen recipes list`.")],
    path: Annotated[Path | None, Argument(help="Target, a file or a folder. Default: the working directory.")] = None,
) -> None:
    """Copy a recipe to change it. Never overwrites a file."""
    from rlgen.cli.inspect import copy_command

    copy_command(name, path)


@recipes.command("warm-start", epilog="Example: rlgen recipes warm-start demo-grpo.yaml")
def warm_start_model(
    recipe: RecipePath,
    model: Annotated[str, Option(help="Model to start from.")] = "tiny:qwen3",
    out: Annotated[Path | None, Option(help="Folder to write. Default: the recipe's model.path.")] = None,
    accuracy: Annotated[float, Option(min=0.0, max=1.0, help="Train until this share of the sampled answers is right.")] = 0.35,
) -> None:
    """Make a tiny model that answers some of a recipe's prompts right, by supervised training on the data's answers."""
    from rlgen.cli.inspect import warm_start_command

    warm_start_command(recipe, model, out, accuracy)


@rewards.command("test", epilog="Example: rlgen rewards test recipe.yaml --rows 10")
def test_rewards(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[int, Option(min=1, max=1000, help="Rows of the data to use.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Try a recipe's rewards on four kinds of answers: right, empty, garbage and very long. Times each call. Loads no model."""
    from rlgen.cli.rewards import rewards_test_command

    rewards_test_command(recipe, overrides or [], rows, as_json)
