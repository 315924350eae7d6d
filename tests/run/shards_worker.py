"""Processes that save sharded weights: shards_worker.py WHAT FOLDER ...

learn FOLDER STEP             two updates from the checkpoint of STEP, if that is not 0, and a checkpoint of STEP + 2
damage FOLDER                 checkpoints of steps 1 and 2, a bit of the last process's weights of step 2 changed; choice.json
                              is what each process resumes from
measure FOLDER SMALL MODEL    saves three times; measured.json has bytes and seconds of each process
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from helpers.anonymous import give_back, watched
from helpers.recipes import recipe_for
from helpers.samples import TEXTS
from helpers.train_state import Parts, parts, position, save_parts
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from rlgen.algorithms.registry import build_algorithm
from rlgen.files import write_json
from rlgen.models.parts import part, part_like
from rlgen.processes import Processes
from rlgen.run.checkpoint import Checkpoints
from rlgen.setup.policy import open_policies
from rlgen.setup.settings import TrainSettings


def learn_together(own: Parts) -> None:
    """An update by gradients that follow from the weights, the same in each number of processes."""
    model, optimizer, schedule = own
    for parameter in model.parameters():
        noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) - 0.5
        gradient = parameter.detach().clone()
        part(gradient).add_(part_like(noise, parameter))
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def damage(folder: Path, processes: Processes) -> Any:
    own, checkpoints = parts(sharded_by=processes), Checkpoints(folder, 9, processes)
    for step in (1, 2):
        learn_together(own)
        path = save_parts(checkpoints, step, own)
    if processes.is_main:
        file = sorted((path / "state" / "weights").iterdir())[-1]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    processes.gather([None])
    chosen = checkpoints.choose()
    return processes.gather([[chosen.step, [path.name for path in chosen.later], *chosen.notices]])


def measure(folder: Path, model: str, processes: Processes) -> Any:
    recipe = recipe_for(model, engine={"kind": "transformers"}, processes={"strategy": "fsdp"})
    algorithm = build_algorithm(recipe.trainer)
    policy = open_policies(TrainSettings.of(recipe), model, algorithm, None, processes, None, TEXTS, print).policy
    trained = list(policy.model.parameters())
    optimizer = AdamW(trained, lr=1e-3, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    own: Parts = policy.model, optimizer, LinearLR(optimizer)
    checkpoints, rows = Checkpoints(folder, 1, processes), []
    for step in (1, 2, 3):
        give_back()
        processes.gather([None])
        memory = dict[str, int]()
        with watched(memory):
            began = time.perf_counter()
            checkpoints.save(position(step), *own)
            held = time.perf_counter() - began
            checkpoints.complete(wait=True)
            took = time.perf_counter() - began
        rows.append({"held": held, "took": took, "peak": memory["peak"]})
    shards = 3 * sum(part(one).nbytes for one in trained)
    return processes.gather([{"shards": shards, "saves": rows}])


def main(what: str, folder: Path, *rest: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    processes = Processes.open(60)
    if what == "damage":
        found = damage(folder, processes)
    else:
        measure(folder / "small", rest[0], processes)  # imports what it takes
        found = measure(folder / "large", rest[1], processes)
    if processes.is_main:
        write_json(folder / f"{what}.json", found)
    processes.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
