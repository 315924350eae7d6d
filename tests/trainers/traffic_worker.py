"""`rlgen train` as one of several processes, which prints the bytes that it received in each step: traffic_worker.py train …"""

import json
import os
import sys
from typing import Any

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
    trained, before = [0], [0]

    def built(builder: TrainBatchBuilder, *arguments: Any) -> Any:
        found = build(builder, *arguments)
        trained[0] = bytes_of(found[0])
        return found

    def ended(report: Reporter, step: int, *arguments: Any) -> Any:
        received = report.processes.traffic.received
        line = {"step": step, "rank": report.processes.rank, "received": received - before[0], "rows": trained[0]}
        os.write(SCREEN, f"TRAFFIC {json.dumps(line)}\n".encode())
        before[0] = received
        return metrics(report, step, *arguments)

    TrainBatchBuilder.build, Reporter.metrics = built, ended  # type: ignore[method-assign]


if __name__ == "__main__":
    count()
    sys.exit(main())
