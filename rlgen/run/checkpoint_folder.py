"""Lists, rotates and removes the checkpoints in `checkpoints/`. At no moment is a run without a complete checkpoint.

step_000020/             a checkpoint; complete once it has this name and a manifest
set_aside/step_000030/   a checkpoint that a run did not resume from: damaged, or later than the step that was asked for
.writing_, .removing_    unfinished saves and removals; deleted at the next start
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from rlgen.errors import CheckpointError
from rlgen.files import flush_to_disk, written
from rlgen.run.manifest import check_files

WRITING, REMOVING, ASIDE = ".writing_", ".removing_", "set_aside"


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """The checkpoint to resume from.

    ChosenCheckpoint(step=20, path=.../step_000020, later=(.../step_000030,), notices=("...",))
    """

    step: int = 0  # 0: no checkpoint exists
    path: Path | None = None
    later: tuple[Path, ...] = ()  # newer checkpoints, which the run does not resume from
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoint folder of one run. Whoever changes it must hold the lock of the run's directory."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Returns the temporary folder in which the checkpoint of `step` is written before it is complete."""
        return self.root / f"{WRITING}{step:06d}"

    def steps(self) -> dict[int, Path]:
        """Returns every folder that is named as `path` names a checkpoint, complete or not, by step, oldest first."""
        names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.root.glob("step_*"))
        return dict(sorted((int(match[1]), path) for match, path in names if match and path == self.path(int(match[1]))))

    def begin(self, step: int) -> None:
        """Makes that folder, empty."""
        with written(self.path(step)):
            shutil.rmtree(self.unfinished(step), ignore_errors=True)
            (self.unfinished(step) / "state").mkdir(parents=True)

    def has(self, step: int) -> bool:
        """Returns whether a complete checkpoint of `step` exists. Compares file names and sizes, not hashes."""
        try:
            check_files(self.path(step), hashes=False)
        except CheckpointError:
            return False
        return True

    def rotate(self, keep: int, pinned: int | None = None) -> list[Path]:
        """Removes the checkpoints that are older than the `keep` newest complete ones, except `pinned`; returns their paths.

        Checks which ones are complete just before it removes any.
        """
        found = self.steps()
        kept = [step for step in found if self.has(step)][-keep:]
        old = [path for step, path in found.items() if kept and step < kept[0] and step != pinned]
        for path in old:
            self.remove(path)
        return old

    def remove(self, path: Path) -> None:
        """Renames a checkpoint, then deletes it. After a crash in between, `sweep` deletes the renamed folder."""
        doomed = self.root / f"{REMOVING}{path.name}"
        with written(path):
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            flush_to_disk(self.root)
        shutil.rmtree(doomed, ignore_errors=True)  # what cannot be deleted now is deleted by `sweep` at the next start

    def set_aside(self, path: Path) -> Path:
        """Moves a checkpoint to `set_aside/`, because the run no longer contains its step, and returns its new path."""
        place, number = self.root / ASIDE / path.name, 1
        with written(place):
            place.parent.mkdir(exist_ok=True)
            while place.exists():
                number += 1
                place = place.with_name(f"{path.name}.{number}")
            path.rename(place)
            flush_to_disk(self.root)
        return place

    def aside(self) -> list[Path]:
        return sorted((self.root / ASIDE).glob("step_*"))

    def leftovers(self) -> list[Path]:
        return [path for beginning in (WRITING, REMOVING) for path in self.root.glob(f"{beginning}*")]

    def sweep(self) -> None:
        """Deletes the folders of unfinished saves and removals. Ignores errors: what remains is tried again at the next start."""
        for path in self.leftovers():
            shutil.rmtree(path, ignore_errors=True)
