"""`rlgen train` as one of several processes, which prints the bytes that it received in each step: traffic_worker.py train …"""

import json
import os
import pickle
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlgen.cli.app import main
from rlgen.trainers.report import Reporter
from rlgen.trainers.train_batch import TrainBatch, TrainBatchBuilder

SCREEN = os.dup(2)  # before a run sends what is printed to its log


def bytes_of(train_batch: TrainBatch) -> int:
    """Bytes of the rows that this process trains."""
    columns = (train_batch.samples.prompt_ids, train_batch.samples.completion_ids, train_batch.samples.sampler_logp)
    return sum(column.values.nbytes for column in columns)


def count() -> None:
    """Prints a JSON object at the end of each step."""
    build, metrics = TrainBatchBuilder.build, Reporter.metrics
    gather, exchange, reduce = dist.all_gather_object, dist.all_to_all_single, dist.all_reduce
    trained, received = [0], [0]

    def gathered(found: list[Any], own: Any, group: Any) -> None:
        gather(found, own, group=group)
        received[0] += sum(len(pickle.dumps(one)) for one in found) - len(pickle.dumps(own))

    def exchanged(found: Tensor, *arguments: Any, **named: Any) -> None:
        exchange(found, *arguments, **named)
        received[0] += len(found)

    def reduced(values: Tensor, *arguments: Any, **named: Any) -> Any:
        received[0] += values.nbytes if "group" in named else 0  # without one they are gradients
        return reduce(values, *arguments, **named)

    def built(builder: TrainBatchBuilder, *arguments: Any) -> Any:
        found = build(builder, *arguments)
        trained[0] = bytes_of(found[0])
        return found

    def ended(report: Reporter, step: int, *arguments: Any) -> Any:
        line = {"step": step, "rank": report.processes.rank, "received": received[0], "rows": trained[0]}
        os.write(SCREEN, f"TRAFFIC {json.dumps(line)}\n".encode())
        received[0] = 0
        return metrics(report, step, *arguments)

    TrainBatchBuilder.build, Reporter.metrics = built, ended  # type: ignore[method-assign]
    dist.all_gather_object, dist.all_to_all_single, dist.all_reduce = gathered, exchanged, reduced


if __name__ == "__main__":
    count()
    sys.exit(main())
