"""`rlgen train`, as one process or as one of several."""

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlgen.cli.output import echo
from rlgen.cli.reopen import Again, reopen
from rlgen.errors import CheckpointError, RlgenError, Stopped, UsageError, redacted
from rlgen.files import LogFile, private_files, write_text, written
from rlgen.recipe import LoadedRecipe, Recipe, dump_recipe, load_recipe
from rlgen.recipe.fields import moment
from rlgen.recipe.models import ProcessesRecipe
from rlgen.run.deadline import Deadline
from rlgen.run.directory import RunDirectory
from rlgen.run.launch import Launch, check_launch, launched_by, parents, restarted
from rlgen.run.signals import StopNow, StopRequest

if TYPE_CHECKING:
    from rlgen.processes import Processes

# Exit codes of ends that a launcher's restart changes nothing about: a stop that was asked for, and what is wrong with the input.
FINAL = (2, 3, 4, 5, 7, 8, 75)


def train_command(
    recipe: Path,
    overrides: list[str],
    resume: bool,
    dry_run: bool,
    max_steps: int | None,
    run_dir: Path | None,
    resume_step: int | None = None,
    changed_rewards: bool = False,
    clean: bool = False,
) -> None:
    """Trains, or with `dry_run` only writes the resolved recipe. Each process that a launcher started comes here.

    Raises:
        RlgenError: with its exit code, which `status.json` holds too.
    """
    again = Again(resume or resume_step is not None, resume_step, changed_rewards, clean)
    with private_files():
        start(recipe, overrides, again, dry_run, max_steps, run_dir)


def start(recipe: Path, overrides: list[str], again: Again, dry_run: bool, max_steps: int | None, run_dir: Path | None) -> None:
    """As `train_command`."""
    launch, began = Launch.of(os.environ), time.time()
    load = partial(load_checked, launch, recipe, overrides, max_steps, run_dir, began)
    if dry_run:
        if launch.rank == 0:
            write_resolved(load())
        return
    with StopRequest(launched=launch.world > 1).listening() as stop:
        if launch.world == 1:
            loaded = load()
            stop.by(deadline_of(loaded.recipe, began))
            again = again_of(loaded.recipe.run_path, again)
            train(loaded, open_directory(loaded, again), again, None, stop)
            return
        processes, loaded = meet(load)
        stop.by(deadline_of(loaded.recipe, began))
        with processes.said_once():
            again = processes.on_main(lambda: again_of(loaded.recipe.run_path, again))
            directory = processes.main_first(
                lambda: open_directory(loaded, again) if processes.is_main else join_directory(loaded)
            )
        train(loaded, directory, again, processes, stop)
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
        place = Path(os.path.abspath(run_dir.expanduser()))  # a link stays one: --clean must know
        overrides = [*overrides, f"run.dir={json.dumps(str(place.parent))}", f"run.name={json.dumps(place.name)}"]
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
            echo(f"note: {notice}")
    return loaded


def deadline_of(recipe: Recipe, began: float) -> Deadline | None:
    """`run.must_save_by`, for an attempt that began at `began`."""
    return None if recipe.run.must_save_by is None else Deadline(moment(recipe.run.must_save_by, began))


def goes_on(path: Path, environment: Mapping[str, str]) -> bool:
    """Whether torchrun starts this anew (`--max-restarts`) after an attempt that had begun the run at `path`.

    A run that was there before this launch is another one, which only --resume goes on with.
    """
    return restarted(environment) and RunDirectory.look(path).get("launcher") == launched_by()


def again_of(path: Path, again: Again) -> Again:
    """As asked for; or a resumed run, where a launcher starts it anew.

    Raises:
        RlgenError: what it starts anew had not died, but had come to an end of its own, which stands; with its exit code.
    """
    if not goes_on(path, os.environ):
        return again
    before = RunDirectory.look(path)
    if (code := before.get("exit_code")) in FINAL:
        ended = RlgenError(f"{path} is not started anew, since the last attempt ended with exit {code}: {before['message']}")
        ended.exit_code = code
        raise ended
    # Where it has begun to train, later checkpoints than --resume-step are its own.
    begun = any(attempt.get("launcher") == launched_by() for attempt in RunDirectory.attempts(path))
    return replace(again, resume=True, clean=False, step=None if begun else again.step)


def write_resolved(loaded: LoadedRecipe) -> None:
    path = loaded.recipe.run_path
    if (path / "status.json").exists():
        raise UsageError(f"{path} holds a run, which a dry run would change; take another name, or `rlgen show --resolved`")
    not_a_file(path)
    with written(path):
        path.mkdir(parents=True, exist_ok=True)
    write_text(path / "resolved.yaml", dump_recipe(loaded.recipe))
    echo(f"{path / 'resolved.yaml'} written; nothing was started")


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


def open_directory(loaded: LoadedRecipe, again: Again) -> RunDirectory:
    path, resolved = loaded.recipe.run_path, dump_recipe(loaded.recipe)
    not_a_file(path)
    if again.resume:
        return reopen(path, loaded, resolved)
    if again.clean:
        RunDirectory.clean(path)
    return RunDirectory.create(path, loaded.text, resolved)


def not_a_file(path: Path) -> None:
    """Raises UsageError where a file lies in the way of a folder."""
    if in_the_way := next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None):
        raise UsageError(f"{path} cannot be a run directory: {in_the_way} is a file; set run.dir or --run-dir")


def join_directory(loaded: LoadedRecipe) -> RunDirectory:
    return RunDirectory.join(loaded.recipe.run_path)


def train(loaded: LoadedRecipe, directory: RunDirectory, again: Again, processes: "Processes | None", stop: StopRequest) -> None:
    """Runs, and keeps `status.json`. `processes`: those of the launcher; None: this is the only one."""
    is_main = processes is None or processes.is_main
    # The main process replaces the file: on shared storage others could not read it just then.
    step, steps = int(directory.status().get("step", 0)) if is_main else 0, loaded.recipe.run.steps
    try:
        if is_main:
            directory.write_status("starting", step, steps)
        with nullcontext() if processes is None else processes.said_once():
            run(loaded.recipe, directory, again, processes, stop)
        if is_main:
            directory.write_status("done", steps, steps, exit_code=0)
    except BaseException as error:
        code = error.exit_code if isinstance(error, RlgenError) else 130 if isinstance(error, KeyboardInterrupt) else 70
        state = "stopped" if isinstance(error, Stopped) else "failed"
        message = str(error) or ("stopped at once; --resume goes on from the last checkpoint" if code == 130 else "")
        with suppress(CheckpointError):  # a disk too full for this is what `error` says already
            # For a main process that was killed another one speaks; one that came to its own end has spoken.
            is_heard = processes is not None and processes.speaks_last() and directory.status().get("exit_code") is None
            if is_main or is_heard:
                directory.write_status(state, int(directory.status().get("step", 0)), steps, code, redacted(message))
        raise
    finally:
        directory.close()


def run(recipe: Recipe, directory: RunDirectory, again: Again, launched: "Processes | None", stop: StopRequest) -> None:
    """Builds everything and runs the loop. Heavy imports happen here."""
    from rlgen.processes import Processes
    from rlgen.run.checkpoint import Checkpoints
    from rlgen.run.console import Console

    processes = launched or Processes.alone()
    checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep, processes)
    choice = processes.patiently(lambda: checkpoints.choose(again.step))
    done = choice.step
    console = Console(recipe.run.steps, done, quiet=not processes.is_main)
    if done >= recipe.run.steps:
        console.say(f"{directory.path}: already complete, {done} steps")
        return
    if again.resume:

        def cut() -> None:
            for later in choice.later:  # first: whoever is killed here goes on from the same step next time
                checkpoints.shelf.set_aside(later)
            with written(directory.path):
                directory.cut(done)

        processes.on_main(cut)
        console.say(f"resuming after step {done}" + ("" if done else ": no checkpoint was written yet"))
    log_to(directory.logs / (f"rlgen.rank{processes.rank}.log" if processes.rank else "rlgen.log"))
    if processes.world > 1:
        console.say(f"{processes.world} processes, {recipe.processes.strategy}")
    for notice in choice.notices:
        console.say(notice)
        logging.getLogger("rlgen").warning(notice)
    from rlgen.trainers.build import build_trainer

    with console:
        try:
            with stop.at_once(processes):
                trainer, start = build_trainer(
                    recipe,
                    directory,
                    choice.path,
                    console,
                    processes,
                    notices=choice.notices,
                    changed_rewards=again.changed_rewards,
                    between=lambda: stop.check(processes),
                )
        except StopNow:
            raise Stopped(f"stopped {stop.why} before step {done + 1}: nothing is lost; go on with --resume") from None
        try:
            with processes.said_once():  # before all that is closed
                trainer.run(start, stop)
        finally:
            trainer.close()
        console.say(f"done: {directory.path}")


class Redacting(logging.Formatter):
    """Lines without secrets. A filter of the root logger would not see what reaches it from other loggers, nor tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_to(path: Path) -> None:
    """Library output goes to the run's log, not to the screen."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
