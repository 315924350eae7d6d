"""Processes compute the gradient of a policy together: `parallel_worker.py OUTPUT tensor:2:NAME context:2:NAME...`

Process 0 writes how far it is from the gradient that one process computes, for each way, size of a group, and model: the name of
a tiny one, or a folder.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.samples import TEXTS, make_sample
from sharded_opening_worker import sharded
from torch import Tensor

from rlgen.errors import SetupError
from rlgen.files import write_json
from rlgen.models.parts import part, whole
from rlgen.models.policy import Policy
from rlgen.models.sharding import Meshes
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.setup.policy import build_policy, build_shards
from rlgen.setup.settings import TrainSettings
from rlgen.types import WHOLE, MicroBatch


def batch_of(rank: int) -> MicroBatch:
    """The rows of a process: their number and their lengths differ, and two have the same prompt."""
    draw = torch.Generator().manual_seed(rank)
    lengths = torch.randint(3, 20, (rank + 3,), generator=draw).tolist()
    ids = torch.randint(3, 250, (64,), generator=draw).tolist()
    rows = [
        make_sample(
            group_id=max(row, 1),
            prompt_ids=ids[: 5 + max(row, 1)],
            completion_ids=ids[row : row + length],
            sampler_logp=(-1.0,) * length,
        )
        for row, length in enumerate(lengths)
    ]
    return collate(Samples.of(rows, ()), range(len(rows)), torch.device("cpu"))


def gradient(policy: Policy, batches: list[MicroBatch]) -> Iterator[tuple[str, Tensor]]:
    """Of the sum over all tokens, each with another weight, of two passes over the batches."""
    for batch in (*batches, *reversed(batches)):
        logp = policy(batch, (WHOLE,)).logp[0]
        (logp * torch.arange(logp.numel()).view(logp.shape).cos()).sum().backward()
    for name, parameter in policy.named_parameters():
        grad = parameter.grad
        yield name, torch.zeros(parameter.shape) if grad is None else whole(grad)


def farthest(found: Iterable[tuple[str, Tensor]], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference in each tensor, relative to its largest element."""
    return {
        name: ((tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3)).item()
        for name, tensor in found
    }


def kept(policy: Policy, rows: int) -> int:
    """Bytes that a forward pass keeps for the backward one, of rows of 400 tokens."""
    storages: dict[int, Any] = {}
    weights = {part(parameter).untyped_storage()._cdata for parameter in policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    own = [make_sample(completion_ids=(7,) * 398, sampler_logp=(-1.0,) * 398)] * rows
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(collate(Samples.of(own, ()), range(rows), torch.device("cpu")), (WHOLE,))
    return sum(storage.nbytes() for storage in storages.values())


def main(output: str, *asked: str) -> None:
    torch.set_num_threads(1)
    processes = Processes.open(timeout=60)
    found, bytes_kept, digests = dict[str, Any](), dict[str, list[int]](), list[list[str]]()
    for one in asked:
        way, size, name = one.split(":")
        folder = name if name.startswith("/") else str(build_tiny(name))
        settings = TrainSettings.of(sharded(folder), folder, TEXTS)
        alone = build_policy(settings, processes.device)
        alone.unpack("")
        try:
            policy = build_shards(settings, Meshes.of(processes, **{way: int(size)}), True, print)
            policy.unpack("")
            digests.append([bits(alone.model, processes), bits(policy.model, processes)])
            for packed in (False, True) if way == "tensor" else (True,):
                if packed and (refused := policy.pack(TEXTS) or alone.pack(TEXTS)):
                    found[f"{one}:packed"] = refused
                    break
                policy.zero_grad()
                alone.zero_grad()
                expected = dict(gradient(alone, [batch_of(rank) for rank in range(processes.world)]))
                found[f"{one}{':packed' * packed}"] = farthest(gradient(policy, [batch_of(processes.rank)]), expected)
            if way == "context" and isinstance(found.get(f"{one}:packed"), dict):  # one row of the first process
                bytes_kept[one] = [kept(alone, 1), *processes.gather([kept(policy, int(processes.is_main))])]
        except SetupError as error:
            found[one] = str(error)
    if processes.is_main:
        write_json(Path(output), {"apart": found, "kept": bytes_kept, "digests": digests})
    processes.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
