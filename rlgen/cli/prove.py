"""Checks that a run of this recipe, killed and resumed, equals an undisturbed one: `rlgen train RECIPE --prove-resume`."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from rlgen.cli.output import echo
from rlgen.cli.serve import stoppable
from rlgen.errors import CheckpointError, UsageError
from rlgen.recipe import LoadedRecipe, load_recipe
from rlgen.rollout.frames import AnswerRecord, read_frames

STEPS = 4
POLL = 0.002  # seconds between two reads of the journal
TRIES = 3
PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
# Why two runs of a recipe may differ.
IN_FLIGHT = "With engine.in_flight (or rollout.async_steps above 1) the weights change during sampling, at times that vary."
NOISE = (
    "If a reward or a GPU kernel is not deterministic, undisturbed runs differ too: train two with different --run-dir and"
    " compare them."
)
SLOWER, LEAST = 10.0, 60.0  # timeout of the killed run: SLOWER times the undisturbed run, at least LEAST seconds


def prove_command(recipe: Path, overrides: list[str], max_steps: int | None, run_dir: Path | None) -> None:
    """Trains a few steps twice, the second time with a SIGKILL during a step and `--resume`, and compares the two runs. It leaves
    no process behind, however it ends. The folder with both runs remains if they differ, if one fails, or if this process is
    killed.
    """
    loaded = load_recipe(recipe, overrides)
    steps = STEPS if max_steps is None else max_steps
    every = max(1, steps // 2)
    if steps < 2:
        raise UsageError(f"--max-steps {steps}: --prove-resume kills a run after a checkpoint and resumes it; give at least 2")
    if (loaded.recipe.processes.count or 1) > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--prove-resume starts one process: add --set processes.count=1")
    beside = (run_dir or loaded.recipe.run_path).expanduser().resolve()
    beside.parent.mkdir(parents=True, exist_ok=True)
    settings = [*overrides, f"checkpoint.every={every}", "sinks=[]"]  # no tracker is told of runs that are only a test
    if loaded.recipe.optim.warmup_steps >= steps:
        settings.append(f"optim.warmup_steps={steps - 1}")
    with stoppable():
        folder = Path(tempfile.mkdtemp(prefix=f"{beside.name}.prove-resume-", dir=beside.parent))
        try:
            killed = prove(loaded, recipe, settings, steps, every, folder)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder)
    echo(f"yes: {killed}, resumed, and equal to the undisturbed run to the last bit in metrics, rollouts and checkpoints")


def prove(loaded: LoadedRecipe, recipe: Path, settings: Sequence[str], steps: int, every: int, folder: Path) -> str:
    """Trains both runs in `folder`, and returns when the second was killed, in words. Raises CheckpointError if they differ."""
    echo(f"1 of 3: {steps} steps undisturbed, in {folder}")
    began = time.monotonic()
    run_logged(command(recipe, settings, steps, folder / "undisturbed"), folder / "undisturbed.log")
    killed = run_killed(recipe, settings, steps, every, folder, max(LEAST, SLOWER * (time.monotonic() - began)))
    echo(f"2 of 3: {killed}")
    echo("3 of 3: resuming")
    run_logged([*command(recipe, settings, steps, folder / "killed"), "--resume"], folder / "resumed.log")
    from rlgen.run.compare import first_difference

    difference = first_difference(folder / "undisturbed", folder / "killed")
    if difference is not None:
        raise CheckpointError(
            f"resume is not exact here: {difference} (undisturbed and resumed). {IN_FLIGHT if loaded.recipe.in_flight else NOISE}"
            f" Both runs are in {folder}"
        )
    return killed


def command(recipe: Path, settings: Sequence[str], steps: int, directory: Path) -> list[str]:
    words = [sys.executable, "-m", "rlgen", "train", str(recipe), "--run-dir", str(directory), "--max-steps", str(steps)]
    return [*words, *(word for setting in settings for word in ("--set", setting))]


def run_logged(words: Sequence[str], log: Path) -> None:
    """Runs a command with its output in `log`. Raises CheckpointError if it fails."""
    with log.open("w", encoding="utf-8") as file, child(words, file) as process:
        code = process.wait()
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CheckpointError(
            f"--prove-resume: `rlgen train` ended with exit code {code}: {said[-1] if said else 'no output'}; see {log}"
        )


@contextmanager
def child(words: Sequence[str], log: IO[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Starts a process that is killed when the block ends and, on Linux, when this process ends, however it does."""
    end_with_parent = None if prctl is None else partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_killed(recipe: Path, settings: Sequence[str], steps: int, every: int, folder: Path, patience: float) -> str:
    """Starts a run and kills it before its last checkpoint, as soon as the journal has an answer of that step. Returns when it
    was killed, in words. Raises CheckpointError if it could not be killed, or did not get there within `patience` seconds.
    """
    step = every * (steps // every) if steps // every > 1 else steps
    for attempt in range(1, TRIES + 1):
        directory = folder / "killed"
        shutil.rmtree(directory, ignore_errors=True)
        log = folder / f"killed_{attempt}.log"
        with log.open("w", encoding="utf-8") as file, child(command(recipe, settings, steps, directory), file) as process:
            journal, began = directory / "journal" / f"step_{step:06d}.bin", time.monotonic()
            # With rollout.async_steps, answers may arrive before the checkpoint that the run is to resume from.
            before = directory / "checkpoints" / f"step_{every * ((step - 1) // every):06d}"
            while process.poll() is None and not (answers(journal) and (step <= every or before.exists())):
                if time.monotonic() - began > patience:
                    raise CheckpointError(
                        f"--prove-resume: the second run did not reach step {step} of {steps}, in which it is killed, within"
                        f" {patience:.0f} s; see {log}"
                    )
                time.sleep(POLL)
        if process.returncode == -signal.SIGKILL:
            return f"killed when the journal had {answers(journal)} answers of step {step} of {steps}"
        if process.returncode:
            break
    raise CheckpointError(f"--prove-resume: the run ended with {process.returncode} before it could be killed; see {log}")


def answers(journal: Path) -> int:
    return sum(isinstance(record, AnswerRecord) for record in read_frames(journal).records)
