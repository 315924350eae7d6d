"""Runs `rlgen train`, in one process or in each process of a launcher."""

from pathlib import Path

from rlgen.cli.output import echo
from rlgen.opening.attempt import train, write_resolved
from rlgen.opening.options import TrainOptions


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
    """Trains, or with `dry_run` only writes the resolved recipe. Each process that a launcher started calls it.

    Raises:
        RlgenError: with its exit code, which `status.json` holds too.
    """
    options = TrainOptions(
        overrides=overrides,
        max_steps=max_steps,
        run_dir=run_dir,
        resume=resume,
        resume_step=resume_step,
        changed_rewards=changed_rewards,
        clean=clean,
    )
    if not dry_run:
        train(recipe, options, echo)
    elif path := write_resolved(recipe, options, echo):
        echo(f"{path} written; nothing was started")
