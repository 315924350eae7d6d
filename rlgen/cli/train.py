"""Runs `rlgen train`, in one process or in each process of a launcher. Prints its first line before heavy imports."""

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rlgen
from rlgen.cli.output import echo
from rlgen.errors import RlgenError, Stopped, redacted
from rlgen.run.launch import Launch

if TYPE_CHECKING:
    from rlgen.run.console import Progress


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
    progress: "Progress" = "auto",
) -> None:
    """Trains, or with `dry_run` only writes the resolved recipe. Each process that a launcher started calls it."""
    began, launch = time.monotonic(), Launch.of(os.environ)

    def say(text: str) -> None:
        if launch.rank == 0 and not launch.in_cluster:
            echo(text, err=progress == "json")

    if not dry_run:
        say(f"rlgen {rlgen.__version__}: {recipe}")
    from rlgen.setup.attempt import train, write_resolved
    from rlgen.setup.reopen import TrainOptions

    options = TrainOptions(
        overrides=overrides,
        max_steps=max_steps,
        run_dir=run_dir,
        resume=resume,
        resume_step=resume_step,
        changed_rewards=changed_rewards,
        clean=clean,
        progress=progress,
    )
    if dry_run:
        if path := write_resolved(recipe, options, echo):
            echo(f"{path} written; nothing was started")
        return
    again = [str(recipe), *(word for override in overrides for word in ("--set", override))]
    again += [] if max_steps is None else ["--max-steps", str(max_steps)]
    again += [] if run_dir is None else ["--run-dir", str(run_dir)]
    resumes = f"rlgen train {shlex.join(again)} --resume" if launch.world == 1 else "the same command with --resume"
    try:
        path = train(recipe, options, say)
    except Stopped as stopped:
        if launch.rank == 0:
            say("\n".join(last_lines(stopped.run, time.monotonic() - began, redacted(resumes))))
        raise
    if launch.rank == 0:
        say("\n".join(last_lines(path, time.monotonic() - began)))


def last_lines(path: Path, seconds: float, resumes: str | None = None) -> list[str]:
    """Returns what to know at the end of a run, and what to do next. `resumes`: the command that goes on; None: it is done."""
    from rlgen.analysis.run import read_run
    from rlgen.analysis.summary import ending_of
    from rlgen.run.find import RUNS, holds_run

    try:
        run = read_run(path)
    except (RlgenError, OSError, ValueError) as error:  # another command may take the folder as soon as this run has ended
        return [f"the run has ended; {path} cannot be read now, perhaps because another command uses it: {error}"]
    name = run.name if (RUNS / run.name).resolve() == path.resolve() and holds_run(RUNS / run.name) else path
    return ending_of(run, seconds, resumes or f"rlgen report {shlex.quote(str(name))}")
