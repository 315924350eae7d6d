"""Holds the options of an attempt that are not part of the recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlgen.callbacks import Callback
from rlgen.errors import UsageError
from rlgen.run.console import Progress


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
