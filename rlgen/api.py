"""The Python interface: what the commands `train`, `eval` and `rollouts` do, for programs and notebooks.

from rlgen import Callback, evaluate, load_recipe, rollouts, train
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgen.callbacks import Callback, StopTraining
from rlgen.recipe import LoadedRecipe, Recipe
from rlgen.recipe import load_recipe as load
from rlgen.run.console import Progress

if TYPE_CHECKING:
    from rlgen.analysis.run import Run

__all__ = ["Callback", "LoadedRecipe", "Recipe", "StopTraining", "evaluate", "load_recipe", "rollouts", "train"]


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe. Returns it with all defaults; it is frozen.

    Args:
        overrides: "section.key=value", as after --set; the last one wins.

    Raises:
        RecipeError: with all mistakes of the recipe.
    """
    return load(Path(recipe), overrides).recipe


def train(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    max_steps: int | None = None,
    run_dir: str | Path | None = None,
    clean: bool = False,
    progress: Progress = "auto",
) -> "Run":
    """Trains as `rlgen train` does, in this process, and returns what the run has written. Call it from the main thread.

    Under torchrun, call it in each process; the callbacks run in the main process.

    Args:
        recipe: the file.
        overrides: "section.key=value", as after --set; the last one wins.
        resume: go on with the run that is in the folder.
        max_steps: instead of run.steps.
        run_dir: folder of the run, instead of run.dir/run.name.
        clean: delete what an earlier run left in the folder.

    Raises:
        RlgenError: as the command ends with an exit code; `Stopped` (75) after a signal or `StopTraining`.
    """
    from rlgen.analysis.run import read_run
    from rlgen.setup.attempt import train as train_attempt
    from rlgen.setup.reopen import TrainOptions

    options = TrainOptions(
        overrides=overrides,
        max_steps=max_steps,
        run_dir=None if run_dir is None else Path(run_dir),
        resume=resume,
        clean=clean,
        progress=progress,
        callbacks=callbacks,
    )
    return read_run(train_attempt(Path(recipe), options))


def evaluate(
    name: str | Path,
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | str | None = None,
    out: str | Path | None = None,
) -> Mapping[str, Any]:
    """Evaluates a model, a run's checkpoint or a checkpoint's folder with the `eval` section of a recipe, as `rlgen eval` does.

    Args:
        step: of a run's checkpoint: a number, "best" or "last"; None: the last.
        out: folder for the samples; None: they are not written.

    Returns:
        The metrics, such as eval/reward/mean.

    Raises:
        RlgenError: as the command ends with an exit code.
    """
    from rlgen.cli.evaluate import evaluate_target

    which, folder = None if step is None else str(step), None if out is None else Path(out)
    return evaluate_target(Path(name), Path(recipe), overrides, which, folder, lambda text: None)[-1]


def rollouts(run: str | Path, step: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Yields the samples of a run as dicts, with the columns of `rollouts/`. One step is in memory at a time.

    Args:
        run: name in runs/, or folder.
        step: the only one to read; None: all that were written.

    Raises:
        UsageError: there is no such run.
        CheckpointError: the step was not written, or its file is damaged.
    """
    from rlgen.rollout.read import read_rollouts, rollout_steps
    from rlgen.run.find import find_run

    folder = find_run(Path(run))
    for one in rollout_steps(folder / "rollouts") if step is None else [step]:
        yield from read_rollouts(folder, one).to_pylist()
