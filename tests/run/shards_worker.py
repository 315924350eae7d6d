"""Processes that save sharded weights three times: torchrun shards_worker.py FOLDER SMALL MODEL

FOLDER/measure.json then has the bytes and seconds of each process. SMALL is a model on which everything is imported before.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from helpers.anonymous import give_back, watched
from helpers.recipes import recipe_for
from helpers.samples import TEXTS
from helpers.train_state import Parts, position
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from rlgen.algorithms.registry import build_algorithm
from rlgen.files import write_json
from rlgen.models.parts import part
from rlgen.processes import Processes
from rlgen.run.checkpoint import Checkpoints
from rlgen.setup.policy import open_policies
from rlgen.setup.settings import TrainSettings


def measure(folder: Path, model: str, processes: Processes) -> Any:
    recipe = recipe_for(model, engine={"kind": "transformers"}, processes={"strategy": "fsdp"})
    algorithm = build_algorithm(recipe.trainer)
    policy = open_policies(TrainSettings.of(recipe, model, TEXTS), algorithm, None, processes, None, print).policy
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


def main(folder: Path, small: str, model: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    processes = Processes.open(60)
    measure(folder / "small", small, processes)
    found = measure(folder / "large", model, processes)
    if processes.is_main:
        write_json(folder / "measure.json", found)
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
