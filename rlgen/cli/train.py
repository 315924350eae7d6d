"""`rlgen train`."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import yaml

from rlgen.errors import ProcessError, RlgenError, Stopped, UsageError
from rlgen.recipe import LoadedRecipe, Recipe, dump_recipe, load_recipe
from rlgen.run.directory import RunDirectory
from rlgen.run.files import write_text

# What may change between the attempts of one run.
MAY_CHANGE = ("run.steps", "run.dir", "run.name", "checkpoint.", "sentinel.", "engine.")


def train_command(
    recipe: Path, overrides: list[str], resume: bool, dry_run: bool, max_steps: int | None, run_dir: Path | None
) -> None:
    """Trains, or with `dry_run` only writes the resolved recipe.

    Raises:
        RlgenError: with its exit code, which `status.json` holds too.
    """
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ProcessError(f"{processes} processes were started; this version of rlgen trains in one: start `rlgen train` alone")
    if max_steps is not None:
        overrides = [*overrides, f"run.steps={max_steps}"]
    if run_dir is not None:
        place = run_dir.expanduser().resolve()
        overrides = [*overrides, f"run.dir='{place.parent}'", f"run.name='{place.name}'"]
    loaded = load_recipe(recipe, overrides)
    for notice in loaded.notices:
        print_line(f"note: {notice}")
    path = loaded.recipe.run_path
    resolved = dump_recipe(loaded.recipe)
    if dry_run:
        if (path / "status.json").exists():
            raise UsageError(f"{path} holds a run, which a dry run would change; take another name, or `rlgen show --resolved`")
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / "resolved.yaml", resolved)
        print_line(f"{path / 'resolved.yaml'} written; nothing was started")
        return
    directory = reopen(path, loaded, resolved) if resume else RunDirectory.create(path, loaded.text, resolved)
    step, steps = int(directory.status().get("step", 0)), loaded.recipe.run.steps
    try:
        directory.write_status("starting", step, steps)
        run(loaded.recipe, directory, resume)
        directory.write_status("done", steps, steps, exit_code=0)
    except BaseException as error:
        code = error.exit_code if isinstance(error, RlgenError) else 130 if isinstance(error, KeyboardInterrupt) else 70
        state = "stopped" if isinstance(error, Stopped) else "failed"
        directory.write_status(state, int(directory.status().get("step", 0)), steps, code, str(error))
        raise
    finally:
        directory.close()


def reopen(path: Path, loaded: LoadedRecipe, resolved: str) -> RunDirectory:
    """The directory of an earlier attempt at the same run.

    Raises:
        UsageError: no run is there, or the recipe says another run.
    """
    directory = RunDirectory.reopen(path)
    before, now = (flat(yaml.safe_load(text)) for text in (directory.resolved.read_text(encoding="utf-8"), resolved))
    free = MAY_CHANGE if loaded.recipe.optim.schedule == "constant" else MAY_CHANGE[1:]
    changed = [
        f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(free)
    ]
    if changed:
        directory.close()
        raise UsageError(f"--resume: {path} was another run: {'; '.join(changed)}. Undo this, or start under another name")
    write_text(directory.resolved, resolved)
    return directory


def run(recipe: Recipe, directory: RunDirectory, resume: bool) -> None:
    """Builds everything and runs the loop. Heavy imports happen here."""
    from rlgen.run.checkpoint import Checkpoints
    from rlgen.run.console import Console
    from rlgen.run.signals import StopRequest

    checkpoint = Checkpoints(directory.checkpoints, recipe.checkpoint.keep).newest()
    done = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
    console = Console(recipe.run.steps, done)
    if done >= recipe.run.steps:
        console.say(f"{directory.path}: already complete, {done} steps")
        return
    if resume:
        directory.cut(done)
        console.say(f"resuming after step {done}" + ("" if done else ": no checkpoint was written yet"))
    log_to(directory.logs / "rlgen.log")
    from rlgen.trainers.build import build_trainer

    with console, StopRequest().listening() as stop:
        trainer, done = build_trainer(recipe, directory, checkpoint, console)
        try:
            trainer.run(done, stop)
        finally:
            trainer.close()
        console.say(f"done: {directory.path}")


def log_to(path: Path) -> None:
    """Library output goes to the run's log, not to the screen."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, logging.FileHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """{"run.seed": 0, ...}"""
    if isinstance(data, dict):
        return {k: v for key, value in data.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}
    return {prefix: data}


def print_line(text: str) -> None:
    import typer

    typer.echo(text)
