"""Two processes: a checkpoint into sharded weights, and out of them. resave.py CHECKPOINT FOLDER"""

import sys
from pathlib import Path

import torch
from conftest import save, tiny_model

from rlgen.models.policy import Policy
from rlgen.models.sharding import mesh_of, shard
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.run.checkpoint import Checkpoints
from rlgen.types import Position


def parts(processes: Processes | None = None):  # type: ignore[no-untyped-def]
    policy = Policy(tiny_model("qwen3"), torch.float32, True)
    if processes is not None:
        shard(policy, mesh_of(processes, None))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return policy.model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def main(checkpoint: Path, folder: Path) -> None:
    processes = Processes.open(60)
    model, optimizer, schedule = parts(processes)
    Checkpoints.load(checkpoint, model, optimizer, schedule, processes)
    save(Checkpoints(folder, 1, processes), Position(2, 10), model, byte_tokenizer(), optimizer, schedule)
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
