"""An earlier run, to go on with: what may have changed in between, and from which checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlgen.errors import UsageError
from rlgen.files import read_text, write_text
from rlgen.recipe import LoadedRecipe
from rlgen.run.directory import RunDirectory

# What may change between the attempts of one run. Steps: only with a constant schedule, which does not depend on their number.
# Micro-batches and checkpointed activations: memory and speed alone, so that a run that lacked memory can go on.
STEPS = "run.steps"
MAY_CHANGE = (
    *("optim.micro_batch_tokens", "model.gradient_checkpointing"),
    *("run.dir", "run.name", "run.probe_max", "run.must_save_by", "optim.max_nonfinite"),
    *("checkpoint.", "sentinel.", "engine.", "processes.", "scoring.", "health."),
)


@dataclass(frozen=True, slots=True)
class Again:
    """How a run begins where there was one before. Again(resume=True, step=20, changed_rewards=False, clean=False)"""

    resume: bool
    step: int | None = None  # of the checkpoint to go on from; None: the newest good one
    changed_rewards: bool = False  # files of rewards may be edited
    clean: bool = False  # delete what the run before left

    def __post_init__(self) -> None:
        if self.clean and self.resume:
            raise UsageError("--clean deletes what --resume goes on from; leave one of them out")


def reopen(path: Path, loaded: LoadedRecipe, resolved: str) -> RunDirectory:
    """The directory of an earlier attempt at the same run.

    Raises:
        UsageError: no run is there, or the recipe says another run.
    """
    directory = RunDirectory.reopen(path)
    try:
        free = MAY_CHANGE if loaded.recipe.optim.schedule != "constant" else (STEPS, *MAY_CHANGE)
        if changed := changes(yaml.safe_load(read_text(directory.resolved)), yaml.safe_load(resolved), free):
            raise UsageError(
                f"--resume: {path} was another run:\n"
                + "\n".join(f"  {line}" for line in changed)
                + f"\nOnly {', '.join(key.removesuffix('.') for key in free)} may change. Undo this, or start under another name"
            )
        write_text(directory.resolved, resolved)
    except BaseException:
        directory.close()
        raise
    return directory


def changes(before: Any, now: Any, free: tuple[str, ...]) -> list[str]:
    """["run.seed: 0 -> 1", ...]: the values that differ, but those of `free`."""
    was, is_ = flat(before), flat(now)
    return [
        f"{key}: {was.get(key, 'unset')} -> {is_.get(key, 'unset')}"
        for key in sorted(was.keys() | is_.keys())
        if was.get(key) != is_.get(key) and not key.startswith(free)
    ]


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """{"run.seed": 0, "rewards[1].weight": 0.1, ...}"""
    if isinstance(data, dict) and data:
        return {k: v for key, value in data.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}
    if isinstance(data, list) and any(isinstance(value, dict) for value in data):
        return {k: v for place, value in enumerate(data) for k, v in flat(value, f"{prefix}[{place}]").items()}
    return {prefix: data}
