"""Opens the directory of a run: a new one, or that of an earlier attempt, if the recipe still describes the same run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlgen.callbacks import Callback
from rlgen.errors import RlgenError, UsageError
from rlgen.recipe import LoadedRecipe, Recipe, load_recipe
from rlgen.recipe.paths import local_inputs
from rlgen.recipe.sizes import FOLLOWING
from rlgen.recipe.yaml import by_key
from rlgen.run.console import Progress
from rlgen.run.directory import RunDirectory
from rlgen.run.launch import launched_by

# Exit codes after which a launcher's restart is useless: a requested stop, and errors in the input.
FINAL = (2, 3, 4, 5, 7, 8, 75)
# What may change between the attempts of one run. Steps: only with a constant schedule, which does not depend on their number.
# Micro-batches, their padding and checkpointed activations affect only memory and speed: a run that ran out of memory can resume
# with others.
MAY_CHANGE = (
    *("optim.micro_batch_tokens", "optim.packing", "model.gradient_checkpointing"),
    *("model.offload_activations", "optim.offload"),
    *("run.dir", "run.name", "run.probe_max", "run.must_save_by", "optim.max_nonfinite"),
    *("eval.every", "eval.at_start", "eval.best"),
    *("checkpoint.", "rollouts.", "sentinel.", "engine.", "processes.", "scoring.", "health.", "sinks", "cluster"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `rlgen train` besides the recipe, such as TrainOptions(overrides=["run.steps=10"], resume=True)."""

    overrides: Sequence[str] = ()  # "section.key=value", as after --set; the last one wins
    max_steps: int | None = None  # the same as run.steps=N
    run_dir: Path | None = None  # instead of run.dir/run.name
    resume: bool = False  # continue the run that is in the directory
    resume_step: int | None = None  # step of the checkpoint to resume from, implies `resume`; None: the newest good one
    changed_rewards: bool = False  # resume although files of rewards were edited
    clean: bool = False  # delete what an earlier run left in the directory
    progress: Progress = "auto"  # how the run is shown while it trains
    callbacks: Sequence[Callback] = ()  # of a program that calls `rlgen.train`

    def __post_init__(self) -> None:
        if self.clean and self.resumes:
            raise UsageError("--clean deletes what --resume goes on from; leave one of them out")

    @property
    def resumes(self) -> bool:
        return self.resume or self.resume_step is not None

    def words(self) -> list[str]:
        """Returns these options as `rlgen train` takes them, but for the overrides."""
        words = [] if self.max_steps is None else ["--max-steps", str(self.max_steps)]
        words += [] if self.run_dir is None else ["--run-dir", str(self.run_dir)]
        words += ["--resume"] if self.resume else []
        words += [] if self.resume_step is None else ["--resume-step", str(self.resume_step)]
        words += ["--allow-changed-rewards"] if self.changed_rewards else []
        return [*words, *(["--clean"] if self.clean else []), "--progress", self.progress]


PLAIN = TrainOptions()


def open_directory(loaded: LoadedRecipe, options: TrainOptions) -> RunDirectory:
    """Opens the run's directory, on rank 0."""
    path = loaded.recipe.run_path
    not_a_file(path)
    if options.resumes:
        return reopen(path, loaded)
    if options.clean:
        inside = [loc for loc, text, _ in local_inputs(loaded.recipe) if path.resolve() in Path(text).parents]
        if inside:
            raise UsageError(
                f"--clean: {path} holds {'.'.join(map(str, inside[0]))} of this recipe; nothing was deleted. Move it away, or set"
                " run.name"
            )
        RunDirectory.clean(path)
    return RunDirectory.create(path, loaded.text, loaded.resolved)


def not_a_file(path: Path) -> None:
    if in_the_way := next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None):
        raise UsageError(f"{path} cannot be a run directory: {in_the_way} is a file; set run.dir or --run-dir")


def goes_on(path: Path, environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun restarts this process (`--max-restarts`) after an attempt of this launch had begun the run at
    `path`.

    A run that existed before this launch is another one, which only --resume continues.
    """
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return restarts > 0 and RunDirectory.look(path).get("launcher") == launched_by()


def after_restart(path: Path, options: TrainOptions) -> TrainOptions:
    """Returns the options unchanged; or with `resume` set, if a launcher restarts a run that it has begun.

    Raises RlgenError with the exit code of the last attempt, if that ended by itself with one of FINAL.
    """
    if not goes_on(path, os.environ):
        return options
    before = RunDirectory.look(path)
    if (code := before.get("exit_code")) in FINAL:
        ended = RlgenError(f"{path} is not restarted, because the last attempt ended with exit {code}: {before['message']}")
        ended.exit_code = code
        raise ended
    # If this launch has trained already, checkpoints after --resume-step are its own: resume from the newest.
    begun = any(attempt.get("launcher") == launched_by() for attempt in RunDirectory.attempts(path))
    return replace(options, resume=True, clean=False, resume_step=None if begun else options.resume_step)


def reopen(path: Path, loaded: LoadedRecipe) -> RunDirectory:
    """Opens the directory of an earlier attempt of the same run. `resolved.yaml` stays until this attempt begins to train: a
    mistake in what may change is then no part of the run.
    """
    directory = RunDirectory.reopen(path)
    try:
        # Read as a recipe: an older rlgen wrote keys that have another name today, and lacked keys that were added since.
        before = yaml.safe_load(load_recipe(directory.resolved, resolved=True).resolved)
        # An evaluation does not affect training, so that a run that had none may get one.
        steps = ("run.steps",) if loaded.recipe.optim.schedule == "constant" else ()
        free, now = (*steps, *MAY_CHANGE, *(("eval",) if before.get("eval") is None else ())), yaml.safe_load(loaded.resolved)
        # Without a checkpoint nothing is resumed, and no digest compared.
        others = moved(loaded.recipe, before, now) if any(directory.checkpoints.glob("step_*")) else ()
        if changed := changes(before, now, (*free, *others)):
            raise UsageError(
                f"--resume: the recipe differs from that of the run in {path}:\n"
                + "\n".join(f"  {line}" for line in changed)
                + f"\nOnly {', '.join(key.removesuffix('.') for key in free)} may change. Undo this, or start a new run"
                f" from its weights, with model.path: {path}/checkpoints/step_N and another run.name"
            )
    except BaseException:
        directory.close()
        raise
    return directory


def moved(recipe: Recipe, before: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    """Returns the keys of local inputs that have the same name in another folder; `same_inputs` compares their digests."""
    keys = {".".join(map(str, loc)) for loc, *_ in local_inputs(recipe)}
    pairs = {key: tuple(map(str, pair)) for key, pair in changed_values(before, now).items() if key in keys}
    return tuple(key for key, (a, b) in pairs.items() if os.path.isabs(a) and os.path.isabs(b) and Path(a).name == Path(b).name)


def changes(before: dict[str, Any], now: dict[str, Any], free: tuple[str, ...]) -> list[str]:
    """Returns ["run.seed: 0 -> 1", ...]: the values that differ, except those whose key starts with one of `free`."""
    sizes = set(FOLLOWING) - by_key(now).keys()  # `same_inputs` compares what follows from model and data
    return [
        f"{key}: {' -> '.join('unset' if value is None else str(value) for value in pair)}"
        for key, pair in sorted(changed_values(before, now).items())
        if key not in sizes and not key.startswith(free)
    ]


def changed_values(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values that are not the same, by key, in the order of `before`. None: there is no such key."""
    was, is_ = by_key(before), by_key(now)
    pairs = {key: (was.get(key), is_.get(key)) for key in {**was, **is_}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
