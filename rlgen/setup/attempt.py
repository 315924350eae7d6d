"""Runs one attempt of a run, from the options to the exit code: what `rlgen train` does in each of its processes.

Nothing heavy is imported before the recipe is read, so that mistakes in it are reported at once.
"""

import importlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlgen.errors import CheckpointError, ProcessError, RlgenError, Stopped, UsageError, redacted
from rlgen.files import private_files, write_text, written
from rlgen.heap import importing, keep_freed_memory
from rlgen.recipe import LoadedRecipe, load_recipe
from rlgen.recipe.fields import moment
from rlgen.recipe.processes import ProcessesRecipe
from rlgen.run.console import OUTPUTS, Console, check_progress, log_to
from rlgen.run.directory import RunDirectory, ended_as
from rlgen.run.launch import Launch, check_launch, parents
from rlgen.run.live import open_console
from rlgen.run.signals import Deadline, StopNow, StopRequest
from rlgen.run.sinks.open import check_libraries
from rlgen.setup.reopen import PLAIN, TrainOptions, after_restart, not_a_file, open_directory
from rlgen.worker_pool.process import Printer

if TYPE_CHECKING:
    from rlgen.processes import Processes
    from rlgen.run.checkpoint import Checkpoints
    from rlgen.run.checkpoint_folder import ChosenCheckpoint
    from rlgen.setup.trainer import RunContext

Say = Callable[[str], None]
PARTS = "rlgen.setup.trainer"  # the module that imports all of them
OF_INPUTS = (2, 3, 4, 5)  # exit codes of mistakes in recipe, model, data and rewards


def train(path: Path, options: TrainOptions = PLAIN, say: Say = print) -> Path:
    """Trains as the recipe at `path` says, and keeps `status.json` up to date. Call it from the main thread: it handles signals.

    Each process that a launcher started calls it; the processes find each other by the launcher's environment variables.

    Raises:
        RlgenError: with its exit code, which `status.json` holds too; Stopped if the run was asked to stop, and has saved.
    """
    launch, began = Launch.of(os.environ), time.time()
    keep_freed_memory()
    load = partial(load_checked, launch, path, options, began, say)
    with private_files(), StopRequest(launched=launch.world > 1).listening() as stop:
        if launch.world == 1:
            loaded = load()
            if loaded.recipe.cluster is not None:
                from rlgen.cluster.driver import Command, train_on_cluster

                again = replace(options, resume=True, clean=False, resume_step=None)
                command = Command(recipe=path.absolute(), overrides=options.overrides, first=options.words(), again=again.words())
                return train_on_cluster(loaded, command, say, stop)
            stop.by(deadline_of(loaded.recipe.run.must_save_by, began))
            options = after_restart(loaded.recipe.run_path, options)
            run_with_status(loaded, open_directory(loaded, options), options, None, stop)
            return loaded.recipe.run_path
        processes, loaded = meet(load)
        stop.by(deadline_of(loaded.recipe.run.must_save_by, began))
        with processes.reporting_once():
            options = processes.on_main(partial(after_restart, loaded.recipe.run_path, options))
            directory = processes.main_first(
                lambda: open_directory(loaded, options) if processes.is_main else RunDirectory.join(loaded.recipe.run_path)
            )
        run_with_status(loaded, directory, options, processes, stop)
        processes.close()
    return loaded.recipe.run_path


def write_resolved(path: Path, options: TrainOptions, say: Say = print) -> Path | None:
    """Writes `resolved.yaml` of the run that `train` would start, and starts nothing. Only rank 0 writes."""
    launch = Launch.of(os.environ)
    if launch.rank:
        return None
    with private_files():
        loaded = load_checked(launch, path, options, time.time(), say)
        place = loaded.recipe.run_path
        if (place / "status.json").exists():
            raise UsageError(f"{place} holds a run, which a dry run would change; set run.name, or use `rlgen show --resolved`")
        not_a_file(place)
        with written(place):
            place.mkdir(parents=True, exist_ok=True)
        write_text(place / "resolved.yaml", loaded.resolved)
        return place / "resolved.yaml"


def load_checked(launch: Launch, path: Path, options: TrainOptions, began: float, say: Say) -> LoadedRecipe:
    """Loads the recipe, with the options as overrides, and checks it against the launcher's processes and the time `began`."""
    overrides = list(options.overrides)
    if options.max_steps is not None:
        overrides.append(f"run.steps={options.max_steps}")
    if options.run_dir is not None:
        place = Path(os.path.abspath(options.run_dir.expanduser()))  # does not resolve links: --clean must see them
        keys = {"dir": str(place.parent), "name": place.name}
        overrides += [f"run.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
    loaded = load_recipe(path, overrides)
    if launch.rank == 0:
        check_progress(options.progress)
    cluster = loaded.recipe.cluster
    if cluster is not None and launch.world > 1:
        raise ProcessError(
            f"a launcher has started {launch.world} processes, but cluster starts its own: start `rlgen train` without a launcher"
        )
    check_launch(launch, None if cluster else loaded.recipe.processes.count, os.environ, parents())
    deadline = deadline_of(loaded.recipe.run.must_save_by, began)
    if deadline is not None and deadline.at <= began:
        raise UsageError(
            f"run.must_save_by {loaded.recipe.run.must_save_by} has passed: nothing could be trained; set a later time, or a"
            " duration such as 3h50m, or remove it"
        )
    if launch.rank == 0:
        check_libraries(loaded.recipe)
        for notice in loaded.notices:
            say(f"note: {notice}")
        for warning in loaded.warnings:
            say(f"warning: {warning}")
    return loaded


def deadline_of(must_save_by: str | None, began: float) -> Deadline | None:
    """The attempt began at `began`, in seconds since 1970."""
    return None if must_save_by is None else Deadline(moment(must_save_by, began))


def meet(load: Callable[[], LoadedRecipe]) -> "tuple[Processes, LoadedRecipe]":
    """Joins the process group, and returns it with the recipe that all ranks have loaded; a mistake in it is reported once."""
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

    with processes.reporting_once():
        return processes, processes.run_all(given)


def nothing_left(directory: RunDirectory, code: int) -> None:
    """Removes the run's folder if this process created it, and a mistake in its inputs ended it before anything was trained.

    The error message says all that the folder would. If torchrun may start the run again, the folder stays: its status prevents
    a useless restart. Call it while `directory` is locked: without the lock, another start could be in the folder by now.
    """
    begun = directory.provenance.exists() or "TORCHELASTIC_RESTART_COUNT" in os.environ
    if code in OF_INPUTS and directory.made and not begun:
        with suppress(OSError):
            shutil.rmtree(directory.path)
            for folder in directory.made[1:]:
                folder.rmdir()  # unless another run is in it by now


def run_with_status(
    loaded: LoadedRecipe, directory: RunDirectory, options: TrainOptions, processes: "Processes | None", stop: StopRequest
) -> None:
    """Runs the attempt, keeps `status.json` up to date, and closes `directory`."""
    is_main = processes is None or processes.is_main
    # Only rank 0 reads the file: it also replaces it, and on shared storage other ranks could fail to read it meanwhile.
    step, steps = int(directory.status().get("step", 0)) if is_main else 0, loaded.recipe.run.steps
    try:
        if is_main:
            directory.write_status("starting", step, steps)
        with nullcontext() if processes is None else processes.reporting_once():
            trained = run(loaded, directory, options, processes, stop)
        if is_main:
            directory.write_status("done", trained, trained, exit_code=0)
    except BaseException as error:
        state, code = ended_as(error)
        message = str(error) or ("stopped at once; --resume goes on from the last checkpoint" if code == 130 else "")
        with suppress(CheckpointError):  # if the disk is too full for this, `error` says so already
            # If rank 0 was killed, another rank writes the status; if rank 0 ended by itself, it has written it already.
            is_heard = processes is not None and processes.reports_end() and directory.status().get("exit_code") is None
            if is_main or is_heard:
                directory.write_status(state, int(directory.status().get("step", 0)), steps, code, redacted(message))
        if processes is None:
            nothing_left(directory, code)
        raise
    finally:
        directory.close()


def run(
    loaded: LoadedRecipe, directory: RunDirectory, options: TrainOptions, launched: "Processes | None", stop: StopRequest
) -> int:
    """Opens the console, and trains. What libraries print goes to the run's logs. Returns the last step, which an earlier attempt
    may have trained.
    """
    recipe, rank = loaded.recipe, launched.rank if launched else 0
    console = open_console(options.progress, recipe, quiet=rank != 0)
    stop.answer = console.answer
    of_rank = f".rank{rank}.log" if rank else ".log"
    with console, OutputToFile() as hidden:
        hidden.to(directory.logs / f"output{of_rank}")
        console.say("loading torch and transformers …")
        import_parts()
        from rlgen.processes import Processes
        from rlgen.run.checkpoint import Checkpoints
        from rlgen.setup.trainer import RunContext

        if recipe.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
        processes = launched or Processes.alone()
        checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep, processes)
        choice = checkpoints.choose(options.resume_step)
        if choice.step >= recipe.run.steps:
            console.say(f"{directory.path}: already complete, {choice.step} steps")
            return choice.step
        if options.resumes:
            go_on(directory, checkpoints, choice, console)
            hidden.to(directory.logs / f"output{of_rank}")  # the earlier attempt's was set aside
        log_to(directory.logs / f"rlgen{of_rank}")
        if processes.world > 1:
            console.say(f"{processes.world} processes, {recipe.processes.strategy}")
        for notice in choice.notices:
            console.say(notice)
            logging.getLogger("rlgen").warning(notice)
        attempt = RunContext(
            recipe=recipe, directory=directory, console=console, processes=processes, start=choice, options=options
        )
        learn(attempt, stop)
        return recipe.run.steps


class OutputToFile(ExitStack):
    """Sends what this process writes to descriptors 1 and 2 to a file: warnings and progress bars, from Python and from C.

    A stream that `rlgen.run.console.own_stream` returned before still leads to the screen. Descriptors are as before when the
    block ends.
    """

    def to(self, path: Path) -> None:
        """Appends what is printed from now on to the file at `path`. Raises CheckpointError if it cannot be opened."""
        self.close()
        printer = Printer(path)
        self.callback(printer.close)  # last, when nothing writes to its pipe any more
        pipe = printer.pipe()
        flush()
        for output in OUTPUTS:
            with suppress(OSError):  # closed, as by `rlgen train … >&-`
                copy = os.dup(output)
                self.callback(os.close, copy)
                self.callback(os.dup2, copy, output)
                os.dup2(pipe.fileno(), output)
        self.callback(flush)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def import_parts() -> None:
    """Imports the modules of a run, unless an earlier run of this process did."""
    if PARTS not in sys.modules:
        with importing():
            importlib.import_module(PARTS)


def go_on(directory: RunDirectory, checkpoints: "Checkpoints", choice: "ChosenCheckpoint", console: Console) -> None:
    """Sets aside what earlier attempts wrote after the step of `choice`, and shows the steps before."""
    processes = checkpoints.processes

    def cut() -> None:
        for later in choice.later:  # first: if the process is killed here, the next attempt chooses the same step
            checkpoints.folder.set_aside(later)
        with written(directory.path):
            directory.cut(choice.step)
        directory.write_status("starting", choice.step, console.steps)

    processes.on_main(cut)
    console.say(f"resuming after step {choice.step}" + ("" if choice.step else ": no checkpoint was written yet"))
    records = directory.read_metrics() if processes.is_main else []
    console.history(records)
    if processes.is_main and (lost := set(range(1, choice.step + 1)) - {record["step"] for record in records}):
        steps = ", ".join(map(str, sorted(lost)))
        console.say(f"warning: metrics.jsonl has no whole line of step {steps}: a line was damaged. Curves have a gap there")


def learn(attempt: "RunContext", stop: StopRequest) -> None:
    """Opens all parts and runs the training loop after the step that the attempt starts from."""
    from rlgen.setup.trainer import open_trainer

    processes = attempt.processes
    try:
        with stop.at_once(processes):
            trainer, start = open_trainer(attempt, between=lambda: stop.check(processes))
    except StopNow:
        said = f"stopped {stop.why} before step {attempt.start.step + 1}: nothing is lost; go on with --resume"
        raise Stopped(said, attempt.directory.path) from None
    with trainer.report.sinks, closing(trainer):  # the sinks are told how the run ends when all else is closed
        ended: BaseException | None = None
        try:
            with processes.reporting_once():  # reports the error before anything is closed
                trainer.callbacks.start(attempt.directory.path, attempt.recipe, stop)
                trainer.run(start, stop)
        except BaseException as error:
            ended = error
            if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C does not wait for the checkpoint
                trainer.save.checkpoints.give_up()
            raise
        finally:
            trainer.callbacks.end(ended)
