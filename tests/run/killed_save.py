"""Saves that are killed at each of their writes: killed_save.py FOLDER whole|sharded EVERY

An instant is just before a file is opened to be written, flushed, renamed or removed, a folder made or removed, and in the middle
of each file of tensors. One process forks at each instant a child that dies there by SIGKILL; what it had written last is whole,
or, as after a power cut, half there. Prints a JSON object for each: what was done to it, and what is left.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.learner import equal, learn, parts, save_parts, state
from transformers.utils.logging import disable_progress_bar

from rlgen.models import lora
from rlgen.processes import Processes
from rlgen.run import writing
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.checkpoint_folder import CheckpointFolder

ALONE = Processes.alone()
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.truncate")


class Instants:
    """Counts the instants of this process, and kills it at one of them."""

    def __init__(self, folder: Path, fatal: int | None, torn: bool) -> None:
        self.folder, self.fatal, self.torn = str(folder), fatal, torn
        self.count = 0
        self.last: str | None = None  # file that was opened to be written
        sys.addaudithook(self.hear)
        flush = os.fsync
        os.fsync = lambda file: (self.reached("fsync"), flush(file))[1]  # type: ignore[assignment]
        import transformers.modeling_utils as library

        for module, name in ((writing, "save_file"), (lora, "save_file"), (library, "safe_save_file")):
            setattr(module, name, self.halved(getattr(module, name)))

    def hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            if isinstance(path, str | Path) and str(path).startswith(self.folder) and flags & (os.O_WRONLY | os.O_RDWR):
                self.reached(f"open {str(path).removeprefix(self.folder)}")
                self.last = str(path)
        elif event in CHANGES:
            self.reached(event)

    def halved(self, save: Callable[..., None]) -> Callable[..., None]:
        def saves(tensors: Any, path: Any, *values: Any, **named: Any) -> None:
            self.reached(f"before {Path(path).name}")
            save(tensors, path, *values, **named)
            self.last = str(path)
            self.reached(f"in {Path(path).name}", halve=True)

        return saves

    def reached(self, what: str, halve: bool = False) -> None:
        if self.count == self.fatal:
            if (halve or self.torn) and self.last and os.path.exists(self.last):
                descriptor = os.open(self.last, os.O_RDONLY)
                size = os.fstat(descriptor).st_size
                os.close(descriptor)
                self.fatal = None  # what follows is no instant
                os.truncate(self.last, size // 2)
            os.write(1, f"{what}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def in_child(work: Callable[[], int]) -> tuple[int, str]:
    """The wait status of a child that runs `work`, and what it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        try:
            os._exit(work())
        except BaseException as error:
            os.write(1, repr(error).encode())
            os._exit(99)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said.strip()


def main(folder: Path, kind: str, every: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    disable_progress_bar()
    mine = parts()
    learn(*mine)
    states = {1: state(*mine)}
    save_parts(Checkpoints(folder / "before", 1, ALONE), 1, mine)
    learn(*mine)
    states[2] = state(*mine)
    later = save_parts(Checkpoints(folder / "later", 1, ALONE), 2, mine)
    again = parts()

    def killed(place: Path, fatal: int | None, torn: bool) -> int:
        own = mine
        if kind == "sharded":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            own = parts(sharded_by=ALONE)
            Checkpoints.load(later, *own, ALONE)
        instants = Instants(place, fatal, torn)
        save_parts(Checkpoints(place, 1, ALONE), 2, own)
        os.write(1, f"{instants.count}\n".encode())
        return 0

    def same(path: Path, step: int) -> bool:
        assert Checkpoints.load(path, *again, ALONE).step == step
        return equal(state(*again), states[step])

    shutil.copytree(folder / "before", folder / "counted")
    status, counted = in_child(lambda: killed(folder / "counted", None, False))
    assert status == 0, counted
    for index, torn in itertools.product(range(0, int(counted), every), (False, True)):
        place = folder / f"killed_{index}_{torn}"
        shutil.copytree(folder / "before", place)
        status, what = in_child(lambda place=place, index=index, torn=torn: killed(place, index, torn))  # type: ignore[misc]
        left = sorted(path.name for path in place.iterdir())
        choice = CheckpointFolder(place).choose(None)
        assert choice.path is not None
        row = {"instant": index, "of": int(counted), "torn": torn, "what": what, "signal": status, "left": left}
        row |= {"step": choice.step, "notices": choice.notices, "equal": same(choice.path, choice.step)}
        # the next start: leftovers go, and the step is saved
        checkpoints = Checkpoints(place, 1, ALONE)
        checkpoints.choose()
        if not checkpoints.has(2):
            save_parts(checkpoints, 2, mine)
        checkpoints.folder.rotate(1)
        row["after"] = sorted(path.name for path in place.iterdir())
        row["equal_after"] = same(place / "step_000002", 2)
        print(json.dumps(row), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
