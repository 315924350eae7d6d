"""Makes a model that a recipe can start from, by training on answers first: `rlgen recipes warm-start`."""

import shlex
from pathlib import Path

from rlgen.cli.output import echo
from rlgen.errors import UsageError
from rlgen.recipe import load_recipe
from rlgen.recipe.rules import is_local_model


def warm_start_command(path: Path, model: str, out: Path | None, accuracy: float) -> None:
    """Trains a small model on the answers of the recipe's data, and writes it where the recipe's `model.path` is.

    Args:
        model: the model to start from.
        out: another folder to write.
        accuracy: share of sampled answers that are right at the end.
    """
    recipe = load_recipe(path).recipe
    if recipe.task is None and recipe.data.columns.answer is None:
        raise UsageError(f"{path}: data.columns.answer names no column of answers to learn from; add `answer: COLUMN`")
    if out is None and not is_local_model(recipe.model.path):
        raise UsageError(f"{path}: model.path {recipe.model.path} is not a folder that can be written; name one with --out")
    folder = (out or Path(recipe.model.path)).expanduser().resolve()
    if folder.exists():
        raise UsageError(f"{folder} exists already; name another folder with --out")
    started = load_recipe(path, [f"model.path={model}"]).recipe

    from transformers.utils.logging import disable_progress_bar

    from rlgen.setup.warm import warm_start

    disable_progress_bar()
    right = warm_start(started, folder, accuracy, echo)
    elsewhere = "" if folder == Path(recipe.model.path) else f" --set model.path={shlex.quote(str(folder))}"
    echo(f"{folder} written: {right:.0%} of its sampled answers are right; next: rlgen train {shlex.quote(str(path))}{elsewhere}")
