"""`rlgen train`, as one process or as one of several."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlgen.errors import RlgenError, Stopped, UsageError
from rlgen.recipe import LoadedRecipe, Recipe, dump_recipe, load_recipe
from rlgen.recipe.fields import moment
from rlgen.recipe.models import ProcessesRecipe
from rlgen.run.deadline import Deadline
from rlgen.run.directory import RunDirectory
from rlgen.run.files import write_text
from rlgen.run.launch import Launch, check_launch, parents, restarted
from rlgen.run.signals import StopNow, StopRequest

if TYPE_CHECKING:
    from rlgen.processes import Processes

# What may change between the attempts of one run.
MAY_CHANGE = ("run.steps", "run.dir", "run.name", "run.must_save_by", "checkpoint.", "sentinel.", "engine.", "processes.")


def train_command(
    recipe: Path, overrides: list[str], resume: bool, dry_run: bool, max_steps: int | None, run_dir: Path | None
) -> None:
    """Trains, or with `dry_run` only writes the resolved recipe. Each process that a launcher started comes here.

    Raises:
        RlgenError: with its exit code, which `status.json` holds too.
    """
    launch, began = Launch.of(os.environ), time.time()
    load = partial(load_checked, launch, recipe, overrides, max_steps, run_dir, began)
    if dry_run:
        if launch.rank == 0:
            write_resolved(load())
        return
    with StopRequest(launched=launch.world > 1).listening() as stop:
        if launch.world == 1:
            loaded = load()
            stop.deadline = deadline_of(loaded.recipe, began)
            resume = resume or goes_on(loaded.recipe.run_path, os.environ)
            train(loaded, open_directory(loaded, resume), resume, None, stop)
            return
        processes, loaded = meet(load)
        stop.deadline = deadline_of(loaded.recipe, began)
        with processes.said_once():
            resume = processes.on_main(lambda: resume or goes_on(loaded.recipe.run_path, os.environ))
            directory = processes.main_first(
                lambda: open_directory(loaded, resume) if processes.is_main else join_directory(loaded)
            )
        train(loaded, directory, resume, processes, stop)
        processes.close()


def load_checked(
    launch: Launch, recipe: Path, overrides: list[str], max_steps: int | None, run_dir: Path | None, began: float
) -> LoadedRecipe:
    """The recipe, for the processes that run and began at `began`.

    Raises:
        RecipeError: it has mistakes.
        UsageError: its deadline has passed.
        ProcessError: it asks for other processes, or the launcher was asked for others.
    """
    if max_steps is not None:
        overrides = [*overrides, f"run.steps={max_steps}"]
    if run_dir is not None:
        place = run_dir.expanduser().resolve()
        overrides = [*overrides, f"run.dir='{place.parent}'", f"run.name='{place.name}'"]
    loaded = load_recipe(recipe, overrides)
    check_launch(launch, loaded.recipe.processes.count, os.environ, parents())
    deadline = deadline_of(loaded.recipe, began)
    if deadline is not None and deadline.at <= began:
        raise UsageError(
            f"run.must_save_by {loaded.recipe.run.must_save_by} has passed: nothing could be trained; set a later time, or a"
            " duration such as 3h50m, or remove it"
        )
    if launch.rank == 0:
        for notice in loaded.notices:
            print_line(f"note: {notice}")
    return loaded


def deadline_of(recipe: Recipe, began: float) -> Deadline | None:
    """`run.must_save_by`, for an attempt that began at `began`."""
    return None if recipe.run.must_save_by is None else Deadline(moment(recipe.run.must_save_by, began))


def goes_on(path: Path, environment: Mapping[str, str]) -> bool:
    """Whether torchrun starts this anew (`--max-restarts`) after an attempt that had begun the run at `path`.

    A run that was there before this launch is another one, which only --resume goes on with.
    """
    return restarted(environment) and RunDirectory.look(path).get("launcher") == os.getppid()


def write_resolved(loaded: LoadedRecipe) -> None:
    path = loaded.recipe.run_path
    if (path / "status.json").exists():
        raise UsageError(f"{path} holds a run, which a dry run would change; take another name, or `rlgen show --resolved`")
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / "resolved.yaml", dump_recipe(loaded.recipe))
    print_line(f"{path / 'resolved.yaml'} written; nothing was started")


def meet(load: Callable[[], LoadedRecipe]) -> "tuple[Processes, LoadedRecipe]":
    """The processes of this run, and the recipe that all of them have loaded: its mistakes are said once."""
    loaded: LoadedRecipe | RlgenError
    try:
        loaded = load()
        timeout = loaded.recipe.processes.timeout
    except RlgenError as error:
        loaded, timeout = error, ProcessesRecipe().timeout
    from rlgen.processes import Processes

    processes = Processes.open(timeout)

    def given() -> LoadedRecipe:
        if isinstance(loaded, RlgenError):
            raise loaded
        return loaded

    with processes.said_once():
        return processes, processes.agreed(given)


def open_directory(loaded: LoadedRecipe, resume: bool) -> RunDirectory:
    path, resolved = loaded.recipe.run_path, dump_recipe(loaded.recipe)
    return reopen(path, loaded, resolved) if resume else RunDirectory.create(path, loaded.text, resolved)


def join_directory(loaded: LoadedRecipe) -> RunDirectory:
    return RunDirectory.join(loaded.recipe.run_path)


def train(loaded: LoadedRecipe, directory: RunDirectory, resume: bool, processes: "Processes | None", stop: StopRequest) -> None:
    """Runs, and keeps `status.json`. `processes`: those of the launcher; None: this is the only one."""
    step, steps = int(directory.status().get("step", 0)), loaded.recipe.run.steps
    is_main = processes is None or processes.is_main
    try:
        if is_main:
            directory.write_status("starting", step, steps)
        with nullcontext() if processes is None else processes.said_once():
            run(loaded.recipe, directory, resume, processes, stop)
        if is_main:
            directory.write_status("done", steps, steps, exit_code=0)
    except BaseException as error:
        code = error.exit_code if isinstance(error, RlgenError) else 130 if isinstance(error, KeyboardInterrupt) else 70
        state = "stopped" if isinstance(error, Stopped) else "failed"
        message = str(error) or ("stopped at once; --resume goes on from the last checkpoint" if code == 130 else "")
        if processes is None or processes.speaks_last():
            directory.write_status(state, int(directory.status().get("step", 0)), steps, code, message)
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


def run(recipe: Recipe, directory: RunDirectory, resume: bool, launched: "Processes | None", stop: StopRequest) -> None:
    """Builds everything and runs the loop. Heavy imports happen here."""
    from rlgen.processes import Processes
    from rlgen.run.checkpoint import Checkpoints
    from rlgen.run.console import Console

    processes = launched or Processes.alone()
    checkpoint = processes.on_main(Checkpoints(directory.checkpoints, recipe.checkpoint.keep, processes).newest)
    done = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
    console = Console(recipe.run.steps, done, quiet=not processes.is_main)
    if done >= recipe.run.steps:
        console.say(f"{directory.path}: already complete, {done} steps")
        return
    if resume:
        processes.on_main(lambda: directory.cut(done))
        console.say(f"resuming after step {done}" + ("" if done else ": no checkpoint was written yet"))
    log_to(directory.logs / (f"rlgen.rank{processes.rank}.log" if processes.rank else "rlgen.log"))
    if processes.world > 1:
        console.say(f"{processes.world} processes, {recipe.processes.strategy}")
    from rlgen.trainers.build import build_trainer

    with console:
        try:
            with stop.at_once(processes):
                trainer, done = build_trainer(
                    recipe, directory, checkpoint, console, processes, between=lambda: stop.check(processes)
                )
        except StopNow:
            raise Stopped(f"stopped {stop.why} before step {done + 1}: nothing is lost; go on with --resume") from None
        try:
            with processes.said_once():  # before all that is closed
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
