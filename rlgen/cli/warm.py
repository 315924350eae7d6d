"""Makes the model that a recipe of a built-in task starts from: `rlgen recipes warm-start`."""

from pathlib import Path

from rlgen.cli.output import echo
from rlgen.errors import UsageError
from rlgen.recipe import load_recipe
from rlgen.recipe.rules import is_local_model


def warm_start_command(path: Path, model: str, out: Path | None, accuracy: float) -> None:
    """Trains a small model on answers of the recipe's task, and writes it where the recipe's `model.path` is.

    Args:
        model: what to start from.
        out: another folder to write.
        accuracy: share of sampled answers that are right at the end.

    Raises:
        UsageError: the recipe has no task, names no folder, or the folder is there.
        SetupError: the model cannot be loaded, or does not learn it.
        CheckpointError: the folder cannot be written.
    """
    recipe = load_recipe(path).recipe
    if recipe.task is None:
        raise UsageError(f"{path}: data.source is no task:NAME, whose answers rlgen knows; start from a model that was trained")
    if out is None and not is_local_model(recipe.model.path):
        raise UsageError(f"{path}: model.path {recipe.model.path} is no folder to write; name one with --out")
    folder = (out or Path(recipe.model.path)).expanduser().resolve()
    if folder.exists():
        raise UsageError(f"{folder} exists already; it is not written over: name another folder with --out")
    started = load_recipe(path, [f"model.path={model}"]).recipe

    from transformers.utils.logging import disable_progress_bar

    from rlgen.opening.warm import warm_start

    disable_progress_bar()
    right = warm_start(started, folder, accuracy, echo)
    echo(f"{folder} written: {right:.0%} of its sampled answers are right; next: rlgen train {path}")
