"""`checkpoints/`: which there are, which is good, and how old ones go without a moment in which there is none.

step_000020/             a checkpoint; complete once it has its name and its manifest
set_aside/step_000030/   one that a run did not go on from: damaged, or later than the step that was asked for
.writing_, .removing_    begun and not ended; swept at the next start
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlgen.errors import CheckpointError, DamagedCheckpoint, UsageError
from rlgen.files import flush, written
from rlgen.run.manifest import check_files

WRITING, REMOVING, ASIDE = ".writing_", ".removing_", "set_aside"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run goes on from. Choice(step=20, path=.../step_000020, later=(.../step_000030,), notices=("...",))"""

    step: int  # 0: none was written yet
    path: Path | None
    later: tuple[Path, ...]  # what the run does not go on from
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shelf:
    """The checkpoints of one run. Whoever changes it holds the lock of the run's directory."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def steps(self) -> dict[int, Path]:
        """Everything that has the name of a checkpoint, oldest first."""
        names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.folder.glob("step_*"))
        return dict(sorted((int(match[1]), path) for match, path in names if match))

    def has(self, step: int) -> bool:
        """Whether a complete checkpoint of `step` is there."""
        return is_complete(self.path(step))

    def choose(self, step: int | None) -> Choice:
        """The newest good checkpoint, or that of `step`; every byte of it has been read.

        Raises:
            UsageError: there is none of `step`.
            DamagedCheckpoint: there are some, and none is good; or that of `step` is not.
            CheckpointError: it is of another format.
        """
        found = self.steps()
        if step is not None and step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise UsageError(f"--resume-step {step}: {self.folder} has no checkpoint of that step; there are: {there}")
        damaged: list[str] = []
        for number in [step] if step is not None else reversed(found):
            try:
                check_files(found[number], hashes=True)
            except DamagedCheckpoint as error:
                damaged.append(str(error))
                continue
            later = tuple(path for other, path in found.items() if other > number)
            notices = tuple(f"DAMAGED CHECKPOINT: {text}; going on from step {number} instead" for text in damaged)
            return Choice(step=number, path=found[number], later=later, notices=notices)
        if damaged:
            raise DamagedCheckpoint(
                "no good checkpoint to go on from: " + "; ".join(damaged) + ". Bring the files back, name another with"
                " --resume-step, or start again with --clean"
            )
        return Choice(step=0, path=None, later=(), notices=())

    def rotate(self, keep: int) -> list[Path]:
        """Removes what is older than the `keep` newest complete ones, which are looked at again; what was removed."""
        found = self.steps()
        kept = [step for step, path in found.items() if is_complete(path)][-keep:]
        old = [path for step, path in found.items() if kept and step < kept[0]]
        for path in old:
            self.remove(path)
        return old

    def remove(self, path: Path) -> None:
        """Takes the name away first: a crash in between leaves no half checkpoint, but what `sweep` removes."""
        doomed = self.folder / f"{REMOVING}{path.name}"
        with written(path):
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            flush(self.folder)
        shutil.rmtree(doomed, ignore_errors=True)  # what a slow disk keeps is swept later

    def set_aside(self, path: Path) -> Path:
        """Keeps a checkpoint out of the run's way: it holds no step of it any more."""
        place, number = self.folder / ASIDE / path.name, 1
        with written(place):
            place.parent.mkdir(exist_ok=True)
            while place.exists():
                number += 1
                place = place.with_name(f"{path.name}.{number}")
            path.rename(place)
            flush(self.folder)
        return place

    def aside(self) -> list[Path]:
        """What was set aside."""
        return sorted((self.folder / ASIDE).glob("step_*"))

    def leftovers(self) -> Iterator[Path]:
        """Of saves and removals that did not end."""
        for beginning in (WRITING, REMOVING):
            yield from self.folder.glob(f"{beginning}*")

    def sweep(self) -> None:
        """Removes the leftovers."""
        for path in list(self.leftovers()):
            shutil.rmtree(path, ignore_errors=True)


def is_complete(path: Path) -> bool:
    try:
        check_files(path, hashes=False)
    except CheckpointError:
        return False
    return True
