"""Four processes add up gradients in each way, and count what they send for it: torchrun sync_worker.py OUTPUT"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.batches import default_dtype
from split_worker import ALGORITHMS, ALL, gradients, train_batch_of

from rlgen.processes import Processes

# What processes share the weights (None: all), and whether gradients are sent after the last micro-batch only.
WAYS = [(None, False), (None, True), (2, False), (2, True)]
NAME, DTYPE = "dapo", torch.float64


@contextmanager
def counted(processes: Processes) -> Iterator[dict[str, int]]:
    """Counts the reduce-scatters and all-reduces of tensors inside the block, without those of rlgen's own group."""
    found = {"reduce_scatter_single": 0, "all_reduce": 0}

    def counted_call(name: str, original: Any, *arguments: Any, **options: Any) -> Any:
        found[name] += options.get("group") is not processes.group
        return original(*arguments, **options)

    calls = {name: partial(counted_call, name, getattr(dist, name)) for name in found}
    with patch.multiple(dist, **calls):
        yield found


def main(output: str) -> None:
    torch.set_num_threads(1)
    processes, found = Processes.open(timeout=60), {}
    with default_dtype(DTYPE):
        train_batch = train_batch_of(ALGORITHMS[NAME], DTYPE, ALL, processes)
        for count, defer in WAYS:
            with counted(processes) as sent:
                gradient = gradients(ALGORITHMS[NAME], DTYPE, train_batch, processes, True, count, defer)
            found[count, defer] = gradient, sent
    if processes.is_main:
        torch.save((found, len(train_batch.micro_batches)), output)
    processes.close()


if __name__ == "__main__":
    main(sys.argv[1])
