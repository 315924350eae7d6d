"""Evaluates a model or a run's checkpoint with the `eval` section of a recipe: `rlgen eval`."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlgen.analysis.run import EDGES
from rlgen.cli.export import find_checkpoint
from rlgen.cli.output import echo
from rlgen.errors import ProcessError, UsageError
from rlgen.files import written
from rlgen.metrics import Family, Metric
from rlgen.recipe import Recipe, load_recipe
from rlgen.recipe.models import ModelRecipe
from rlgen.run.console import Terminal, log_to
from rlgen.run.find import RUNS, find_run, holds_run
from rlgen.run.launch import Launch
from rlgen.run.manifest import NAME, check_files, read_manifest

if TYPE_CHECKING:
    from rlgen.setup.data import HeldOut

WIDTH = 24  # characters of the column of names


class Target(NamedTuple):
    model: ModelRecipe
    step: int  # of a checkpoint; 0 for a model
    adapter: Path | None  # checkpoint of an adapter, which is applied to the model; None: the model alone


def eval_command(name: Path, path: Path, overrides: list[str], step: str | None, out: Path | None, as_json: bool) -> None:
    target, held_out, metrics = evaluate_target(name, path, overrides, step, out, Terminal(quiet=as_json).say)
    if as_json:
        facts = {"model": str(target.adapter or target.model.path), "step": target.step, "source": held_out.rows.source}
        echo(json.dumps({**facts, "trained_on_too": held_out.overlap, "metrics": metrics}))
        return
    echo(f"{target.adapter or target.model.path}: {len(held_out.prompts)} prompts of {held_out.rows.source}")
    print_metrics(metrics)


def evaluate_target(
    name: Path, path: Path, overrides: Sequence[str], step: str | None, out: Path | None, say: Callable[[str], None]
) -> "tuple[Target, HeldOut, dict[str, Any]]":
    """Returns what was evaluated, on which prompts, and the metrics."""
    recipe = load_recipe(path, overrides).recipe
    if recipe.eval is None:
        raise UsageError(f"{path} has no section `eval`; add one, such as --set 'eval={{source: heldout.jsonl}}'")
    if (world := Launch.of(os.environ).world) > 1:
        raise ProcessError(f"{world} processes run, but `rlgen eval` takes one: start it without a launcher")
    target = target_of(recipe, name, step)
    if out is not None:  # first: it would be a pity to lose the numbers of an evaluation
        with written(out, remedy="name another folder"):
            out.mkdir(parents=True, exist_ok=True)
    from rlgen.models.tiny import cache_dir

    logs = cache_dir() / "eval"  # kept after the command: error messages name a server's log
    logs.mkdir(parents=True, exist_ok=True)
    log_to(logs / "rlgen.log")  # keeps the libraries' log output out of the terminal
    from rlgen.models.load import WEIGHT_SHARDS
    from rlgen.run.checkpoint import whole_checkpoint
    from rlgen.setup.evaluation import evaluate_model

    location = Path(target.model.path)
    if (location / WEIGHT_SHARDS).is_dir():
        check_files(location, hashes=True)
    with whole_checkpoint(location, logs / f"whole_{os.getpid()}") as folder:
        model = target.model.model_copy(update={"path": str(folder)})
        recipe = recipe.model_copy(update={"model": model})
        return target, *evaluate_model(recipe, target.adapter, target.step, logs, out, say)


def target_of(recipe: Recipe, name: Path, step: str | None) -> Target:
    """Returns what is to be evaluated: a run's checkpoint, one checkpoint, or a model. Raises UsageError if there is none."""
    place = name.expanduser()
    if holds_run(place) or holds_run(RUNS / name) or (place / NAME).is_file():
        return checkpoint_of(recipe, find_checkpoint(place, step))
    if step is not None:
        raise UsageError(f"--step: {name} is not a run; leave --step out")
    if place.is_dir() and not (place / "config.json").is_file():
        raise UsageError(f"{name} holds neither a model (config.json) nor a run; name another folder")
    if not place.exists() and str(name).count("/") != 1 and not str(name).startswith("tiny:"):
        find_run(name)  # raises the error that lists the runs
    location = str(place.resolve()) if place.is_dir() else str(name)
    return Target(model=whole_model(recipe, location), step=0, adapter=None)


def checkpoint_of(recipe: Recipe, checkpoint: Path) -> Target:
    """Returns a checkpoint as what is to be evaluated. An adapter needs the model section of its run, which names its base."""
    step = read_manifest(checkpoint).step
    if (checkpoint / "config.json").is_file():
        return Target(model=whole_model(recipe, str(checkpoint)), step=step, adapter=None)
    resolved = checkpoint.parent.parent / "resolved.yaml"
    if not resolved.is_file():
        raise UsageError(f"{checkpoint} is an adapter, but {resolved} with its base is missing; merge it with `rlgen export`")
    return Target(model=load_recipe(resolved, resolved=True).recipe.model, step=step, adapter=checkpoint)


def whole_model(recipe: Recipe, location: str) -> ModelRecipe:
    """Returns the recipe's section `model` for a model at `location`, without an adapter. The recipe's own keeps its revision."""
    revision = recipe.model.revision if location == recipe.model.path else None
    return recipe.model.model_copy(update={"path": location, "lora": None, "quantization": None, "revision": revision})


def print_metrics(metrics: Mapping[str, Any]) -> None:
    echo(f"{'':<{WIDTH}}{'mean':>10}  95 % interval")
    keys = [Metric.EVAL_REWARD_MEAN, *(key for key in Family.EVAL_PASS.keys(metrics) if not key.endswith(EDGES))]
    keys += [*Family.EVAL_REWARD.keys(metrics), Metric.EVAL_MEAN_TOKENS, Metric.EVAL_TRUNCATED, Metric.EVAL_DELTA_MAX]
    for key in keys:
        value, low, high = (metrics.get(f"{key}{edge}") for edge in ("", *EDGES))
        if value is not None:
            interval = "" if low is None or high is None else f"  {low:.4g} to {high:.4g}"
            echo(f"{key.removeprefix('eval/'):<{WIDTH}}{value:>10.4g}{interval}")
    for key in (Metric.EVAL_REWARD_UNSCORED, *Family.EVAL_FAILED.keys(metrics)):
        if metrics.get(key):
            echo(f"{key.removeprefix('eval/'):<{WIDTH}}{metrics[key]:>10}")
