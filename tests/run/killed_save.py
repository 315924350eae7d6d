"""Saves that are killed at each of their writes: killed_save.py FOLDER whole|sharded EVERY

One process forks at each instant a child that dies there by SIGKILL; what it had written last is whole,
or, as after a power cut, half there. Prints a JSON object for each: what was done to it, and what is left.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.instants import Instants, in_child
from helpers.train_state import equal, learn, parts, save_parts, state
from transformers.utils.logging import disable_progress_bar

from rlgen.models import lora
from rlgen.processes import Processes
from rlgen.run import writing
from rlgen.run.checkpoint import Checkpoints, load_checkpoint

ALONE = Processes.alone()


def halve_tensors(instants: Instants) -> None:
    """More instants: before and in the middle of each file of tensors."""
    import transformers.modeling_utils as library

    def halved(save: Callable[..., None]) -> Callable[..., None]:
        def saves(tensors: Any, path: Any, *values: Any, **named: Any) -> None:
            instants.reached(f"before {Path(path).name}")
            save(tensors, path, *values, **named)
            instants.last = str(path)
            instants.reached(f"in {Path(path).name}", halve=True)

        return saves

    for module, name in ((writing, "save_file"), (lora, "save_file"), (library, "safe_save_file")):
        setattr(module, name, halved(getattr(module, name)))


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
            load_checkpoint(later, *own)
        instants = Instants(place, fatal, torn)
        halve_tensors(instants)
        save_parts(Checkpoints(place, 1, ALONE), 2, own)
        os.write(1, f"{instants.count}\n".encode())
        return 0

    def same(path: Path, step: int) -> bool:
        assert load_checkpoint(path, *again).step == step
        return equal(state(*again), states[step])

    shutil.copytree(folder / "before", folder / "counted")
    status, counted = in_child(lambda: killed(folder / "counted", None, False))
    assert status == 0, counted
    for index, torn in itertools.product(range(0, int(counted), every), (False, True)):
        place = folder / f"killed_{index}_{torn}"
        shutil.copytree(folder / "before", place)
        status, what = in_child(lambda place=place, index=index, torn=torn: killed(place, index, torn))  # type: ignore[misc]
        left = sorted(path.name for path in place.iterdir())
        # the next start: leftovers go, and the step is saved
        checkpoints = Checkpoints(place, 1, ALONE)
        choice = checkpoints.choose()
        assert choice.path is not None
        row = {"instant": index, "of": int(counted), "torn": torn, "what": what, "signal": status, "left": left}
        row |= {"step": choice.step, "notices": choice.notices, "equal": same(choice.path, choice.step)}
        if not checkpoints.folder.has(2):
            save_parts(checkpoints, 2, mine)
        checkpoints.folder.rotate(1)
        row["after"] = sorted(path.name for path in place.iterdir())
        row["equal_after"] = same(place / "step_000002", 2)
        print(json.dumps(row), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
