"""MLflow, with the package mlflow-skinny or mlflow."""

import json
import os
import re
import time
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from rlgen.recipe.sinks import MlflowSink
from rlgen.recipe.yaml import by_key
from rlgen.run.sinks.tracker import Numbers, Opening, Table

AT_ONCE = 100  # parameters and metrics of one request; a server takes 100 parameters and 1000 metrics
LONGEST = 500  # characters of a parameter; older servers take no more
ENDED = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    def __init__(self, sink: MlflowSink, opening: Opening) -> None:
        self.client = MlflowClient(sink.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns")
        if opening.id is None:
            found = self.client.get_experiment_by_name(sink.experiment)
            experiment = self.client.create_experiment(sink.experiment) if found is None else found.experiment_id
            self.id: str = self.client.create_run(experiment, tags=sink.tags, run_name=opening.name).info.run_id
            values = list(by_key(opening.config["recipe"]).items())
            for start in range(0, len(values), AT_ONCE):
                params = [Param(accepted(key), as_parameter(value)) for key, value in values[start : start + AT_ONCE]]
                self.client.log_batch(self.id, params=params)
        else:
            self.id = opening.id
            self.client.update_run(self.id, status="RUNNING")
        self.client.log_dict(self.id, opening.config, f"rlgen/from_step_{opening.step + 1:06d}.json")

    def metrics(self, step: int, numbers: Numbers) -> None:
        now, found = int(time.time() * 1000), list(numbers.items())
        for start in range(0, len(found), AT_ONCE):
            batch = [Metric(accepted(key), value, now, step) for key, value in found[start : start + AT_ONCE]]
            self.client.log_batch(self.id, metrics=batch)

    def samples(self, step: int, table: Table) -> None:
        """Writes an artifact with the table, as pandas and MLflow read it."""
        self.client.log_dict(self.id, {"columns": table.columns, "data": table.rows}, f"samples/step_{step:06d}.json")

    def end(self, state: str, exit_code: int) -> None:
        """Ends the run with its status; the tags have state and exit code as rlgen calls them."""
        self.client.log_batch(self.id, tags=[RunTag("rlgen.state", state), RunTag("rlgen.exit_code", str(exit_code))])
        self.client.set_terminated(self.id, ENDED[state])


def accepted(name: str) -> str:
    """Returns a name with `_` for each character that MLflow refuses: eval/pass@1 -> eval/pass_1"""
    return re.sub(r"[^\w.\-:/ ]", "_", name)


def as_parameter(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:LONGEST]
