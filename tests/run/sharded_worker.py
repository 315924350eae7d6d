"""Processes that train one recipe in several ways, one after the other: torchrun sharded_worker.py RECIPE FOLDER DEED...

    train NAME KEY=VALUE...    FOLDER/NAME is then a run directory; the name of a run that is there goes on with it. The recipe is
                               FOLDER/NAME.yaml, where that exists
    widest NAME KEY=VALUE...   trains, too; FOLDER/NAME.json is how many tokens the processes of each computed together at most
    doctor NAME KEY=VALUE...   FOLDER/NAME.json is what the checks of `rlgen doctor` found in each process
    replay NAME STEP           FOLDER/NAME.json is what differs from the step that the run NAME has recorded
    refuse NAME KEY=VALUE...   FOLDER/NAME.json is how each process computes rows, if the last one refuses to pack them
    damage NAME                see `damage`; FOLDER/NAME has the checkpoints, FOLDER/NAME.json what each process resumes from

A deed is one argument, its words separated by blanks.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.before import before
from helpers.damage import flip
from helpers.in_processes import train_in
from helpers.samples import TEXTS

from rlgen.algorithms.registry import build_algorithm
from rlgen.analysis.run import read_run
from rlgen.cli.doctor import climbed
from rlgen.files import write_json
from rlgen.models import policy
from rlgen.models.load import locate
from rlgen.models.parallel import ContextParallel
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.run.checkpoint import Checkpoints
from rlgen.setup.policy import open_policies
from rlgen.setup.replay import Past, replay
from rlgen.setup.settings import TrainSettings


def doctor(recipe: Path, logs: Path, overrides: list[str], processes: Processes) -> Any:
    _, rungs = climbed(load_recipe(recipe, overrides).recipe, logs, print, processes)
    return [[rung.name, rung.verdict] for rung in rungs]


def widest(run: Path, recipe: Path, overrides: list[str], processes: Processes) -> int:
    tokens = list[int]()
    before(ContextParallel, "mine", lambda _, packed, dim: tokens.append(packed.shape[dim]))
    train_in(run, load_recipe(recipe, overrides), processes)
    return max(tokens)


def replayed(run: Path, step: int, processes: Processes) -> Any:
    found = read_run(run)
    past = Past.of(run, found.recipe, found.attempts, found.metrics)
    return {**replay(past, step, None, print, processes).differences}


def refused(recipe: Path, overrides: list[str], processes: Processes) -> Any:
    """As where the same comparison ends otherwise on the GPU of one process."""
    loaded, pack = load_recipe(recipe, overrides).recipe, policy.make_packed

    def refusing(model: Any, prompts: Any, dtype: torch.dtype) -> str | None:
        pack(model, prompts, dtype)  # computes with the others
        model.set_attn_implementation("sdpa")
        return "not on this GPU"

    if processes.rank == processes.world - 1:
        policy.make_packed = refusing
    algorithm = build_algorithm(loaded.trainer)
    opened = open_policies(TrainSettings.of(loaded, locate(loaded.model.path), TEXTS), algorithm, None, processes, None, print)
    policy.make_packed = pack
    assert opened.reference is None or isinstance(opened.reference, policy.Policy)
    both = [one for one in (opened.policy, opened.reference) if one is not None]
    return [[one.packed, one.unpacked, one.model.config._attn_implementation] for one in both]


def damage(folder: Path, processes: Processes) -> Any:
    """Two checkpoints; in the newer one a bit is wrong in a file that the last process has written."""
    from helpers.train_state import learn_together, parts, save_parts  # imports what only this needs

    own, checkpoints = parts(sharded_by=processes), Checkpoints(folder, 9, processes)
    for step in (1, 2):
        learn_together(own)
        path = save_parts(checkpoints, step, own)
    if processes.is_main:
        flip(sorted((path / "state" / "weights").iterdir())[-1], 1)
    processes.gather([None])
    chosen = checkpoints.choose()
    return [chosen.step, [path.name for path in chosen.later], *chosen.notices]


def opened_again(processes: Processes) -> Processes:
    """After a run with vLLM in the process, which has closed the process groups together with its engine."""
    if dist.is_initialized():
        return processes
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    return Processes.open(60)


def main(recipe: Path, folder: Path, deeds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    processes = Processes.open(60)
    for deed in deeds:
        processes = opened_again(processes)
        what, name, *words = deed.split()
        own = folder / f"{name}.yaml"
        if what == "train":
            train_in(folder / name, load_recipe(own if own.exists() else recipe, words), processes)
            continue
        if what == "widest":
            found = widest(folder / name, recipe, words, processes)
        elif what == "doctor":
            found = doctor(recipe, folder, words, processes)
        elif what == "replay":
            found = replayed(folder / name, int(words[0]), processes)
        elif what == "damage":
            found = damage(folder / name, processes)
        else:
            found = refused(recipe, words, processes)
        of_all = processes.gather([found])
        if processes.is_main:
            write_json(folder / f"{name}.json", of_all)
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
